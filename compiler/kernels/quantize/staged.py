"""A row a block, staged through shared memory: groups along rows that start anywhere (k odd).

The aligned words that cover the row are copied in, a warp takes a group at a time with neighbouring elements in
neighbouring lanes, and the codes leave in aligned words too, as element i of q lies where element i of x does.
"""

import tilelang.language as T

from kgen.compiler.kernels.common import CHUNKS
from kgen.compiler.kernels.quantize.arithmetic import SIZE, codec
from kgen.compiler.kernels.quantize.common import reduce_team, stored_scale
from kgen.compiler.ops.numerics import itemsize
from kgen.compiler.ops.quantize import Quantize


def staged(op: Quantize, threads: int):
    """The kernel; a group is a multiple of 32."""
    k, wide, x_dtype = op.static("k"), op.group, op.x.dtype
    codes_of = codec(op)
    vector = 16 // itemsize(x_dtype)  # elements a load, and codes a store
    words = -(-(k + vector - 1) // vector)
    turns = -(-words // threads)
    groups, warps, held = -(-k // wide), threads // 32, wide // 32
    reduce = reduce_team(codes_of, 32)
    scales = op.scale_storage()

    @T.prim_func
    def kernel(
        x: T.Tensor((CHUNKS, vector), x_dtype),
        q: T.Tensor((CHUNKS, vector), codes_of.dtype),
        scale: T.Tensor((CHUNKS,), scales.kernel_dtype),
        m: T.int32,
    ):
        with T.Kernel(m, threads=threads) as r:
            tx = T.get_thread_binding()
            source = T.alloc_shared((turns * threads, vector), x_dtype)
            target = T.alloc_shared((turns * threads, vector), codes_of.dtype)
            values = T.alloc_local((held,), x_dtype)
            codes = T.alloc_local((held,), codes_of.dtype)
            most = T.alloc_local((codes_of.range_size,), codes_of.range_dtype)
            s = T.alloc_local((SIZE,), "float32")
            begin = r * k
            first = begin // vector
            offset = begin % vector
            for j in T.unroll(turns):
                word = j * threads + tx
                if (first + word) * vector + vector <= m * k:
                    for v in T.vectorized(vector):
                        source[word, v] = x[first + word, v]
                else:  # the tensor's last words may not be whole
                    for v in T.unroll(vector):
                        if (first + word) * vector + v < m * k:
                            source[word, v] = x[first + word, v]
            T.sync_threads()
            for turn in T.unroll(-(-groups // warps)):
                index = turn * warps + tx // 32
                if index < groups:
                    for i in T.unroll(held):
                        column = index * wide + i * 32 + tx % 32
                        at = offset + T.min(column, k - 1)
                        values[i] = T.if_then_else(column < k, source[at // vector, at % vector], T.cast(0, x_dtype))
                    codes_of.clear(most)
                    codes_of.grow(most, values, 0, held)
                    reduce(most)
                    codes_of.scale(most, s)
                    codes_of.encode(values, 0, codes, s, held)
                    for i in T.unroll(held):
                        column = index * wide + i * 32 + tx % 32
                        at = offset + column
                        if column < k:
                            target[at // vector, at % vector] = codes[i]
                    if tx % 32 == 0:
                        scale[scales.at(r, index, m)] = stored_scale(scales, s[0])
            T.sync_threads()
            for j in T.unroll(turns):
                word = j * threads + tx
                chunk = first + word
                if (chunk * vector >= begin) & (chunk * vector + vector <= begin + k):
                    for v in T.vectorized(vector):
                        q[chunk, v] = target[word, v]
                else:
                    for v in T.unroll(vector):
                        if (chunk * vector + v >= begin) & (chunk * vector + v < begin + k):
                            q[chunk, v] = target[word, v]

    return kernel
