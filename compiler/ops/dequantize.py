"""dequantize: ``x = q · scale``, for the codes that `kgen.compiler.ops.quantize` writes.

The product is float32, rounded once to x's dtype.
int4 (DeepSpeed's asymmetric format) is ``x = code · step + offset``, each rounded to float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from kgen.compiler.ops import numerics
from kgen.compiler.ops.contract import STRICT, Arrays, Check, Config, Dims, Operator, Work, row_edges, uncountable
from kgen.compiler.ops.quantize import Float
from kgen.compiler.ops.scaling import Group, Scale, expand, scale_tensor, tile
from kgen.runtime.format.expr import Expr, fold
from kgen.runtime.format.manifest import Tensor


@dataclass(frozen=True, kw_only=True)
class Q:
    """The codes, ``[m, k]`` (int4: ``[m, k / 2]`` bytes), and what shares a scale."""

    dtype: Literal["int8", "float8_e4m3fn", "int4"]
    scale: Scale
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class X:
    """The result, ``[m, k]``."""

    dtype: Float
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class Dequantize(Operator):
    """Exact: every element is the correctly rounded product."""

    q: Q
    x: X
    __pydantic_config__ = STRICT

    abi: ClassVar[int] = 1
    DIMS: ClassVar[dict[str, str]] = {"m": "rows", "k": "columns"}
    RANGES: ClassVar[tuple[str, ...]] = ("m",)
    input_kinds: ClassVar[tuple[str, ...]] = ("normal", "heavy", "subnormal", "special")

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        k, scale = self.static("k"), self.q.scale
        yield from uncountable(self.dims["m"][1], k)
        if self.q.dtype == "int4" and (not isinstance(scale, Group) or k % scale.group or scale.group % 16):
            yield ("q", "scale"), f"int4 needs {{group: g}} with g a multiple of 16 and a divisor of k ({k})"
        if not isinstance(scale, str) and (scale.dtype != "float32" or scale.major != "row"):
            yield ("q", "scale"), "only float32 scales in row order are supported"
        if k < 16:
            yield ("dims", "k"), f"{k} is under 16, the elements that a thread takes"

    def tensors(self) -> tuple[Tensor, ...]:
        m, k = self.extent("m"), self.extent("k")
        x = self.tensor("x", "out", self.x.dtype, m, k)
        if self.q.dtype == "int4":
            groups = fold("*", m, self.static("k") // self.q.scale.group)
            return (self.tensor("q", "in", "int8", m, k // 2), self.tensor("scale", "in", "float32", groups, 2), x)
        return (self.tensor("q", "in", self.q.dtype, m, k), scale_tensor("scale", "in", self.q.scale, m, k), x)

    def candidates(self) -> list[tuple[Expr, Config]]:
        return [
            (1, {"form": "flat", "threads": threads, "each": each, "unroll": unroll})
            for each in (16, 8)
            for threads in (128, 256, 512)
            for unroll in (1, 2, 4)
        ]

    def dispatch(self) -> list[tuple[Expr, Config]]:
        return [self.candidates()[0]]

    def work(self, config: Config, dims: Dims) -> Work:
        full = self.full_dims(dims)
        m, k, share = full["m"], full["k"], config["threads"] * config["each"] * config["unroll"]
        code, scale_bytes = (0.5, 8) if self.q.dtype == "int4" else (1, 4)
        wide = tile(self.q.scale, m, k)[1]
        return Work(
            blocks=-(-m * k // share),
            threads=config["threads"],
            smem=0,
            read=int(share * code) + scale_bytes * -(-share * -(-k // wide) // k),
            written=share * numerics.itemsize(self.x.dtype),
            flops=2 * share,
            registers=24 + 2 * config["each"] * config["unroll"],
        )

    def inputs(self, dims: Dims, rng: np.random.Generator, kind: str) -> Arrays:
        """Codes of every value; scales of the kind, with their signs."""
        full, found = self.full_dims(dims), {}
        for tensor in self.tensors()[:2]:
            shape = numerics.shape(tensor, full)
            if tensor.name == "scale":
                found["scale"] = numerics.random(rng, kind, shape, tensor.dtype)
            else:
                codes = rng.integers(-128, 128, shape, np.int8)
                found["q"] = codes.view(numerics.numpy_dtype(tensor.dtype))
        return found

    def check(self, dims: Dims, inputs: Arrays, outputs: Arrays, rng: np.random.Generator) -> list[Check]:
        return [numerics.check_equal("x", outputs["x"], self.reference(inputs))]

    def reference(self, inputs: Arrays) -> np.ndarray:
        """x; numpy's float32 arithmetic and casts are IEEE."""
        q, scale, dtype = inputs["q"], inputs["scale"], numerics.numpy_dtype(self.x.dtype)
        high, wide = tile(self.q.scale, 1, self.static("k"))

        def part(rows: slice) -> tuple[np.ndarray]:
            with np.errstate(all="ignore"):
                if self.q.dtype == "int4":
                    codes = np.stack([q[rows] >> 4, (q[rows] << 4).astype(np.int8) >> 4], axis=-1)
                    groups = codes.reshape(-1, wide).astype(np.float32)
                    each = self.static("k") // wide
                    step, offset = scale[rows.start * each : rows.stop * each].T
                    return ((groups * step[:, None] + offset[:, None]).reshape(len(q[rows]), -1).astype(dtype),)
                own = scale if self.q.scale == "tensor" else scale[rows.start // high : -(-rows.stop // high)]
                return ((q[rows].astype(np.float32) * expand(own, self.q.scale, q[rows].shape)).astype(dtype),)

        (x,) = numerics.by_rows(part, len(q), high)
        return x

    def edge_dims(self) -> list[dict[str, int]]:
        return row_edges(self.dims["m"], self.static("k"))

    def flops(self, dims: Dims) -> int:
        full = self.full_dims(dims)
        return full["m"] * full["k"]
