"""gemm: ``out = a · b`` for 16-bit operands, accumulated in float32 and rounded once.

``a`` is ``[m, k]``. ``b`` is ``[n, k]`` with ``major: k`` (the layout of a torch Linear weight, "nt") or ``[k, n]``
with ``major: n`` ("nn"). ``out`` is ``[m, n]``. All row-major and contiguous; m may be a range.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from kgen.compiler.ops import numerics
from kgen.compiler.ops.contract import STRICT, Arrays, Check, Config, Dims, Operator, edges
from kgen.runtime.format.expr import Expr
from kgen.runtime.format.manifest import Tensor

Float16 = Literal["bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class A:
    """The left operand, ``[m, k]``."""

    dtype: Float16
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class B:
    """The right operand: ``[n, k]`` where `major` is k, ``[k, n]`` where it is n."""

    dtype: Float16
    major: Literal["k", "n"] = "k"
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class Out:
    """The result, ``[m, n]``."""

    dtype: Float16
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class Gemm(Operator):
    """Matrix product. Errors against float64 stay under 2e-3 (float16) and 1e-2 (bfloat16) of the Frobenius norm."""

    a: A
    b: B
    out: Out
    __pydantic_config__ = STRICT

    abi: ClassVar[int] = 1
    DIMS: ClassVar[dict[str, str]] = {
        "m": "rows of a and out",
        "n": "columns of out",
        "k": "the dim that is summed over",
    }
    RANGES: ClassVar[tuple[str, ...]] = ("m",)
    input_kinds: ClassVar[tuple[str, ...]] = ("normal", "integers")

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        for field in ("b", "out"):
            if getattr(self, field).dtype != self.a.dtype:
                yield (field, "dtype"), f"must equal a.dtype ({self.a.dtype}): mixed operands are not supported"
        for dim in ("n", "k"):
            if self.static(dim) % 8:
                yield ("dims", dim), f"{self.static(dim)} is not a multiple of 8: TMA needs rows of 16-byte multiples"

    def tensors(self) -> tuple[Tensor, ...]:
        m, n, k = map(self.extent, "mnk")
        b = (n, k) if self.b.major == "k" else (k, n)
        return (
            self.tensor("a", "in", self.a.dtype, m, k),
            self.tensor("b", "in", self.b.dtype, *b),
            self.tensor("out", "out", self.out.dtype, m, n),
        )

    def candidates(self) -> list[Config]:
        n = self.static("n")
        widths = [w for w in (256, 192, 128) if w <= max(128, n)]
        return [
            {"form": "persistent", "tile_m": 128, "tile_n": tile_n, "tile_k": 64, "stages": stages, "raster": raster}
            for tile_n in widths
            for stages in (4, 5, 6)
            for raster in (8, 16)
            if stages * (128 + tile_n) * 64 * 2 + 16384 <= 227 * 1024
        ]

    def dispatch(self) -> list[tuple[Expr, Config]]:
        n = self.static("n")
        tile_n = min((256, 192, 128), key=lambda w: (-(-n // w) * w, -w))
        stages = {256: 4, 192: 5, 128: 6}[tile_n]
        return [
            (1, {"form": "persistent", "tile_m": 128, "tile_n": tile_n, "tile_k": 64, "stages": stages, "raster": 8})
        ]

    def inputs(self, dims: Dims, rng: np.random.Generator, kind: str) -> Arrays:
        """``normal``: N(0, 1). ``integers``: in -2..2, so that every product is exact and a lost one is seen."""
        return {
            t.name: numerics.random(rng, kind, numerics.shape(t, self.full_dims(dims)), t.dtype)
            for t in self.tensors()
            if t.role == "in"
        }

    def check(self, dims: Dims, inputs: Arrays, outputs: Arrays, rng: np.random.Generator) -> list[Check]:
        b = inputs["b"].T if self.b.major == "k" else inputs["b"]
        return numerics.check_product("out", inputs["a"], b, outputs["out"], self.out.dtype, rng)

    def edge_dims(self) -> list[dict[str, int]]:
        least, most = self.dims["m"]
        return [] if least == most else [{"m": m} for m in edges(least, most, 64, 128)]

    def bytes_moved(self, dims: Dims) -> int:
        m, n, k = (self.full_dims(dims)[dim] for dim in "mnk")
        return 2 * (m * k + n * k + m * n)

    def flops(self, dims: Dims) -> int:
        m, n, k = (self.full_dims(dims)[dim] for dim in "mnk")
        return 2 * m * n * k
