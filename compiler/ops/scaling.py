"""The one vocabulary of scaling, for quantize, dequantize and every product that reads scaled operands.

A matrix ``[rows, columns]`` (columns is what a product sums over) has scales that are multipliers: x = q · scale.
``tensor``: one for all. ``channel``: one a row. ``{group: g}``: one for each g columns of a row. ``{block: [r, c]}``:
one for each r × c tile. Groups and blocks at the edges are shorter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from kgen.compiler.ops.contract import STRICT
from kgen.runtime.format.dtypes import DTYPES
from kgen.runtime.format.expr import Expr, fold
from kgen.runtime.format.manifest import Tensor

ScaleDtype = Literal["float32", "float8_e8m0fnu"]
Major = Literal["row", "column"]


@dataclass(frozen=True, kw_only=True)
class Group:
    """One scale for each `group` columns of a row: ``[rows, ceildiv(columns, group)]``.

    `major` is the order in memory: ``row``, or ``column`` (a column of scales is contiguous and starts at a multiple of
    16 bytes, as TMA wants it).
    """

    group: int
    dtype: ScaleDtype = "float32"
    major: Major = "row"
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class Block:
    """One scale for each tile of `block` rows × columns: ``[ceildiv(rows, r), ceildiv(columns, c)]``."""

    block: tuple[int, int]
    dtype: ScaleDtype = "float32"
    major: Major = "row"
    __pydantic_config__ = STRICT


Scale = Literal["tensor", "channel"] | Group | Block


def scale_tensor(name: str, role: str, scale: Scale, rows: Expr, columns: Expr) -> Tensor:
    """The tensor of a matrix' scales. Its alignment is that of an element."""
    dtype, major = ("float32", "row") if isinstance(scale, str) else (scale.dtype, scale.major)
    align = 4 if dtype == "float32" else 1
    if scale == "tensor":
        return Tensor(name, role, dtype, (1,), (1,), align)
    if scale == "channel":
        return Tensor(name, role, dtype, (rows,), (1,), align)
    high, wide = tile(scale, rows, columns)
    shape = (fold("ceildiv", rows, high), fold("ceildiv", columns, wide))
    strides = (shape[1], 1) if major == "row" else (1, fold("align", shape[0], column_unit(dtype)))
    return Tensor(name, role, dtype, shape, strides, align)


def tile(scale: Scale, rows: Any, columns: Any) -> tuple[Any, Any]:
    """Rows and columns that share a scale, of a matrix of so many."""
    match scale:
        case Group():
            return 1, scale.group
        case Block():
            return scale.block
        case "channel":
            return 1, columns
        case _:
            return rows, columns


class ScaleStorage(NamedTuple):
    """Where the scale of (row, group) lies in memory.

    Attributes:
        dtype: of a scale.
        groups: a row has.
        column_major: whether the scales of a column of groups are contiguous.
    """

    dtype: str
    groups: int
    column_major: bool

    @property
    def kernel_dtype(self) -> str:
        """What a kernel writes: a power of two's exponent as a byte."""
        return "uint8" if self.dtype == "float8_e8m0fnu" else self.dtype

    @classmethod
    def of(cls, scale: Scale, groups: int) -> ScaleStorage:
        if isinstance(scale, str):
            return cls("float32", groups, False)
        return cls(scale.dtype, groups, scale.major == "column")

    def at(self, row: Any, group: Any, rows: Any) -> Any:
        """The element's index; works on integers and on a kernel's expressions."""
        if self.column_major:
            return group * (-(-rows // column_unit(self.dtype)) * column_unit(self.dtype)) + row
        return row * self.groups + group


def column_unit(dtype: ScaleDtype) -> int:
    """Columns of scales start at multiples of so many elements: of 16 bytes, as TMA wants it."""
    return 16 // DTYPES[dtype].bytes


def group_amax(x: np.ndarray, scale: Scale) -> np.ndarray:
    """The largest magnitude of each group of x ``[rows, columns]``, in the shape of its scales; NaN where one is."""
    high, wide = tile(scale, *x.shape)
    rows, columns = -(-x.shape[0] // high), -(-x.shape[1] // wide)
    sizes = np.abs(x)
    if x.shape != (rows * high, columns * wide):
        sizes = np.pad(sizes, ((0, rows * high - x.shape[0]), (0, columns * wide - x.shape[1])))
    amax = sizes.reshape(rows, high, columns, wide).max(axis=(1, 3))
    return amax.reshape(-1) if isinstance(scale, str) else amax


def expand(scales: np.ndarray, scale: Scale, shape: tuple[int, int]) -> np.ndarray:
    """Scales as a matrix that goes with elements of a matrix of that shape."""
    if scale == "tensor":
        return scales.reshape(1, 1)
    if scale == "channel":
        return scales[:, None]
    high, wide = tile(scale, *shape)
    return np.repeat(np.repeat(scales, high, axis=0), wide, axis=1)[: shape[0], : shape[1]]
