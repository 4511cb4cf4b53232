"""moe_unpermute: a thread has `words` 16-byte words of a token's row, and all its rows' words in flight at once."""

import tilelang.language as T

from kgen.compiler.kernels.common import BY_HAND, CHUNKS
from kgen.compiler.ops.contract import Config
from kgen.compiler.ops.moe_unpermute import VECTOR, MoeUnpermute
from kgen.compiler.ops.numerics import itemsize
from kgen.compiler.program import Launch, Program


def program(op: MoeUnpermute, config: Config) -> Program:
    """The program of `op` with `config`."""
    added = "".join(f"_{name}" for name in ("shared_out", "residual") if getattr(op, name))
    name = f"moe_unpermute_{op.mm2.dtype}{added}_threads{config['threads']}_words{config['words']}"
    return Program((Launch(gather(op, config["threads"], config["words"]), name, pass_config=BY_HAND),))


def gather(op: MoeUnpermute, threads: int, words: int):
    """The kernel: blocks of `threads` · `words` words of a row."""
    topk, dtype, factor = op.static("topk"), op.mm2.dtype, float(op.scaling_factor)
    vector = VECTOR // itemsize(dtype)
    row = op.static("hidden") // vector  # words of a row
    parts = -(-row // (threads * words))

    @T.macro
    def add(source, sums, line, word):
        """sums += row `line` of `source`, from `word` on."""
        raw = T.alloc_local((words * vector,), dtype)
        for w in T.unroll(words):
            if word + w * threads < row:
                for v in T.vectorized(vector):
                    raw[w * vector + v] = source[T.cast(line, "int64") * row + word + w * threads, v]
        for e in T.unroll(words * vector):
            sums[e] += T.cast(raw[e], "float32")

    @T.prim_func
    def kernel(
        mm2: T.Tensor((CHUNKS, vector), dtype),
        topk_weights: T.Tensor((CHUNKS,), "float32"),
        fwd_idx: T.Tensor((CHUNKS,), "int32"),
        shared_out: T.Tensor((CHUNKS, vector), dtype),
        residual: T.Tensor((CHUNKS, vector), dtype),
        out: T.Tensor((CHUNKS, vector), dtype),
        tokens: T.int32,
    ):
        with T.Kernel(parts, tokens, threads=threads) as (part, token):
            tx = T.get_thread_binding()
            places = T.alloc_local((topk,), "int32")
            weights = T.alloc_local((topk,), "float32")
            raw = T.alloc_local((topk * words * vector,), dtype)
            sums = T.alloc_local((words * vector,), "float32")
            result = T.alloc_local((words * vector,), dtype)
            word = part * threads * words + tx
            for j in T.unroll(topk):
                places[j] = fwd_idx[token * topk + j]
                weights[j] = topk_weights[token * topk + j]
            for j in T.unroll(topk):
                for w in T.unroll(words):
                    if T.cast(places[j], "uint32") < T.cast(tokens * topk, "uint32"):
                        if word + w * threads < row:
                            for v in T.vectorized(vector):
                                raw[(j * words + w) * vector + v] = mm2[
                                    T.cast(places[j], "int64") * row + word + w * threads, v
                                ]
                    else:
                        for v in T.unroll(vector):
                            raw[(j * words + w) * vector + v] = T.cast(0, dtype)
            for e in T.unroll(words * vector):
                sums[e] = T.float32(0)
            for j in T.unroll(topk):
                for e in T.unroll(words * vector):
                    sums[e] += weights[j] * T.cast(raw[j * words * vector + e], "float32")
            for e in T.unroll(words * vector):
                sums[e] = sums[e] * T.float32(factor)
            if op.shared_out:
                add(shared_out, sums, token, word)
            if op.residual:
                add(residual, sums, token, word)
            for e in T.unroll(words * vector):
                result[e] = T.cast(sums[e], dtype)
            for w in T.unroll(words):
                if word + w * threads < row:
                    for v in T.vectorized(vector):
                        out[T.cast(token, "int64") * row + word + w * threads, v] = result[w * vector + v]

    return kernel
