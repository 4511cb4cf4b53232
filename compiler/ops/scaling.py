"""The one vocabulary of scaling, for quantize, dequantize and every product that reads scaled operands.

A matrix ``[rows, columns]`` (columns is what a product sums over) has scales that are multipliers: x = q · scale.
``tensor``: one for all. ``channel``: one a row. ``{group: g}``: one for each g columns of a row. ``{block: [r, c]}``:
one for each r × c tile. Groups and blocks at the edges are shorter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kgen.compiler.ops.contract import STRICT
from kgen.runtime.format.expr import Expr, fold
from kgen.runtime.format.manifest import Tensor

ScaleDtype = Literal["float32", "float8_e8m0fnu"]
Major = Literal["row", "column"]


@dataclass(frozen=True, kw_only=True)
class Group:
    """One scale for each `group` columns of a row: ``[rows, ceildiv(columns, group)]``.

    `major` is the order in memory: ``row``, or ``column`` (a column of scales is contiguous, as TMA wants it).
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
    high, wide = (1, scale.group) if isinstance(scale, Group) else scale.block
    shape = (fold("ceildiv", rows, high), fold("ceildiv", columns, wide))
    strides = (shape[1], 1) if major == "row" else (1, shape[0])
    return Tensor(name, role, dtype, shape, strides, align)
