"""A row a block, computed before it is quantized: `before: silu_and_mul` or `rms_norm`, any scale along the row.

y stays in float32 registers; a thread has `each` neighbouring elements at a time. A group's range goes round its team
of lanes, a row's round the block, a given scale needs none.
"""

import tilelang.language as T

from kgen.compiler.kernels.common import CHUNKS, load_words
from kgen.compiler.kernels.quantize.arithmetic import SIZE, codec
from kgen.compiler.kernels.quantize.common import reduce_block, reduce_team, stored_scale
from kgen.compiler.ops.numerics import itemsize
from kgen.compiler.ops.quantize import Quantize
from kgen.compiler.ops.scaling import Group


def fused(op: Quantize, threads: int, each: int):
    """The kernel; k is a multiple of `each`."""
    k, x_dtype, gated = op.static("k"), op.x.dtype, op.before == "silu_and_mul"
    codes_of, scales = codec(op), op.scale_storage()
    vector = min(each, 16 // itemsize(x_dtype))  # elements a load
    load, turns, warps = load_words(each // vector, vector), -(-k // (threads * each)), threads // 32
    grouped, given = isinstance(op.q.scale, Group) and op.group != k, op.q.given
    wide = op.group
    lanes = wide // each if grouped else 32
    reduce_group, reduce_row = reduce_team(codes_of, lanes), reduce_block(codes_of, threads)
    eps = float(op.eps)

    @T.macro
    def silu_and_mul(x, values, r, tx):
        gate = T.alloc_local((each,), x_dtype)
        up = T.alloc_local((each,), x_dtype)
        for j in T.unroll(turns):
            column = (j * threads + tx) * each
            if column < k:
                load(x, gate, 0, (r * 2 * k + column) // vector)
                load(x, up, 0, (r * 2 * k + k + column) // vector)
                for e in T.unroll(each):
                    g = T.cast(gate[e], "float32")
                    values[j * each + e] = g * T.fast_rcp(T.float32(1) + T.exp(-g)) * T.cast(up[e], "float32")
            else:
                for e in T.unroll(each):
                    values[j * each + e] = T.float32(0)

    @T.macro
    def rms_norm(x, weight, values, r, tx):
        sums = T.alloc_shared((warps,), "float32")
        raw = T.alloc_local((each,), x_dtype)
        total = T.alloc_var("float32")
        total = 0
        for j in T.unroll(turns):
            column = (j * threads + tx) * each
            if column < k:
                load(x, raw, 0, (r * k + column) // vector)
                for e in T.unroll(each):
                    values[j * each + e] = T.cast(raw[e], "float32")
                    total += values[j * each + e] * values[j * each + e]
            else:
                for e in T.unroll(each):
                    values[j * each + e] = T.float32(0)
        for step in T.unroll(5):
            total += T.shfl_xor(total, 1 << step)
        if tx % 32 == 0:
            sums[tx // 32] = total
        T.sync_threads()
        total = 0
        for w in T.unroll(warps):
            total += sums[w]
        norm = T.alloc_var("float32")
        norm = T.ieee_frcp(T.ieee_fsqrt(total / T.float32(k) + T.float32(eps)))
        for j in T.unroll(turns):
            column = (j * threads + tx) * each
            if column < k:
                load(weight, raw, 0, column // vector)
                for e in T.unroll(each):
                    values[j * each + e] = values[j * each + e] * norm * T.cast(raw[e], "float32")

    @T.macro
    def store(q, values, codes, s, r, j, tx):
        column = (j * threads + tx) * each
        codes_of.encode(values, j * each, codes, s, each)
        if column < k:
            for e in T.vectorized(each):
                q[(r * k + column) // each, e] = codes[e]

    @T.macro
    def quantize(values, q, scale, parts, r, m, tx):
        codes = T.alloc_local((each,), codes_of.dtype)
        most = T.alloc_local((1,), "int32")
        s = T.alloc_local((SIZE,), "float32")
        if given:
            codes_of.take(scale[0], s)
            for j in T.unroll(turns):
                store(q, values, codes, s, r, j, tx)
        elif grouped:
            for j in T.unroll(turns):
                column = (j * threads + tx) * each
                codes_of.clear(most)
                codes_of.grow(most, values, j * each, each)
                reduce_group(most)
                codes_of.scale(most, s)
                store(q, values, codes, s, r, j, tx)
                if (column < k) & (tx % lanes == 0):
                    scale[scales.at(r, column // wide, m)] = stored_scale(scales, s[0])
        else:
            codes_of.clear(most)
            codes_of.grow(most, values, 0, turns * each)
            reduce_row(most, parts, tx)
            codes_of.scale(most, s)
            for j in T.unroll(turns):
                store(q, values, codes, s, r, j, tx)
            if tx == 0:
                scale[r] = stored_scale(scales, s[0])

    @T.prim_func
    def kernel(
        x: T.Tensor((CHUNKS, vector), x_dtype),
        weight: T.Tensor((CHUNKS, vector), x_dtype),
        q: T.Tensor((CHUNKS, each), codes_of.dtype),
        scale: T.Tensor((CHUNKS,), scales.kernel_dtype),
        m: T.int32,
    ):
        with T.Kernel(m, threads=threads) as r:
            tx = T.get_thread_binding()
            values = T.alloc_local((turns * each,), "float32")
            parts = T.alloc_shared((warps,), "int32")
            if gated:
                silu_and_mul(x, values, r, tx)
            else:
                rms_norm(x, weight, values, r, tx)
            quantize(values, q, scale, parts, r, m, tx)

    return kernel
