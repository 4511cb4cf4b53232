"""One given scale for the whole tensor: x and q are walked as flat arrays of chunks; only the last may be masked."""

import tilelang.language as T

from kgen.compiler.kernels.common import CHUNKS, load_words
from kgen.compiler.kernels.quantize.arithmetic import SIZE, codec
from kgen.compiler.ops.numerics import itemsize
from kgen.compiler.ops.quantize import Quantize


def flat(op: Quantize, threads: int, each: int, unroll: int):
    """The kernel: a thread takes `unroll` chunks of `each` elements."""
    k, x_dtype = op.static("k"), op.x.dtype
    codes_of = codec(op)
    vector = 16 // itemsize(x_dtype)  # elements a load
    words, share = each // vector, threads * unroll
    load = load_words(words, vector)

    @T.prim_func
    def kernel(
        x: T.Tensor((CHUNKS, vector), x_dtype),
        scale: T.Tensor((1,), "float32"),
        q: T.Tensor((CHUNKS, each), codes_of.dtype),
        m: T.int32,
    ):
        with T.Kernel(T.ceildiv(m * k, share * each), threads=threads) as block:
            tx = T.get_thread_binding()
            values = T.alloc_local((unroll * each,), x_dtype)
            codes = T.alloc_local((each,), codes_of.dtype)
            s = T.alloc_local((SIZE,), "float32")
            codes_of.take(scale[0], s)
            for u in T.unroll(unroll):
                chunk = block * share + u * threads + tx
                if chunk * each + each <= m * k:
                    load(x, values, u * each, chunk * words)
                else:
                    for w in T.unroll(words):
                        for v in T.unroll(vector):
                            if chunk * each + w * vector + v < m * k:
                                values[u * each + w * vector + v] = x[chunk * words + w, v]
            for u in T.unroll(unroll):
                chunk = block * share + u * threads + tx
                codes_of.encode(values, u * each, codes, s, each)
                if chunk * each + each <= m * k:
                    for e in T.vectorized(each):
                        q[chunk, e] = codes[e]
                else:
                    for e in T.unroll(each):
                        if chunk * each + e < m * k:
                            q[chunk, e] = codes[e]

    return kernel
