"""The arithmetic of quantization, as macros over a thread's registers: ranges, scales, codes.

Exact division costs: ``__fdiv_rn`` an element takes 64 µs where the memory traffic takes 45 (14336×4096 bf16, H200).
The fast path multiplies by the reciprocal and corrects once, ``q0 = v·r; q = fma(fma(-q0, s, v), r, q0)`` (Markstein),
which is the correctly rounded quotient while nothing over- or underflows; adding 1.5·2**23 then rounds to the nearest
even integer and leaves it in the low bits. Groups whose range is outside 2**-60..2**96 (so infinite or NaN) divide.

A group's range is kept as numbers of which the larger is taken: the bits of |v| (as integers magnitudes order like the
floats, and NaN is above all), and for int4 -lo and hi. Its scale is ``s[0]``, what codes are multiplied with ``s[1]``
(0 where only division will do), and int4's offset ``s[2]``.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tilelang.language as T

from kgen.compiler.ops.quantize import MOST, Quantize

SIZE = 3  # of s
ROUND = float(3 << 22)  # 1.5 · 2**23: float32 has a unit ulp there
MAGNITUDE = 0x7FFFFFFF


def bits(value: float) -> int:
    """A power of two's bits in float32."""
    return int(np.float32(value).view(np.int32))


FAST = bits(2.0**-60), bits(2.0**96)


class Codec(NamedTuple):
    """What a kernel needs of an operator's codes; the macros work on local arrays.

    Attributes:
        range_dtype, range_size: of the array `most` that holds a group's range.
        dtype, per_byte: of the codes in memory, and how many elements one of them holds.
        clear: (most) -> an empty range.
        grow: (most, values, base, count) -> values[base : base + count] taken into the range.
        scale: (most, s) -> the scale of a group with that range.
        take: (scale, s) -> a scale that was given; None where it cannot be.
        encode: (values, base, codes, s, count) -> the codes of values[base : base + count].
    """

    range_dtype: str
    range_size: int
    dtype: str
    per_byte: int
    clear: Callable
    grow: Callable
    scale: Callable
    take: Callable | None
    encode: Callable


def codec(op: Quantize) -> Codec:
    """The codec of an operator."""
    return asymmetric() if op.q.dtype == "int4" else symmetric(op)


def symmetric(op: Quantize) -> Codec:
    """int8 and float8_e4m3fn: a scale and no offset."""
    dtype, most_code, floor = op.q.dtype, MOST[op.q.dtype], float(op.q.amax_floor)
    power_of_two, given = op.power_of_two, op.q.given

    @T.macro
    def clear(most):
        most[0] = 0

    @T.macro
    def grow(most, values, base, count):
        for i in T.unroll(count):
            most[0] = T.max(most[0], T.reinterpret(T.cast(values[base + i], "float32"), "int32") & MAGNITUDE)

    @T.macro
    def scale(most, s):
        amax = T.alloc_var("float32")
        amax = T.reinterpret(most[0], "float32")
        if floor > 0.0:
            amax = T.if_then_else(amax > T.float32(floor), amax, T.float32(floor))
            s[0] = T.ieee_fdiv(amax, T.float32(most_code))
        else:
            s[0] = T.if_then_else(amax > 0, T.ieee_fdiv(amax, T.float32(most_code)), T.float32(1))
        if power_of_two:  # a mantissa that is not 0 carries into the exponent; 2**127 is the largest
            s[0] = T.reinterpret(T.min((T.reinterpret(s[0], "int32") + 0x7FFFFF) & 0x7F800000, 0x7F000000), "float32")
        fast = (most[0] >= FAST[0]) & (most[0] <= FAST[1])
        s[1] = T.if_then_else(fast | (most[0] == 0), T.ieee_frcp(s[0]), T.float32(0))

    @T.macro
    def take(value, s):
        s[0] = value
        fast = (value >= T.float32(2.0**-67)) & (value <= T.float32(2.0**90))
        s[1] = T.if_then_else(fast, T.ieee_frcp(value), T.float32(0))

    @T.macro
    def saturate(quotients, codes, count):
        for i in T.unroll(count):
            rounded = T.call_extern("int32", "__float2int_rn", quotients[i])  # NaN becomes 0, infinities saturate
            codes[i] = T.cast(T.max(T.min(rounded, 127), -127), "int8")

    @T.macro
    def encode(values, base, codes, s, count):
        quotients = T.alloc_local((count,), "float32")
        if s[1] > 0:
            for i in T.unroll(count):
                v = T.cast(values[base + i], "float32")
                q0 = v * s[1]
                exact = T.ieee_fmaf(T.ieee_fmaf(-q0, s[0], v), s[1], q0)
                if given:  # codes may be out of range, and the correction of an infinity is NaN
                    quotients[i] = T.if_then_else(T.abs(q0) < T.float32(65536), exact, q0)
                else:
                    quotients[i] = exact
            if dtype == "int8" and not given:
                for i in T.unroll(count):
                    codes[i] = T.cast(T.reinterpret(quotients[i] + T.float32(ROUND), "int32"), "int8")
        else:
            for i in T.unroll(count):
                quotients[i] = T.ieee_fdiv(T.cast(values[base + i], "float32"), s[0])
            if dtype == "int8" and not given:
                saturate(quotients, codes, count)
        if dtype == "int8" and given:
            saturate(quotients, codes, count)
        if dtype != "int8":
            for i in T.vectorized(count):
                codes[i] = T.cast(quotients[i], dtype)  # saturates

    return Codec("int32", 1, dtype, 1, clear, grow, scale, take, encode)


def asymmetric() -> Codec:
    """int4: a step and an offset, two codes to a byte, the first in its high half."""

    @T.macro
    def clear(most):
        most[0] = -T.infinity("float32")
        most[1] = -T.infinity("float32")

    @T.macro
    def grow(most, values, base, count):
        for i in T.unroll(count):  # the larger of a number and NaN is the number
            v = T.cast(values[base + i], "float32")
            most[0] = T.max(most[0], -v)
            most[1] = T.max(most[1], v)

    @T.macro
    def scale(most, s):
        span = most[1] + most[0]
        s[1] = T.if_then_else(span > 0, T.ieee_fdiv(T.float32(16), span), T.float32(1))
        s[2] = T.if_then_else(span >= 0, (most[1] - most[0]) * T.float32(0.5), T.float32(0))
        s[0] = T.ieee_fdiv(T.float32(1), s[1])

    @T.macro
    def encode(values, base, codes, s, count):
        shifted = T.alloc_local((count,), "int32")
        for i in T.unroll(count):
            t = (T.cast(values[base + i], "float32") - s[2]) * s[1]
            bounded = T.max(T.min(t, T.float32(7)), T.float32(-8)) + T.float32(ROUND)
            shifted[i] = T.reinterpret(bounded, "int32")
        for i in T.unroll(count // 2):
            codes[i] = T.cast((shifted[2 * i] << 4) | (shifted[2 * i + 1] & 15), "int8")

    return Codec("float32", 2, "int8", 2, clear, grow, scale, None, encode)
