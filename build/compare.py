"""What checks, and the bits of two arrays of a shape and dtype, say: sentences that name an element."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kgen.compiler.ops.contract import Check


def explain(check: Check) -> str:
    """What a check that is not ok found."""
    where = f", worst at {list(check.worst)}: got {check.got:g}, expected {check.expected:g}" if check.worst else ""
    return f"{check.output}: {check.measure} {check.error:g} exceeds {check.limit:g}{where}"


def runs(
    name: str, first: np.ndarray, again: np.ndarray, poisons: tuple[int, int], deterministic: bool
) -> Iterator[str]:
    """What is wrong with an output of two runs over memory filled with two different bytes.

    Args:
        deterministic: whether every element must have the same bits in both; unwritten ones are wrong anyhow.
    """
    differ = bits(first) != bits(again)
    unwritten = differ.copy()
    for array, byte in zip((first, again), poisons, strict=True):
        unwritten &= bits(array) == bits(np.full(array.itemsize, byte, np.uint8).view(array.dtype))
    if unwritten.any():
        yield f"{name}: {_count(unwritten)} elements are never written, the first at {list(_first(unwritten))}"
    unsteady = differ & ~unwritten
    if deterministic and unsteady.any():
        at = _first(unsteady)
        yield (
            f"{name}: {_count(unsteady)} elements differ from run to run, the first at {list(at)}: {first[at]}, then "
            f"{again[at]}: a race, or memory that is read before it is written"
        )


def changed(name: str, before: np.ndarray, after: np.ndarray) -> Iterator[str]:
    """What is wrong with an input after a run."""
    differ = bits(before) != bits(after)
    if differ.any():
        at = _first(differ)
        yield (
            f"{name}: {_count(differ)} elements of this input were changed, the first at {list(at)}: {before[at]} "
            f"became {after[at]}"
        )


def bits(array: np.ndarray) -> np.ndarray:
    """The array as unsigned integers, so that NaN equals itself and 0 does not equal -0."""
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


def _count(mask: np.ndarray) -> str:
    return f"{np.count_nonzero(mask)} of {mask.size}"


def _first(mask: np.ndarray) -> tuple[int, ...]:
    """Index of the first true element."""
    return tuple(int(i) for i in np.unravel_index(np.argmax(mask), mask.shape))
