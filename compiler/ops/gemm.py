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
from kgen.compiler.ops.contract import STRICT, Arrays, Check, Config, Dims, Operator, Work, edges
from kgen.runtime.format.expr import Expr, fold
from kgen.runtime.format.manifest import Tensor

Float16 = Literal["bfloat16", "float16"]
ELEMENT = 2  # bytes
TILE_M, TILE_K = 128, 64
STAGING = TILE_M * 64 * ELEMENT  # bytes of shared memory that the result passes through


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

    @property
    def math(self) -> str:
        return self.a.dtype

    def candidates(self) -> list[tuple[Expr, Config]]:
        n = self.static("n")
        # Walking fewer or more row tiles together differs from 8 only where there are more than that many.
        rasters = [(8, 1), *((raster, fold(">", self.extent("m"), TILE_M * min(raster, 8))) for raster in (4, 16))]
        return [
            (guard, _persistent(tile_n, stages, raster))
            for tile_n in (256, 192, 128, 64)
            if tile_n <= 128 or tile_n - n < 64
            for stages in (_most_stages(tile_n), _most_stages(tile_n) - 1)
            for raster, guard in rasters
            if guard != 0
        ]

    def work(self, config: Config, dims: Dims) -> Work:
        m, n, k = (self.full_dims(dims)[dim] for dim in "mnk")
        tile_m, tile_n, tile_k = (config[f"tile_{dim}"] for dim in "mnk")
        high, wide = min(m, tile_m), min(n, tile_n)  # TMA reads and writes nothing outside of the tensors
        return Work(
            blocks=-(-m // tile_m) * -(-n // tile_n),
            threads=384,
            smem=STAGING + config["stages"] * (tile_m + tile_n) * tile_k * ELEMENT,
            read=(high + wide) * k * ELEMENT,
            written=high * wide * ELEMENT,
            flops=2 * tile_m * tile_n * k,
            registers=168,  # 65,536 / 384, in units of 8
            persistent=True,
        )

    def dispatch(self) -> list[tuple[Expr, Config]]:
        n = self.static("n")
        tile_n = min((256, 192, 128), key=lambda w: (-(-n // w) * w, -w))
        return [(1, _persistent(tile_n, _most_stages(tile_n), 8))]

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

    def flops(self, dims: Dims) -> int:
        m, n, k = (self.full_dims(dims)[dim] for dim in "mnk")
        return 2 * m * n * k


def _persistent(tile_n: int, stages: int, raster: int) -> Config:
    return {
        "form": "persistent",
        "tile_m": TILE_M,
        "tile_n": tile_n,
        "tile_k": TILE_K,
        "stages": stages,
        "raster": raster,
    }


def _most_stages(tile_n: int) -> int:
    """Stages of operands that fit beside the staging of the result."""
    return (227 * 1024 - STAGING) // ((TILE_M + tile_n) * TILE_K * ELEMENT)
