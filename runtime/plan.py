"""Choosing a variant: which program runs for these dims, and why the others do not. Needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kgen.runtime.errors import UnsupportedShape
from kgen.runtime.format.expr import evaluate, show
from kgen.runtime.format.manifest import Operator, Variant


class Selection(NamedTuple):
    """A variant chosen for `symbols`: every dim and ``sm_count``."""

    operator: Operator
    target: str
    symbols: dict[str, int]
    index: int
    variant: Variant

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory that the call needs besides its tensors."""
        return evaluate(self.variant.program.workspace_bytes, self.symbols)

    def explain(self) -> str:
        """One line a variant: the one that runs, and the guards that refused the others."""
        lines = []
        for index, variant in enumerate(self.operator.variants):
            if variant.target != self.target:
                why = f"not for this device (target {variant.target})"
            elif index < self.index:
                why = f"refused: {show(variant.guard)} is false"
            elif index == self.index:
                why = "runs" if variant.guard == 1 else f"runs: {show(variant.guard)}"
            else:
                why = "not reached: an earlier variant runs"
            config = " ".join(f"{key}={value}" for key, value in variant.config.items())
            lines.append(f"{'→' if index == self.index else ' '} variant {index} [{config}] {why}")
        return "\n".join(lines)


def select(operator: Operator, target: str, sm_count: int, dims: Mapping[str, int]) -> Selection:
    """The first variant for `target` whose guard is true.

    Args:
        dims: a value for every range dim; static dims may be given too.

    Raises:
        UnsupportedShape: a dim is missing, unknown, no integer or outside its declared range, or no variant covers it.
    """
    symbols = {**complete(operator, dims), "sm_count": sm_count}
    index = next(applicable(operator, target, symbols), None)
    if index is None:
        raise UnsupportedShape(
            f"{operator.name}: no variant for {target} covers {_show(dims)}; guards: "
            + "; ".join(show(variant.guard) for variant in operator.variants if variant.target == target)
        )
    return Selection(operator, target, symbols, index, operator.variants[index])


def select_each(operator: Operator, target: str, sm_count: int, dims: Mapping[str, int]) -> Iterator[Selection]:
    """Every variant for `target` whose guard is true: what tuning chooses from. Raises as `select` does."""
    symbols = {**complete(operator, dims), "sm_count": sm_count}
    for index in applicable(operator, target, symbols):
        yield Selection(operator, target, symbols, index, operator.variants[index])


def applicable(operator: Operator, target: str, symbols: Mapping[str, int]) -> Iterator[int]:
    """Indices of the variants for `target` whose guards are true at `symbols`, in order."""
    for index, variant in enumerate(operator.variants):
        if variant.target == target and evaluate(variant.guard, symbols):
            yield index


def complete(operator: Operator, dims: Mapping[str, int]) -> dict[str, int]:
    """A value for every dim, in the operator's order. Raises as `select` does for what is wrong with `dims`."""
    unknown = sorted(set(dims) - set(operator.dims))
    if unknown:
        raise UnsupportedShape(f"{operator.name} has no dim {unknown[0]!r}; its dims: {', '.join(operator.dims)}")
    complete = {}
    for dim, (least, most) in operator.dims.items():
        if least == most and dim not in dims:
            complete[dim] = least
            continue
        if dim not in dims:
            raise UnsupportedShape(f"{operator.name}: dim {dim} is missing; it may be {least}..{most}")
        value = dims[dim]
        if isinstance(value, bool) or not isinstance(value, int):
            raise UnsupportedShape(f"{operator.name}: {dim}={value!r} is not an integer")
        if not least <= value <= most:
            allowed = f"{least}..{most}" if least != most else str(least)
            raise UnsupportedShape(
                f"{operator.name}: {dim}={value} is outside the declared {allowed}: widen the spec's range and rebuild"
            )
        complete[dim] = value
    return complete


def _show(dims: Mapping[str, int]) -> str:
    return ", ".join(f"{dim}={value}" for dim, value in dims.items())
