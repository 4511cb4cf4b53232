"""dequantize: codes and result walked as flat arrays of chunks of `each` elements, whatever shares a scale and
wherever rows start; only the tensor's last chunk may be masked.
"""

import tilelang.language as T

from kgen.compiler.kernels.common import BY_HAND, CHUNKS
from kgen.compiler.ops.contract import Config
from kgen.compiler.ops.dequantize import Dequantize
from kgen.compiler.ops.numerics import itemsize
from kgen.compiler.ops.scaling import ScaleStorage, tile
from kgen.compiler.program import Launch, Program


def program(op: Dequantize, config: Config) -> Program:
    """The program of `op` with `config`."""
    config = dict(config)
    form = {"flat": flat}[config.pop("form")]
    name = f"dequantize_{op.q.dtype}_{op.x.dtype}_{config['threads']}x{config['each']}x{config['unroll']}"
    return Program((Launch(form(op, **config), name, pass_config=BY_HAND),))


def flat(op: Dequantize, threads: int, each: int, unroll: int):
    """The kernel."""
    k, x_dtype, int4 = op.static("k"), op.x.dtype, op.q.dtype == "int4"
    q_dtype = "int8" if int4 else op.q.dtype
    scaling = op.q.scale
    vector = min(each, 16 // itemsize(x_dtype))  # elements a store
    words, loaded = each // vector, each // 2 if int4 else each
    share = threads * unroll
    high, wide = tile(scaling, 1, k)
    scales = ScaleStorage.of(scaling, -(-k // wide))
    whole = k % each == 0 and wide % each == 0  # a chunk has one scale

    def place(row, column):
        """Index of an element's scale."""
        return 0 if scaling == "tensor" else scales.at(row // high, column // wide, None)

    @T.prim_func
    def kernel(
        q: T.Tensor((CHUNKS, loaded), q_dtype),
        scale: T.Tensor((CHUNKS, 2 if int4 else 1), "float32"),
        x: T.Tensor((CHUNKS, vector), x_dtype),
        m: T.int32,
    ):
        with T.Kernel(T.ceildiv(m * k, share * each), threads=threads) as block:
            tx = T.get_thread_binding()
            codes = T.alloc_local((unroll * loaded,), q_dtype)
            values = T.alloc_local((each,), x_dtype)
            for u in T.unroll(unroll):
                chunk = block * share + u * threads + tx
                if chunk * each + each <= m * k:
                    for e in T.vectorized(loaded):
                        codes[u * loaded + e] = q[chunk, e]
                else:
                    for e in T.unroll(loaded):
                        if chunk * each + e * (each // loaded) < m * k:
                            codes[u * loaded + e] = q[chunk, e]
            for u in T.unroll(unroll):
                chunk = block * share + u * threads + tx
                row = chunk * each // k
                column = chunk * each % k
                if chunk * each < m * k:
                    if int4:
                        step = scale[place(row, column), 0]
                        offset = scale[place(row, column), 1]
                        for e in T.unroll(loaded):
                            pair = T.cast(codes[u * loaded + e], "int32")
                            high_code = T.cast(pair >> 4, "float32")
                            low_code = T.cast((pair << 28) >> 28, "float32")
                            values[2 * e] = T.cast(T.ieee_add(T.ieee_mul(high_code, step), offset), x_dtype)
                            values[2 * e + 1] = T.cast(T.ieee_add(T.ieee_mul(low_code, step), offset), x_dtype)
                    elif whole or scaling == "tensor":
                        s = scale[place(row, column), 0]
                        for e in T.unroll(each):
                            values[e] = T.cast(T.cast(codes[u * loaded + e], "float32") * s, x_dtype)
                    else:
                        for e in T.unroll(each):
                            over = column + e >= k  # into the next row
                            at = place(
                                T.min(row + T.cast(over, "int32"), m - 1), column + e - T.if_then_else(over, k, 0)
                            )
                            values[e] = T.cast(T.cast(codes[u * loaded + e], "float32") * scale[at, 0], x_dtype)
                    if chunk * each + each <= m * k:
                        for w in T.unroll(words):
                            for v in T.vectorized(vector):
                                x[chunk * words + w, v] = values[w * vector + v]
                    else:
                        for w in T.unroll(words):
                            for v in T.unroll(vector):
                                if chunk * each + w * vector + v < m * k:
                                    x[chunk * words + w, v] = values[w * vector + v]

    return kernel
