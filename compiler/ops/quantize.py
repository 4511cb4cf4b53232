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
0 in int8 and 7 in int4. A scale of dtype float8_e8m0fnu is the power of two at or above the one above.

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
from kgen.compiler.ops.contract import STRICT, Arrays, Check, Config, Dims, Operator, Work, edges
from kgen.compiler.ops.scaling import Block, Group, Scale, ScaleStorage, expand, group_amax, scale_tensor
from kgen.runtime.format.expr import Expr, fold
from kgen.runtime.format.manifest import Tensor

MOST = {"int8": 127.0, "float8_e4m3fn": 448.0}
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
        k, most = self.static("k"), self.dims["m"][1]
        if most * k >= 1 << 31:
            yield ("dims", "m"), f"m · k must stay under 2**31: at most {((1 << 31) - 1) // k} rows of {k}"
        scale = self.q.scale
        if self.q.dtype == "int4":
            if not isinstance(scale, Group) or k % scale.group or scale.group % 2:
                yield ("q", "scale"), f"int4 needs {{group: g}} with g even and a divisor of k ({k})"
            if self.q.given or self.q.amax_floor != "0":
                yield ("q", "given"), "int4 measures its own step and offset: leave out given and amax_floor"
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
        wide = fold("*", 2, k) if self.before == "silu_and_mul" else k
        found = [self.tensor("x", "in", self.x.dtype, m, wide)]
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
    def group(self) -> int:
        """Columns that share a scale."""
        scale = self.q.scale
        return (
            scale.group
            if isinstance(scale, Group)
            else scale.block[1]
            if isinstance(scale, Block)
            else self.static("k")
        )

    @property
    def power_of_two(self) -> bool:
        """Whether scales are rounded up to powers of two."""
        return not isinstance(self.q.scale, str) and self.q.scale.dtype == "float8_e8m0fnu"

    def scale_storage(self) -> ScaleStorage:
        """Where a kernel writes scales."""
        return ScaleStorage.of(self.q.scale, -(-self.static("k") // self.group))

    # Configs.

    def candidates(self) -> list[tuple[Expr, Config]]:
        return [(1, config) for config in self._configs()]

    def dispatch(self) -> list[tuple[Expr, Config]]:
        return [(1, self._configs()[0])]

    def _configs(self) -> list[Config]:
        """Every config that fits; the untuned choice first."""
        k, size, scale = self.static("k"), numerics.itemsize(self.x.dtype), self.q.scale
        vector = 16 // size
        eaches = [each for each in (16, 8, 4) if each >= vector]
        if self.before:
            lanes = [
                e for e in (8, 4, 16) if not isinstance(scale, Group) or (self.group <= 32 * e and not self.group % e)
            ]
            return [
                {"form": "fused", "threads": threads, "each": each}
                for each in lanes
                for threads in (256, 128, 512, 1024)
                if -(-k // (threads * each)) * each <= 64 and (threads == 128 or threads * each // 2 < k)
            ]
        if self.q.given:
            return [
                {"form": "flat", "threads": threads, "each": each, "unroll": unroll}
                for each in eaches
                for threads in (256, 128, 512)
                for unroll in (1, 2, 4)
            ]
        if scale == "tensor":
            return [
                {"form": "tensor", "threads": threads, "each": each, "held": held, "shelved": shelved}
                for threads, held_bytes, shelf in (
                    (512, 128, 192 << 10),
                    (512, 192, 192 << 10),
                    (1024, 64, 192 << 10),
                    (1024, 32, 208 << 10),
                    (256, 32, 0),
                    (128, 32, 0),
                    (512, 32, 0),
                )
                for each in eaches
                if (held := held_bytes // (each * size))
                for shelved in [shelf // (threads * each * size)]
            ]
        if isinstance(scale, Block):
            aligned = [each for each in eaches if k % each == 0] or [1]
            return [
                {"form": "block", "threads": threads, "each": each}
                for each in aligned
                for threads in (256, 512, 1024)
                if 128 * 128 // threads * size <= 256
            ]
        team = [e for e in eaches if k % e == 0 and e <= self.group <= 32 * e and not self.group & (self.group - 1)]
        grouped = [
            {"form": "group", "threads": threads, "each": each, "unroll": unroll}
            for each in team
            for unroll in (1, 2, 4)
            for threads in (128, 256, 512)
        ]
        if scale == "channel" or self.group == k:
            rows = [
                {"form": "row", "threads": threads, "each": each}
                for threads in (128, 256, 512, 64, 1024, 32)
                for each in eaches
                if self._row_fits(threads, each)
            ]
            rows.sort(key=lambda config: abs(k / (config["threads"] * config["each"]) - 2))
            return (grouped if self.smooth is None else []) + rows if k <= 256 else rows
        return grouped or [{"form": "staged", "threads": threads} for threads in (256, 128, 384, 576)]

    def _row_fits(self, threads: int, each: int) -> bool:
        k, size = self.static("k"), numerics.itemsize(self.x.dtype)
        turns = -(-(k + each - 1) // (threads * each)) if k % each else -(-k // (threads * each))
        held = turns * each * (4 if self.smooth else size)  # bytes of a thread
        if self.q.dtype == "int4" and k % (threads * each):
            return False
        return held <= 512 and (threads == 32 or (threads // 2) * each < k) and held * threads <= 160 << 10

    def work(self, config: Config, dims: Dims) -> Work:
        full, size = self.full_dims(dims), numerics.itemsize(self.x.dtype)
        m, k, threads, form = full["m"], full["k"], config["threads"], config["form"]
        share = threads * config.get("each", 8) * config.get("unroll", 1)
        if form == "block":
            blocks, elements = -(-m // 128) * -(-k // 128), 128 * 128
        elif form in ("row", "staged", "fused"):
            blocks, elements = m, k
        else:
            blocks, elements = -(-m * k // share), share
        persistent, wide = form == "tensor", 2 if self.before == "silu_and_mul" else 1
        columns = 4 * k if self.smooth else size * k if self.before == "rms_norm" else 0  # smooth, weight
        code, scale_bytes = (0.5, 8) if self.q.dtype == "int4" else (1, 4)
        return Work(
            blocks=blocks,
            threads=threads,
            smem={"staged": 3 * k, "tensor": config.get("shelved", 0) * share * size}.get(form, threads),
            read=elements * size * wide + columns + 4 * self.q.given,
            written=int(elements * code) + scale_bytes * -(-elements * -(-k // self.group) // k),
            flops=5 * elements,
            registers=64 if persistent else min(255, 32 + -(-elements // threads) * size // 2),
            persistent=persistent,
        )

    # Reference.

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
        expected = self.reference(inputs)
        return [numerics.check_equal(name, outputs[name], value) for name, value in expected.items()]

    def near(self, dims: Dims, inputs: Arrays, outputs: Arrays, rng: np.random.Generator) -> list[Check]:
        """Division through a reciprocal passes: scales to 1e-5, and neighbouring codes for 1 % of the elements."""
        return self._close(inputs, outputs, 0.01)

    def _close(self, inputs: Arrays, outputs: Arrays, limit: float) -> list[Check]:
        expected = self.reference(inputs)
        scale = [] if self.q.given else [numerics.check_close("scale", outputs["scale"], expected["scale"], 1e-5)]
        codes = [outputs["q"], expected["q"]]
        if self.q.dtype == "int4":
            codes = [np.stack([q >> 4, (q << 4).astype(np.int8) >> 4], axis=-1) for q in codes]
        return [*scale, *numerics.check_codes("q", *codes, limit)]

    def reference(self, inputs: Arrays) -> Arrays:
        """Expected outputs: float32 arithmetic in numpy is IEEE, which is what the contract asks."""
        if self.q.dtype == "int4":
            q, scale = numerics.by_rows(lambda rows: _int4(self._y(inputs, rows), self.q.scale.group), len(inputs["x"]))
            return {"scale": scale, "q": q}
        whole = None
        if self.q.scale == "tensor" and not self.q.given:
            (amax,) = numerics.by_rows(
                lambda rows: (np.max(np.abs(self._y(inputs, rows))).reshape(1),), len(inputs["x"])
            )
            whole = self._scales(np.max(amax).reshape(1))

        def part(rows: slice) -> tuple[np.ndarray, np.ndarray]:
            y = self._y(inputs, rows)
            scale = inputs["scale"] if self.q.given else whole
            if scale is None:
                scale = self._scales(group_amax(y, self.q.scale))
            elif self.q.scale != "tensor":
                scale = scale[rows]
            return scale, self._codes(y, expand(scale.astype(np.float32), self.q.scale, y.shape))

        step = self.q.scale.block[0] if isinstance(self.q.scale, Block) else 1
        scale, q = numerics.by_rows(part, len(inputs["x"]), step)
        if self.q.given:
            return {"q": q}
        return {"scale": scale if whole is None else whole, "q": q}

    def _y(self, inputs: Arrays, rows: slice) -> np.ndarray:
        """What is quantized, float32."""
        x = inputs["x"][rows].astype(np.float32)
        with np.errstate(all="ignore"):
            if self.smooth:
                return x / inputs["smooth"]
            if self.before == "silu_and_mul":
                gate, up = np.split(x.astype(np.float64), 2, axis=1)
                return (gate / (1 + np.exp(-gate)) * up).astype(np.float32)
            if self.before == "rms_norm":
                wide = x.astype(np.float64)
                norm = np.sqrt(np.mean(wide**2, axis=1, keepdims=True) + float(self.eps))
                return (wide / norm * inputs["weight"].astype(np.float64)).astype(np.float32)
        return x

    def _scales(self, amax: np.ndarray) -> np.ndarray:
        floor, most = np.float32(self.q.amax_floor), np.float32(MOST[self.q.dtype])
        with np.errstate(all="ignore"):
            scale = (
                np.where(amax > floor, amax, floor) / most if floor else np.where(amax > 0, amax / most, np.float32(1))
            )
            if not self.power_of_two:
                return scale.astype(np.float32)
            bits = (scale.astype(np.float32).view(np.int32) + 0x7FFFFF) & 0x7F800000
            return bits.view(np.float32).astype(numerics.numpy_dtype("float8_e8m0fnu"))

    def _codes(self, y: np.ndarray, scale: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            quotient = y / scale
            if self.q.dtype == "int8":
                codes = np.clip(np.rint(quotient), -127, 127)
                return np.where(np.isnan(codes), 0, codes).astype(np.int8)
            return np.clip(quotient, -448, 448).astype(numerics.numpy_dtype("float8_e4m3fn"))

    def edge_dims(self) -> list[dict[str, int]]:
        least, most = self.dims["m"]
        return [] if least == most else [{"m": m} for m in edges(least, most) if m * self.static("k") <= 1 << 26]

    def flops(self, dims: Dims) -> int:
        full = self.full_dims(dims)
        return full["m"] * 5 * full["k"]


def _int4(y: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """(packed [m, k / 2], [m · k / group, 2]) in DeepSpeed's arithmetic; fmin and fmax pass NaN over."""
    rows, k = y.shape
    with np.errstate(all="ignore"):
        grouped = y.reshape(-1, group)
        hi, lo = np.fmax.reduce(grouped, axis=1), np.fmin.reduce(grouped, axis=1)
        span = hi - lo
        mult = np.where(span > 0, np.float32(16) / span, np.float32(1))
        offset = np.where(span >= 0, (hi + lo) * np.float32(0.5), np.float32(0))
        code = (grouped - offset[:, None]) * mult[:, None]
        code = np.rint(np.fmax(np.fmin(code, np.float32(7)), np.float32(-8))).astype(np.int8).reshape(rows, k)
        params = np.stack([np.float32(1) / mult, offset], axis=1).astype(np.float32)
    return (code[:, ::2] << 4 | code[:, 1::2] & 15).astype(np.int8), params
