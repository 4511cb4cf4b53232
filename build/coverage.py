"""Proof that the guards of an operator's variants cover its declared domain.

A guard's truth changes only where one of its comparisons of a dim with a constant does. So the domain is cut at those
constants, and one point a cell decides. Guards that are not made of such comparisons are tried on every point.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from kgen.runtime.errors import BuildError
from kgen.runtime.format.expr import Expr, evaluate, show, symbols_of

MAX_POINTS = 1 << 20
MAX_SM_COUNT = 1024  # more than any GPU has
_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")


def check_coverage(
    name: str, dims: Mapping[str, tuple[int, int]], guards: list[Expr], holes_only: bool = False
) -> None:
    """Raise unless every point of `dims` satisfies a guard and every guard is some point's first.

    Args:
        holes_only: let a guard be that is no point's first.

    Raises:
        BuildError: a hole (the message names a point in it), a variant that never runs, or a domain too large to try.
    """
    firsts, hole = reach(name, dims, guards)
    if hole is not None:
        where = ", ".join(f"{dim}={value}" for dim, value in hole.items())
        raise BuildError(f"{name}: no variant covers {where}; guards: {'; '.join(map(show, guards))}")
    for index, guard in enumerate(guards):
        if index not in firsts and not holes_only:
            raise BuildError(f"{name}: variant {index} ({show(guard)}) can never run: earlier guards cover it")


def reach(name: str, dims: Mapping[str, tuple[int, int]], guards: list[Expr]) -> tuple[set[int], dict[str, int] | None]:
    """Indices of the guards that are the first true one at some point, and a point where none is true, if there is one.

    Raises:
        BuildError: the domain is too large to try.
    """
    if any("sm_count" in symbols_of(guard) for guard in guards):
        dims = {**dims, "sm_count": (1, MAX_SM_COUNT)}
    firsts: set[int] = set()
    hole = None
    for point in _points(name, dims, guards):
        first = next((i for i, guard in enumerate(guards) if evaluate(guard, point)), None)
        if first is not None:
            firsts.add(first)
        elif hole is None:
            hole = point
    return firsts, hole


def _points(name: str, dims: Mapping[str, tuple[int, int]], guards: list[Expr]) -> Iterator[dict[str, int]]:
    cuts: dict[str, set[int]] = {dim: set() for dim in dims}
    simple = all(_collect(guard, cuts) for guard in guards)
    axes: list[range | list[int]] = []
    for dim, (least, most) in dims.items():
        if simple:
            near = {least, most} | {c + d for c in cuts[dim] for d in (-1, 0, 1)}
            axes.append(sorted(value for value in near if least <= value <= most))
        else:
            axes.append(range(least, most + 1))
    count = 1
    for axis in axes:
        count *= len(axis)
    if count > MAX_POINTS:
        raise BuildError(f"{name}: guards compare more than a dim with a constant, and the domain has {count} points")
    for values in itertools.product(*axes):
        yield dict(zip(dims, values, strict=True))


def _collect(guard: Expr, cuts: dict[str, set[int]]) -> bool:
    """Add the constants that `guard` compares dims with; False if it does anything else."""
    if isinstance(guard, int):
        return True
    if isinstance(guard, str):
        return False
    name, *operands = guard
    if name in ("and", "or", "not"):
        return all([_collect(operand, cuts) for operand in operands])
    if name in _COMPARISONS:
        dim, constant = operands if isinstance(operands[0], str) else operands[::-1]
        if isinstance(dim, str) and isinstance(constant, int) and dim in cuts:
            cuts[dim].add(constant)
            return True
    return False
