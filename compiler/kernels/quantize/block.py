"""A 128 × 128 tile a block of threads, held in registers between the reduction and the cast: scale {block: [128, 128]}.

Each row of the tile is walked in chunks of `each` elements (one element where rows start off 16-byte boundaries).
"""

import tilelang.language as T

from kgen.compiler.kernels.common import CHUNKS, load_words
from kgen.compiler.kernels.quantize.arithmetic import SIZE, codec
from kgen.compiler.kernels.quantize.common import reduce_block, stored_scale
from kgen.compiler.ops.numerics import itemsize
from kgen.compiler.ops.quantize import Quantize

TILE = 128


def block(op: Quantize, threads: int, each: int):
    """The kernel: `each` elements of a row a thread at a time."""
    k, x_dtype = op.static("k"), op.x.dtype
    codes_of = codec(op)
    reduce = reduce_block(codes_of, threads)
    vector = min(each, 16 // itemsize(x_dtype))
    lanes = TILE // each
    rows = threads // lanes  # of the tile at a time
    turns = TILE // rows
    columns = -(-k // TILE)
    scales = op.scale_storage()
    load = load_words(each // vector, vector)

    @T.prim_func
    def kernel(
        x: T.Tensor((CHUNKS * 8, vector), x_dtype),
        q: T.Tensor((CHUNKS * 8, each), codes_of.dtype),
        scale: T.Tensor((CHUNKS,), scales.kernel_dtype),
        m: T.int32,
    ):
        with T.Kernel(columns, T.ceildiv(m, TILE), threads=threads) as (bx, by):
            tx = T.get_thread_binding()
            values = T.alloc_local((turns * each,), x_dtype)
            codes = T.alloc_local((each,), codes_of.dtype)
            most = T.alloc_local((codes_of.range_size,), codes_of.range_dtype)
            s = T.alloc_local((SIZE,), "float32")
            parts = T.alloc_shared((threads // 32 * codes_of.range_size,), codes_of.range_dtype)
            column = bx * TILE + tx % lanes * each
            for j in T.unroll(turns):
                row = by * TILE + j * rows + tx // lanes
                if (row < m) & (column < k):
                    load(x, values, j * each, (row * k + column) // vector)
                else:
                    for e in T.unroll(each):
                        values[j * each + e] = T.cast(0, x_dtype)
            codes_of.clear(most)
            codes_of.grow(most, values, 0, turns * each)
            reduce(most, parts, tx)
            codes_of.scale(most, s)
            for j in T.unroll(turns):
                row = by * TILE + j * rows + tx // lanes
                codes_of.encode(values, j * each, codes, s, each)
                if (row < m) & (column < k):
                    for e in T.vectorized(each):
                        q[(row * k + column) // each, e] = codes[e]
            if tx == 0:
                scale[scales.at(by, bx, T.ceildiv(m, TILE))] = stored_scale(scales, s[0])

    return kernel
