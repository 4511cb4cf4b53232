"""A row a block, held in registers between the reduction and the cast: scale "channel", with or without smooth, any k.

x and q are walked as flat arrays of chunks of `each` elements, and element i of the one is element i of the other, so
that a row that starts anywhere still moves in aligned words: only the chunks at its two ends are masked.

With smooth, y = x / smooth goes the fast way of `arithmetic` too. Where that may be inexact (a column's divisor outside
2**-30..2**30, a row with infinities, NaN or an amax at the ends of float32) the row is divided once more, exactly.
"""

import tilelang.language as T

from kgen.compiler.kernels.common import CHUNKS, load_words
from kgen.compiler.kernels.quantize.arithmetic import MAGNITUDE, SIZE, bits, codec
from kgen.compiler.kernels.quantize.common import reduce_block, stored_scale
from kgen.compiler.ops.numerics import itemsize
from kgen.compiler.ops.quantize import Quantize

DIVISORS = bits(2.0**-30), bits(2.0**30)
SAFE = bits(2.0**-60), bits(2.0**90)  # amax of a row whose quotients x / smooth were exact where it matters


def row(op: Quantize, threads: int, each: int):
    """The kernel: a thread takes `each` consecutive elements at a time."""
    k, x_dtype, smooth = op.static("k"), op.x.dtype, op.smooth is not None
    codes_of = codec(op)
    reduce = reduce_block(codes_of, threads)
    vector = 16 // itemsize(x_dtype)  # elements a load
    words, stored = each // vector, each // codes_of.per_byte
    aligned = k % each == 0
    turns = -(-k // (threads * each)) if aligned else -(-(k + each - 1) // (threads * each))
    whole = aligned and k % (threads * each) == 0
    y_dtype = "float32" if smooth else x_dtype
    int4 = codes_of.per_byte == 2
    load_whole = load_words(words, vector)
    scales = op.scale_storage()

    @T.macro
    def divide(values, most, divisors, chunk, begin, base, exact):
        """values[base : base + each] /= smooth, and `most` spoilt by a divisor that the fast way does not take."""
        for e in T.unroll(each):
            column = chunk * each + e - begin
            d = T.alloc_var("float32")
            d = divisors[column] if whole else divisors[T.max(0, T.min(column, k - 1))]
            if exact:
                values[base + e] = T.ieee_fdiv(values[base + e], d)
            else:
                r = T.ieee_frcp(d)
                q0 = values[base + e] * r
                values[base + e] = T.ieee_fmaf(T.ieee_fmaf(-q0, d, values[base + e]), r, q0)
                size = T.reinterpret(d, "int32") & MAGNITUDE
                most[0] = T.if_then_else((size < DIVISORS[0]) | (size > DIVISORS[1]), MAGNITUDE, most[0])

    @T.macro
    def load(x, divisors, values, most, begin, tx, exact):
        raw = T.alloc_local((each,), x_dtype)
        for j in T.unroll(turns):
            chunk = begin // each + j * threads + tx
            inside = (chunk * each >= begin) & (chunk * each + each <= begin + k)
            if whole or inside:
                load_whole(x, raw, 0, chunk * words)
            else:
                for w in T.unroll(words):
                    for v in T.unroll(vector):
                        at = chunk * each + w * vector + v
                        raw[w * vector + v] = T.if_then_else(
                            (at >= begin) & (at < begin + k), x[chunk * words + w, v], T.cast(0, x_dtype)
                        )
            for e in T.unroll(each):
                values[j * each + e] = T.cast(raw[e], y_dtype)
            if smooth:
                divide(values, most, divisors, chunk, begin, j * each, exact)

    @T.prim_func
    def kernel(
        x: T.Tensor((CHUNKS, vector), x_dtype),
        divisors: T.Tensor((k,), "float32"),
        q: T.Tensor((CHUNKS, stored), codes_of.dtype),
        scale: T.Tensor((CHUNKS, 2 if int4 else 1), scales.kernel_dtype),
        m: T.int32,
    ):
        with T.Kernel(m, threads=threads) as r:
            tx = T.get_thread_binding()
            values = T.alloc_local((turns * each,), y_dtype)
            codes = T.alloc_local((stored,), codes_of.dtype)
            most = T.alloc_local((codes_of.range_size,), codes_of.range_dtype)
            s = T.alloc_local((SIZE,), "float32")
            parts = T.alloc_shared((threads // 32 * codes_of.range_size,), codes_of.range_dtype)
            begin = r * k
            codes_of.clear(most)
            load(x, divisors, values, most, begin, tx, False)
            codes_of.grow(most, values, 0, turns * each)
            reduce(most, parts, tx)
            if smooth:
                if (most[0] < SAFE[0]) | (most[0] > SAFE[1]):
                    codes_of.clear(most)
                    load(x, divisors, values, most, begin, tx, True)
                    codes_of.grow(most, values, 0, turns * each)
                    T.sync_threads()
                    reduce(most, parts, tx)
            codes_of.scale(most, s)
            for j in T.unroll(turns):
                chunk = begin // each + j * threads + tx
                inside = (chunk * each >= begin) & (chunk * each + each <= begin + k)
                codes_of.encode(values, j * each, codes, s, each)
                if whole or inside:
                    for e in T.vectorized(stored):
                        q[chunk, e] = codes[e]
                elif not aligned:
                    for e in T.unroll(stored):
                        if (chunk * each + e >= begin) & (chunk * each + e < begin + k):
                            q[chunk, e] = codes[e]
            if tx == 0:
                scale[r, 0] = stored_scale(scales, s[0])
                if int4:
                    scale[r, 1] = s[2]

    return kernel
