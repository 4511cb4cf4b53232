"""moe_align: one cluster sorts the pairs; its blocks then share the padding.

What no routing can reach of ``sorted_token_ids`` is filled while the ids are on their way.
"""

import tilelang.language as T

from kgen.compiler.kernels import routing
from kgen.compiler.kernels.common import BY_HAND, CHUNKS
from kgen.compiler.kernels.routing import WORD
from kgen.compiler.ops.contract import Config
from kgen.compiler.ops.moe_align import MoeAlign
from kgen.compiler.program import Launch, Program


def program(op: MoeAlign, config: Config) -> Program:
    """The program of `op` with `config`."""
    name = f"moe_align_cluster{config['cluster']}_threads{config['threads']}"
    return Program((Launch(align(op, config["cluster"], config["threads"]), name, pass_config=BY_HAND),))


def align(op: MoeAlign, cluster: int, threads: int):
    """The kernel: `cluster` blocks of `threads`."""
    experts, topk, size = op.static("experts"), op.static("topk"), op.static("block")
    warps, each = threads // 32, routing.per_thread(experts, threads)
    lanes = cluster * threads  # of the grid
    steps = (experts - 1).bit_length()  # of a binary search
    look_up = routing.look_up(routing.translate(experts, experts, mapped=False))
    clear, count, place = (
        routing.clear(warps * experts, threads),
        routing.count(look_up),
        routing.place(look_up, inverse=False),
    )
    scan, rank_runs = routing.scan(threads), routing.rank_runs(experts, threads, cluster)

    @T.macro
    def fill(target, start, stop, value, at):
        """target[start:stop] = value, by the whole grid; `start` is a multiple of WORD."""
        for turn in T.serial(T.ceildiv(stop // WORD - start // WORD, lanes)):
            word = start // WORD + turn * lanes + at
            if word < stop // WORD:
                for v in T.vectorized(WORD):
                    target[word, v] = value
        if at < stop % WORD:
            target[stop // WORD, at] = value

    @T.prim_func
    def kernel(
        topk_ids: T.Tensor((CHUNKS,), "int32"),
        sorted_token_ids: T.Tensor((CHUNKS, WORD), "int32"),
        expert_ids: T.Tensor((CHUNKS,), "int32"),
        num_tokens_post_pad: T.Tensor((1,), "int32"),
        tokens: T.int32,
    ):
        with T.Kernel(cluster, threads=threads, cluster_dims=cluster) as rank:
            T.import_source(routing.READ_CLUSTER)
            tx = T.get_thread_binding()
            counts = T.alloc_shared((warps, experts), "int32")
            totals = T.alloc_shared((experts,), "int32")
            starts = T.alloc_shared((experts,), "int32")  # slot of each expert's first pair
            ends = T.alloc_shared((experts,), "int32")  # and the slot behind its last
            bases = T.alloc_shared((experts,), "int32")  # and the slot of its first pair in this block
            parts = T.alloc_shared((warps,), "int32")
            before = T.alloc_local((each,), "int32")
            all = T.alloc_local((each,), "int32")
            running = T.alloc_local((2,), "int32")
            owner = T.alloc_local((1,), "int32")
            pairs = tokens * topk
            capacity = pairs + (experts + 1) * (size - 1)
            reached = T.min(pairs * size, pairs + T.min(pairs, experts) * (size - 1) + WORD - 1) // WORD * WORD
            turns = T.ceildiv(pairs, lanes)
            first = T.min(rank * turns * threads, pairs)
            last = T.min(first + turns * threads, pairs)
            at = rank * threads + tx

            fill(sorted_token_ids, reached, capacity, pairs, at)
            clear(counts, tx)
            T.sync_threads()
            count(topk_ids, topk_ids, counts, first, last, turns, tx)
            T.sync_threads()
            rank_runs(counts, totals, before, all, rank, tx)
            running[0] = 0
            for q in T.unroll(each):
                running[0] += T.ceildiv(all[q], size) * size
            scan(running, parts, tx)
            for q in T.unroll(each):
                expert = tx * each + q
                if expert < experts:
                    starts[expert] = running[0]
                    bases[expert] = running[0] + before[q]
                    ends[expert] = running[0] + all[q]
                running[0] += T.ceildiv(all[q], size) * size
            T.sync_threads()
            total = running[1]
            if at == 0:
                num_tokens_post_pad[0] = total
            place(topk_ids, topk_ids, counts, bases, sorted_token_ids, first, last, turns, tx)
            for turn in T.serial(T.ceildiv(total // size, cluster * warps)):
                number = turn * cluster * warps + rank * warps + tx // 32
                if number < total // size:
                    owner[0] = 0  # the last expert that starts at the block or before it
                    for step in T.unroll(steps):
                        further = owner[0] + (1 << (steps - 1 - step))
                        if further < experts:
                            if starts[further] <= number * size:
                                owner[0] = further
                    if tx % 32 == 0:
                        expert_ids[number] = owner[0]
                    for slot in T.serial(T.ceildiv(size, 32)):
                        if slot * 32 + tx % 32 < size:
                            if number * size + slot * 32 + tx % 32 >= ends[owner[0]]:
                                sorted_token_ids[
                                    (number * size + slot * 32 + tx % 32) // WORD, (slot * 32 + tx) % WORD
                                ] = pairs
            fill(sorted_token_ids, total, reached, pairs, at)
            for turn in T.serial(T.ceildiv(T.ceildiv(capacity, size) - total // size, lanes)):
                number = total // size + turn * lanes + at
                if number < T.ceildiv(capacity, size):
                    expert_ids[number] = -1
            if cluster > 1:
                T.cluster_wait()

    return kernel
