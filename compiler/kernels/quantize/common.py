"""What the forms share."""

import tilelang.language as T

from kgen.compiler.kernels.quantize.arithmetic import Codec
from kgen.compiler.ops.scaling import ScaleStorage


def stored_scale(storage: ScaleStorage, scale):
    """A float32 scale as it is stored."""
    return T.cast(T.reinterpret(scale, "int32") >> 23, "uint8") if storage.kernel_dtype == "uint8" else scale


def reduce_team(codec: Codec, lanes: int):
    """A macro: the range of `lanes` neighbouring threads, a power of two of at most 32, in all of them."""

    @T.macro
    def reduce(most):
        for i in T.unroll(codec.range_size):
            for step in T.unroll(lanes.bit_length() - 1):
                most[i] = T.max(most[i], T.shfl_xor(most[i], 1 << step))

    return reduce


def reduce_block(codec: Codec, threads: int):
    """A macro: the range of all threads of a block, in all of them; `parts` is shared, [threads / 32 · range_size]."""
    warps = threads // 32
    reduce_warp = reduce_team(codec, 32)

    @T.macro
    def reduce(most, parts, tx):
        reduce_warp(most)
        if warps > 1:
            for i in T.unroll(codec.range_size):
                if tx % 32 == 0:
                    parts[i * warps + tx // 32] = most[i]
            T.sync_threads()
            for i in T.unroll(codec.range_size):
                for w in T.unroll(warps):
                    most[i] = T.max(most[i], parts[i * warps + w])

    return reduce
