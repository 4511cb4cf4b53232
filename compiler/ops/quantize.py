"""quantize: ``q = clamp(round(x / scale))`` and the scales that undo it.

int8 per channel: a row's scale is ``amax / 127`` (1 where amax is not above 0, so for zero rows and for rows with a
NaN), codes are ``clamp(rne(x / scale), -127, 127)`` with the correctly rounded float32 quotient by the stored scale.
NaN elements have no code of their own: they become 0. An infinite amax stores an infinite scale: finite elements are 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from kgen.compiler.ops import numerics
from kgen.compiler.ops.contract import STRICT, Arrays, Check, Config, Dims, Operator, Work, edges
from kgen.compiler.ops.scaling import scale_tensor
from kgen.runtime.format.expr import Expr
from kgen.runtime.format.manifest import Tensor


@dataclass(frozen=True, kw_only=True)
class X:
    """The input, ``[m, k]``."""

    dtype: Literal["bfloat16", "float16", "float32"]
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class Q:
    """The codes, ``[m, k]``; `scale` says what shares a scale: ``channel`` is a row (``scale`` is ``[m]``)."""

    dtype: Literal["int8"]
    scale: Literal["channel"]
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class Quantize(Operator):
    """Symmetric quantization. Codes are exactly those of true division; scales are correctly rounded."""

    x: X
    q: Q
    __pydantic_config__ = STRICT

    abi: ClassVar[int] = 1
    DIMS: ClassVar[dict[str, str]] = {"m": "rows", "k": "columns: the elements that share a scale"}
    RANGES: ClassVar[tuple[str, ...]] = ("m",)
    input_kinds: ClassVar[tuple[str, ...]] = ("normal", "ties", "heavy", "subnormal", "zeros", "special")

    def tensors(self) -> tuple[Tensor, ...]:
        m, k = self.extent("m"), self.extent("k")
        return (
            self.tensor("x", "in", self.x.dtype, m, k),
            self.tensor("q", "out", self.q.dtype, m, k),
            scale_tensor("scale", "out", self.q.scale, m, k),
        )

    def candidates(self) -> list[tuple[Expr, Config]]:
        ((_, untuned),) = self.dispatch()
        others = [
            {"form": "row", "threads": threads}
            for threads in (64, 128, 256, 512, 1024)
            # Not where half of many threads would hold nothing, nor where a thread's share of the row would spill.
            if (threads == 64 or threads // 2 * self._vector < self.static("k")) and self._registers(threads) <= 255
        ]
        return [(1, untuned), *((1, config) for config in others if config != untuned)]

    def work(self, config: Config, dims: Dims) -> Work:
        full, threads = self.full_dims(dims), config["threads"]
        return Work(
            blocks=full["m"],
            threads=threads,
            smem=4 * threads,  # of the reduction
            read=full["k"] * numerics.itemsize(self.x.dtype),
            written=full["k"] * numerics.itemsize(self.q.dtype) + 4,
            flops=5 * full["k"] + 2,
            registers=min(self._registers(threads), 255),
        )

    @property
    def _vector(self) -> int:
        """Elements a load."""
        vector = 16 // numerics.itemsize(self.x.dtype)
        return vector if self.static("k") % vector == 0 else 1

    def _registers(self, threads: int) -> int:
        """A thread's, without spills: for rows of whole vectors within 25 % of what ptxas reports."""
        elements = -(-self.static("k") // (threads * self._vector)) * self._vector
        return 16 + elements * numerics.itemsize(self.x.dtype) // 2

    def dispatch(self) -> list[tuple[Expr, Config]]:
        return [(1, {"form": "row", "threads": 128 if self.static("k") <= 8192 else 256})]

    def inputs(self, dims: Dims, rng: np.random.Generator, kind: str) -> Arrays:
        full = self.full_dims(dims)
        return {"x": numerics.random(rng, kind, (full["m"], full["k"]), self.x.dtype)}

    def check(self, dims: Dims, inputs: Arrays, outputs: Arrays, rng: np.random.Generator) -> list[Check]:
        q, scale = self.reference(inputs["x"])
        return [numerics.check_equal("scale", outputs["scale"], scale), numerics.check_equal("q", outputs["q"], q)]

    def reference(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``(q, scale)`` for x ``[m, k]``: float32 division is IEEE in numpy, which is what the contract asks."""
        x = x.astype(np.float32)
        with np.errstate(all="ignore"):
            amax = np.max(np.abs(x), axis=1)
            scale = np.where(amax > 0, amax / np.float32(127), np.float32(1))
            codes = np.rint(x / scale[:, None])
            q = np.where(np.isnan(codes), 0, np.clip(codes, -127, 127)).astype(np.int8)
        return q, scale

    def edge_dims(self) -> list[dict[str, int]]:
        least, most = self.dims["m"]
        return [] if least == most else [{"m": m} for m in edges(least, most) if m * self.static("k") <= 1 << 28]

    def flops(self, dims: Dims) -> int:
        full = self.full_dims(dims)
        return full["m"] * (5 * full["k"] + 2)
