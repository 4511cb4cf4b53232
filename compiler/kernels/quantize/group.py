"""A team of lanes a group, for groups along the row: scale {group: g}, and "channel" where rows are short.

A lane holds `each` consecutive elements of its group; the team's range goes round by shuffles. Rows start on 16-byte
boundaries; the last group of a row may be short. A block takes `unroll` groups a team, for more loads in flight.
"""

import tilelang.language as T

from kgen.compiler.kernels.common import CHUNKS, load_words
from kgen.compiler.kernels.quantize.arithmetic import SIZE, codec
from kgen.compiler.kernels.quantize.common import reduce_team, stored_scale
from kgen.compiler.ops.numerics import itemsize
from kgen.compiler.ops.quantize import Quantize


def group(op: Quantize, threads: int, each: int, unroll: int):
    """The kernel; a group is a power of two of `each` to 32 · `each` elements, and k a multiple of `each`."""
    k, wide, x_dtype = op.static("k"), op.group, op.x.dtype
    codes_of = codec(op)
    vector = 16 // itemsize(x_dtype)  # elements a load
    load, stored = load_words(each // vector, vector), each // codes_of.per_byte
    lanes, groups = wide // each, -(-k // wide)
    reduce = reduce_team(codes_of, lanes)
    teams = threads // lanes
    int4 = codes_of.per_byte == 2
    scales = op.scale_storage()

    @T.prim_func
    def kernel(
        x: T.Tensor((CHUNKS, vector), x_dtype),
        q: T.Tensor((CHUNKS, stored), codes_of.dtype),
        scale: T.Tensor((CHUNKS, 2) if int4 else (CHUNKS,), scales.kernel_dtype),
        m: T.int32,
    ):
        with T.Kernel(T.ceildiv(m * groups, teams * unroll), threads=threads) as block:
            tx = T.get_thread_binding()
            values = T.alloc_local((unroll * each,), x_dtype)
            codes = T.alloc_local((stored,), codes_of.dtype)
            most = T.alloc_local((codes_of.range_size,), codes_of.range_dtype)
            s = T.alloc_local((SIZE,), "float32")
            for u in T.unroll(unroll):
                index = (block * unroll + u) * teams + tx // lanes
                row = index // groups
                column = index % groups * wide + tx % lanes * each
                if (row < m) & (column < k):
                    load(x, values, u * each, (row * k + column) // vector)
                else:
                    for e in T.unroll(each):
                        values[u * each + e] = T.cast(0, x_dtype)
            for u in T.unroll(unroll):
                index = (block * unroll + u) * teams + tx // lanes
                row = index // groups
                column = index % groups * wide + tx % lanes * each
                codes_of.clear(most)
                codes_of.grow(most, values, u * each, each)
                reduce(most)
                codes_of.scale(most, s)
                codes_of.encode(values, u * each, codes, s, each)
                if (row < m) & (column < k):
                    for e in T.vectorized(stored):
                        q[(row * k + column) // each, e] = codes[e]
                    if tx % lanes == 0:
                        if int4:
                            scale[index, 0] = s[0]
                            scale[index, 1] = s[2]
                        else:
                            scale[scales.at(row, index % groups, m)] = stored_scale(scales, s[0])

    return kernel
