"""quantize's expected outputs: float32 arithmetic in numpy is IEEE, which is what the contract asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kgen.compiler.ops import numerics
from kgen.compiler.ops.contract import Arrays
from kgen.compiler.ops.scaling import expand, group_amax, tile

if TYPE_CHECKING:
    from kgen.compiler.ops.quantize import Quantize

MOST = {"int8": 127.0, "float8_e4m3fn": 448.0}  # the largest code


def expected(op: Quantize, inputs: Arrays) -> Arrays:
    """``q`` and, unless it is given, ``scale``."""
    rows = len(inputs["x"])
    if op.q.dtype == "int4":
        q, scale = numerics.by_rows(lambda part: _int4(_y(op, inputs, part), op.group), rows)
        return {"scale": scale, "q": q}
    whole = inputs.get("scale")
    if whole is None and op.q.scale == "tensor":
        (amax,) = numerics.by_rows(lambda part: (group_amax(_y(op, inputs, part), "tensor"),), rows)
        whole = _scales(op, np.max(amax).reshape(1))

    def part(rows: slice) -> tuple[np.ndarray, np.ndarray]:
        y = _y(op, inputs, rows)
        scale = _scales(op, group_amax(y, op.q.scale)) if whole is None else whole
        return scale, _codes(op, y, expand(scale.astype(np.float32), op.q.scale, y.shape))

    scale, q = numerics.by_rows(part, rows, tile(op.q.scale, 1, op.static("k"))[0])
    if op.q.given:
        return {"q": q}
    return {"scale": scale if whole is None else whole, "q": q}


def _y(op: Quantize, inputs: Arrays, rows: slice) -> np.ndarray:
    """What is quantized, float32."""
    x = inputs["x"][rows].astype(np.float32)
    with np.errstate(all="ignore"):
        if op.smooth:
            return x / inputs["smooth"]
        if op.before == "silu_and_mul":
            gate, up = np.split(x.astype(np.float64), 2, axis=1)
            return (gate / (1 + np.exp(-gate)) * up).astype(np.float32)
        if op.before == "rms_norm":
            wide = x.astype(np.float64)
            norm = np.sqrt(np.mean(wide**2, axis=1, keepdims=True) + float(op.eps))
            return (wide / norm * inputs["weight"].astype(np.float64)).astype(np.float32)
    return x


def _scales(op: Quantize, amax: np.ndarray) -> np.ndarray:
    floor, most = np.float32(op.q.amax_floor), np.float32(MOST[op.q.dtype])
    with np.errstate(all="ignore"):
        least = np.where(amax > floor, amax, floor)  # also where amax is NaN
        scale = np.where(least > 0, least / most, np.float32(1))
        if not op.power_of_two:
            return scale.astype(np.float32)
        bits = np.minimum((scale.astype(np.float32).view(np.int32) + 0x7FFFFF) & 0x7F800000, 0x7F000000)
        return bits.view(np.float32).astype(numerics.numpy_dtype("float8_e8m0fnu"))


def _codes(op: Quantize, y: np.ndarray, scale: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        quotient = y / scale
        if op.q.dtype == "int8":
            codes = np.clip(np.rint(quotient), -127, 127)
            return np.where(np.isnan(codes), 0, codes).astype(np.int8)
        return np.clip(quotient, -448, 448).astype(numerics.numpy_dtype("float8_e4m3fn"))


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
