"""quantize: ``q = clamp(round(y / scale))`` and the scales that undo it, where y is x or what is computed from it.

============  =====================================  ======================================================
q             scale of a group                       codes
============  =====================================  ======================================================
int8          amax / 127                             clamp(rne(y / scale), -127, 127)
float8_e4m3fn amax / 448                             e4m3(clamp(y / scale, -448, 448))
int4          step (hi - lo) / 16, offset (hi+lo)/2  clamp(rne((y - offset) · (1 / step)), -8, 7), two to a byte
============  =====================================  ======================================================

Arithmetic is float32 and correctly rounded, division by the *stored* scale included. Groups are those of
`kgen.compiler.ops.scaling`. A group whose amax is not above 0 (zeros, or a NaN in it) has scale 1; with `amax_floor`,
amax is at least that. An infinite amax stores an infinite scale: finite elements become 0. NaN becomes NaN in e4m3,
0 in int8 and 7 in int4. A scale of dtype float8_e8m0fnu is the power of two at or above that, 2**127 at most.

int4 is DeepSpeed's asymmetric format: the first of two neighbours is in the high half of a byte of ``q [m, k / 2]``,
and ``scale [m · k / group, 2]`` holds a group's step and offset in float32. 1 / step is ``16 / (hi - lo)``, 1 where
hi = lo; NaN counts for neither hi nor lo, and a group without a number has step 1 and offset 0.

y is x ``[m, k]``; ``x / smooth`` (SmoothQuant; `smooth` is ``[k]``); ``silu(x[:, :k]) · x[:, k:]`` for x ``[m, 2 k]``
with `before: silu_and_mul`; or ``x · rsqrt(mean(x²) + eps) · weight`` with `before: rms_norm`, weight ``[k]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from kgen.compiler.ops import numerics
from kgen.compiler.ops.contract import STRICT, Arrays, Check, Config, Dims, Operator, Work, row_edges, uncountable
from kgen.compiler.ops.quantize import configs
from kgen.compiler.ops.quantize.reference import MOST, expected
from kgen.compiler.ops.scaling import Block, Group, Scale, ScaleStorage, scale_tensor, tile
from kgen.runtime.format.expr import Expr, fold
from kgen.runtime.format.manifest import Tensor

__all__ = ["MOST", "Q", "Quantize", "Smooth", "X"]

Float = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True, kw_only=True)
class X:
    """The input, ``[m, k]``, or ``[m, 2 k]`` with `before: silu_and_mul`."""

    dtype: Float
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class Smooth:
    """What divides each column of x before it is quantized, ``[k]``."""

    dtype: Literal["float32"] = "float32"
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class Q:
    """The codes, ``[m, k]`` (int4: ``[m, k / 2]`` bytes).

    `scale` says what shares a scale; `given`: the scales are an input; `amax_floor`: the least amax of a group.
    """

    dtype: Literal["int8", "float8_e4m3fn", "int4"]
    scale: Scale
    given: bool = False
    amax_floor: Literal["0", "1e-10", "1e-4"] = "0"
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class Quantize(Operator):
    """Codes are exactly those of true division, except after silu or rms_norm, whose float32 sums may differ."""

    x: X
    q: Q
    smooth: Smooth | None = None
    before: Literal["silu_and_mul", "rms_norm"] | None = None
    eps: Literal["1e-5", "1e-6"] = "1e-6"
    __pydantic_config__ = STRICT

    abi: ClassVar[int] = 1
    DIMS: ClassVar[dict[str, str]] = {"m": "rows", "k": "columns"}
    RANGES: ClassVar[tuple[str, ...]] = ("m",)
    input_kinds: ClassVar[tuple[str, ...]] = ("normal", "ties", "heavy", "subnormal", "zeros", "infinities", "special")

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        found = [*uncountable(self.dims["m"][1], self.x_columns), *self._conflicts()]
        yield from found
        if not found and not configs.offered(self):
            yield ("dims", "k"), f"no kernel takes k = {self.static('k')} with this x and scale"

    def _conflicts(self) -> Iterator[tuple[tuple[str, ...], str]]:
        k, scale = self.static("k"), self.q.scale
        if self.q.dtype == "int4":
            if not isinstance(scale, Group) or k % scale.group or scale.group % 2:
                yield ("q", "scale"), f"int4 needs {{group: g}} with g even and a divisor of k ({k})"
            if self.q.given or self.q.amax_floor != "0":
                yield ("q", "given"), "int4 measures its own step and offset: leave out given and amax_floor"
            if isinstance(scale, Group) and (scale.dtype, scale.major) != ("float32", "row"):
                yield ("q", "scale"), "int4's steps and offsets are float32 in row order: leave out dtype and major"
            if self.smooth:
                yield ("smooth",), "does not go with int4"
        if isinstance(scale, Group) and scale.group & (scale.group - 1) and scale.group != k:
            yield ("q", "scale", "group"), f"{scale.group} is neither a power of two nor k ({k})"
        if isinstance(scale, Block) and scale.block != (128, 128):
            yield ("q", "scale", "block"), f"{list(scale.block)} is not supported; allowed: [128, 128]"
        if self.q.given and scale != "tensor":
            yield ("q", "given"), "a given scale is one for the tensor: use scale: tensor, or leave out given"
        if self.q.given and self.q.amax_floor != "0":
            yield ("q", "amax_floor"), "is of measured scales: leave it out, or given"
        if self.smooth and (self.before or self.q.given):
            yield ("smooth",), "goes neither with before nor with a given scale"
        if (self.smooth or self.before) and scale == "tensor" and not self.q.given:
            yield ("q", "scale"), "tensor needs a second pass over what comes before: use channel, a group, or given"
        if (self.smooth or self.before) and isinstance(scale, Block):
            yield ("q", "scale"), "blocks of rows do not go with smooth or before: use channel or a group"
        if self.smooth and isinstance(scale, Group) and scale.group != k:
            yield ("q", "scale"), "smooth goes with channel"
        if self.before and self.q.dtype == "int4":
            yield ("before",), "does not go with int4"
        if self.before and isinstance(scale, Group) and (scale.group > 512 or scale.group % 16) and scale.group != k:
            yield ("q", "scale", "group"), f"{scale.group} is not a multiple of 16 up to 512, which before needs"
        if self.before and k % 8:
            yield ("dims", "k"), f"{k} is not a multiple of 8, which before: {self.before} needs"

    def tensors(self) -> tuple[Tensor, ...]:
        m, k = self.extent("m"), self.extent("k")
        found = [self.tensor("x", "in", self.x.dtype, m, self.x_columns)]
        if self.smooth:
            found.append(self.tensor("smooth", "in", self.smooth.dtype, k))
        if self.before == "rms_norm":
            found.append(self.tensor("weight", "in", self.x.dtype, k))
        if self.q.dtype == "int4":
            groups = fold("*", m, self.static("k") // self.q.scale.group)
            return (
                *found,
                self.tensor("q", "out", "int8", m, k // 2),
                self.tensor("scale", "out", "float32", groups, 2),
            )
        scale = scale_tensor("scale", "in" if self.q.given else "out", self.q.scale, m, k)
        return (*found, self.tensor("q", "out", self.q.dtype, m, k), scale)

    @property
    def x_columns(self) -> int:
        """Columns of x."""
        return self.static("k") * (2 if self.before == "silu_and_mul" else 1)

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return tile(self.q.scale, 1, self.static("k"))[1]

    @property
    def power_of_two(self) -> bool:
        """Whether scales are rounded up to powers of two."""
        return not isinstance(self.q.scale, str) and self.q.scale.dtype == "float8_e8m0fnu"

    def scale_storage(self) -> ScaleStorage:
        """Where a kernel writes scales."""
        return ScaleStorage.of(self.q.scale, -(-self.static("k") // self.group))

    def candidates(self) -> list[tuple[Expr, Config]]:
        return [(1, config) for config in configs.offered(self)]

    def dispatch(self) -> list[tuple[Expr, Config]]:
        return self.candidates()[:1]

    def work(self, config: Config, dims: Dims) -> Work:
        return configs.work(self, config, dims)

    def inputs(self, dims: Dims, rng: np.random.Generator, kind: str) -> Arrays:
        full = self.full_dims(dims)
        found = {}
        for tensor in self.tensors():
            if tensor.role == "in":
                shape = numerics.shape(tensor, full)
                positive = tensor.name in ("smooth", "scale", "weight")
                x = numerics.random(rng, "normal" if positive else kind, shape, "float32" if positive else tensor.dtype)
                if tensor.name == "scale":
                    x = np.abs(x) * np.float32(0.02) + np.float32(0.01)
                elif positive:
                    x = np.abs(x) + np.float32(0.5)
                found[tensor.name] = x.astype(numerics.numpy_dtype(tensor.dtype))
        return found

    def check(self, dims: Dims, inputs: Arrays, outputs: Arrays, rng: np.random.Generator) -> list[Check]:
        if self.before:
            return self._close(inputs, outputs, 1.0)
        wanted = self.reference(inputs)
        return [numerics.check_equal(name, outputs[name], value) for name, value in wanted.items()]

    def near(self, dims: Dims, inputs: Arrays, outputs: Arrays, rng: np.random.Generator) -> list[Check]:
        """Division through a reciprocal passes: scales to 1e-5, and neighbouring codes for 1 % of the elements."""
        return self._close(inputs, outputs, 0.01)

    def _close(self, inputs: Arrays, outputs: Arrays, limit: float) -> list[Check]:
        wanted = self.reference(inputs)
        scale = [] if self.q.given else [numerics.check_close("scale", outputs["scale"], wanted["scale"], 1e-5)]
        codes = [outputs["q"], wanted["q"]]
        if self.q.dtype == "int4":
            codes = [np.stack([q >> 4, (q << 4).astype(np.int8) >> 4], axis=-1) for q in codes]
        return [*scale, *numerics.check_codes("q", *codes, limit)]

    def reference(self, inputs: Arrays) -> Arrays:
        """Expected outputs."""
        return expected(self, inputs)

    def edge_dims(self) -> list[dict[str, int]]:
        return row_edges(self.dims["m"], self.static("k"))

    def flops(self, dims: Dims) -> int:
        full = self.full_dims(dims)
        return full["m"] * 5 * full["k"]
