"""moe_topk: a warp for each token, its logits in registers; each pick is a maximum over the warp.

A pick takes one reduction where 16-bit logits decide: the 19 bits of float32 that they have and the expert's complement
are one integer. Otherwise it takes two: the value, then the least expert that has it.
"""

import tilelang.language as T

from kgen.compiler.kernels.common import BY_HAND, CHUNKS
from kgen.compiler.kernels.warp import disordered, max_u32, min_u32, ordered
from kgen.compiler.ops.contract import Config
from kgen.compiler.ops.moe_topk import MOST, MoeTopk
from kgen.compiler.ops.numerics import itemsize
from kgen.compiler.program import Launch, Program

LOW = (1 << 13) - 1  # what a 16-bit float leaves free of a float32
NOBODY = (1 << 31) - 1


def program(op: MoeTopk, config: Config) -> Program:
    """The program of `op` with `config`."""
    parts = [op.logits.dtype, op.scoring, "bias" if op.bias else "", "grouped" if op.grouped else ""]
    name = "_".join(["moe_topk", *filter(None, parts), f"warps{config['warps']}"])
    return Program((Launch(warp(op, config["warps"]), name, pass_config=BY_HAND),))


def warp(op: MoeTopk, warps: int):
    """The kernel: `warps` tokens a block."""
    experts, topk, dtype = op.static("experts"), op.static("topk"), op.logits.dtype
    softmax, factor = op.scoring == "softmax", float(op.scaling_factor)
    vector = max(
        v for v in (8, 4, 2, 1) if experts % v == 0 and v * itemsize(dtype) <= 16 and (v == 1 or 32 * v <= experts)
    )
    words = -(-experts // (32 * vector))
    each = words * vector  # logits a lane
    whole = experts == 32 * each
    packed = dtype != "float32" and not op.bias
    summed = softmax and (op.bias or not op.renormalize)  # the sum over all experts is needed
    n_group, kept_groups = (op.groups.n_group, op.groups.topk_group) if op.grouped else (1, 1)
    size = experts // n_group
    lanes = topk - 1  # steps of a reduction over the picks: as many as this has bits

    def expert(lane, e):
        """The expert whose logit is a lane's number e."""
        return (e // vector * 32 + lane) * vector + e % vector

    def finite(value):
        """NaN and infinities as finite numbers, -0 as 0: `max` and `min` return what is a number."""
        clamped = T.min(T.max(value, T.float32(-MOST)), T.float32(MOST))
        return T.if_then_else(clamped == T.float32(0), T.float32(0), clamped)

    def score(value, most, total):
        """Of a logit, given the token's largest and the sum of powers."""
        if softmax:
            return T.exp(value - most) / total
        return T.float32(1) / (T.float32(1) + T.exp(-value))

    @T.macro
    def load(logits, values, token, lane):
        raw = T.alloc_local((each,), dtype)
        for w in T.unroll(words):
            if (w * 32 + lane) * vector < experts:
                for v in T.vectorized(vector):
                    raw[w * vector + v] = logits[token * (experts // vector) + w * 32 + lane, v]
        for e in T.unroll(each):
            values[e] = finite(T.cast(raw[e], "float32"))

    @T.macro
    def sum_powers(values, lane, most, total):
        """The token's largest logit, and the sum of the others' powers relative to it."""
        best = T.alloc_local((1,), "uint32")
        best[0] = T.uint32(0)
        for e in T.unroll(each):
            if whole or expert(lane, e) < experts:
                best[0] = T.max(best[0], ordered(values[e]))
        best[0] = max_u32(best[0])
        most[0] = disordered(best[0])
        total[0] = T.float32(0)
        for e in T.unroll(each):
            if whole or expert(lane, e) < experts:
                total[0] += T.exp(values[e] - most[0])
        for step in T.unroll(5):
            total[0] += T.shfl_xor(total[0], 1 << step)

    @T.macro
    def drop_groups(values, keys, shelf, row, lane):
        """keys = 0 for the experts of all but the best groups."""
        first = T.alloc_local((1,), "float32")
        second = T.alloc_local((1,), "float32")
        mine = T.alloc_local((1,), "uint32")
        won = T.alloc_local((2,), "uint32")
        kept = T.alloc_local((1,), "uint32")
        for e in T.unroll(each):
            if whole or expert(lane, e) < experts:
                shelf[row, expert(lane, e)] = values[e]
        T.sync_warp()
        first[0] = T.float32(-MOST)
        second[0] = T.float32(-MOST)
        if lane < n_group:
            for i in T.serial(size):
                value = shelf[row, lane * size + (i + lane) % size]
                second[0] = T.max(second[0], T.min(first[0], value))
                first[0] = T.max(first[0], value)
        mine[0] = T.if_then_else(
            lane < n_group, ordered(finite(first[0] + second[0]) if op.bias else first[0]), T.uint32(0)
        )
        kept[0] = T.uint32(0)
        for _ in T.unroll(kept_groups):
            won[0] = max_u32(mine[0])
            won[1] = min_u32(T.if_then_else(mine[0] == won[0], T.cast(lane, "uint32"), T.uint32(NOBODY)))
            kept[0] = kept[0] | (T.uint32(1) << won[1])
            mine[0] = T.if_then_else(T.cast(lane, "uint32") == won[1], T.uint32(0), mine[0])
        for e in T.unroll(each):
            if (kept[0] >> T.cast(expert(lane, e) // size, "uint32")) & T.uint32(1) == T.uint32(0):
                keys[e] = T.uint32(0)

    @T.macro
    def pick(keys, lane, turn, mine):
        """mine = the best expert, in lane number `turn`; it is not picked again."""
        best = T.alloc_local((1,), "uint32")
        won = T.alloc_local((2,), "uint32")
        best[0] = keys[0]
        for e in T.unroll(each - 1):
            best[0] = T.max(best[0], keys[e + 1])
        won[0] = max_u32(best[0])
        if packed:
            won[1] = T.uint32(LOW) - (won[0] & T.uint32(LOW))
            for e in T.unroll(each):
                keys[e] = T.if_then_else(keys[e] == won[0], T.uint32(0), keys[e])
        else:
            best[0] = T.uint32(NOBODY)
            for e in T.unroll(each):
                number = T.cast(expert(lane, e), "uint32")
                best[0] = T.if_then_else(keys[e] == won[0], T.min(best[0], number), best[0])
            won[1] = min_u32(best[0])
            for e in T.unroll(each):
                keys[e] = T.if_then_else(T.cast(expert(lane, e), "uint32") == won[1], T.uint32(0), keys[e])
        if lane == turn:
            mine[0] = T.cast(won[1], "int32")

    @T.prim_func
    def kernel(
        logits: T.Tensor((CHUNKS, vector), dtype),
        bias: T.Tensor((experts,), "float32"),
        topk_weights: T.Tensor((CHUNKS,), "float32"),
        topk_ids: T.Tensor((CHUNKS,), "int32"),
        tokens: T.int32,
    ):
        with T.Kernel(T.ceildiv(tokens, warps), threads=32 * warps) as block:
            tx = T.get_thread_binding()
            lane = tx % 32
            token = block * warps + tx // 32
            values = T.alloc_local((each,), "float32")
            keys = T.alloc_local((each,), "uint32")
            most = T.alloc_local((1,), "float32")
            total = T.alloc_local((1,), "float32")
            mine = T.alloc_local((1,), "int32")
            weight = T.alloc_local((2,), "float32")
            shelf = T.alloc_shared((warps, experts if op.grouped else 1), "float32")
            if token < tokens:
                load(logits, values, token, lane)
                total[0] = T.float32(1)
                if summed:
                    sum_powers(values, lane, most, total)
                if op.bias:
                    for e in T.unroll(each):
                        if whole or expert(lane, e) < experts:
                            values[e] = finite(score(values[e], most[0], total[0]) + bias[expert(lane, e)])
                for e in T.unroll(each):
                    number = T.cast(expert(lane, e), "uint32")
                    key = ordered(values[e])
                    keys[e] = T.if_then_else(
                        expert(lane, e) < experts,
                        (key & ~T.uint32(LOW)) | (T.uint32(LOW) - number) if packed else key,
                        T.uint32(0),
                    )
                if op.grouped:
                    drop_groups(values, keys, shelf, tx // 32, lane)
                mine[0] = 0
                for turn in T.unroll(topk):
                    pick(keys, lane, turn, mine)
                weight[0] = finite(T.cast(logits[(token * experts + mine[0]) // vector, (mine[0] % vector)], "float32"))
                if softmax and not summed:
                    most[0] = T.shfl_sync(weight[0], 0)
                weight[0] = T.if_then_else(lane < topk, score(weight[0], most[0], total[0]), T.float32(0))
                if op.renormalize:
                    weight[1] = weight[0]
                    for step in T.unroll(lanes.bit_length()):
                        weight[1] += T.shfl_xor(weight[1], 1 << step)
                    weight[0] = weight[0] / T.if_then_else(weight[1] > T.float32(0), weight[1], T.float32(1))
                if lane < topk:
                    topk_weights[token * topk + lane] = weight[0] * T.float32(factor)
                    topk_ids[token * topk + lane] = mine[0]

    return kernel
