"""moe_permute: two forms.

direct, for few pairs: one launch, and no block waits for another. Each reads all ids and counts, for the pairs of its
token, the pairs that sort before them; its part of the row comes meanwhile. Block 0 writes the tables.

sorted: a cluster sorts the pairs and writes the tables; a second launch, whose blocks load their rows while it runs,
copies them.
"""

from collections.abc import Callable
from math import gcd

import tilelang.language as T

from kgen.compiler.kernels import routing
from kgen.compiler.kernels.common import BY_HAND, CHUNKS
from kgen.compiler.kernels.routing import ABSENT, WORD
from kgen.compiler.kernels.warp import add_u32
from kgen.compiler.ops.contract import Config
from kgen.compiler.ops.moe_permute import MoePermute
from kgen.compiler.program import Launch, Program

LAST = (1 << 31) - 1  # sorts behind every pair


def program(op: MoePermute, config: Config) -> Program:
    """The program of `op` with `config`."""
    config = dict(config)
    if config.pop("form") == "direct":
        return Program((_launch(op, direct, config),))
    copiers = {"threads": config.pop("copiers")}
    return Program((_launch(op, sort, config), _launch(op, copy, copiers)))


def _launch(op: MoePermute, kernel: Callable, config: Config) -> Launch:
    name = "_".join(["moe_permute", kernel.__name__, *(f"{key}{config[key]}" for key in sorted(config))])
    return Launch(kernel(op, **config), name, pass_config=BY_HAND)


def translator(op: MoePermute):
    """`routing.translate` for `op`."""
    return routing.translate(op.static("experts"), op.static("local_experts"), op.expert_map)


def table_writer(op: MoePermute, threads: int):
    """A macro: the tables, of sizes[q] rows for each expert q of a thread; offsets[q] becomes where they start."""
    experts = op.static("local_experts")
    each, scan = routing.per_thread(experts, threads), routing.scan(threads)

    @T.macro
    def write(sizes, offsets, parts, true_offsets, true_sizes, expert_first_token_offset, writes, tx):
        running = T.alloc_local((2,), "int32")
        running[0] = 0
        for q in T.unroll(each):
            running[0] += sizes[q]
        scan(running, parts, tx)
        for q in T.unroll(each):
            expert = tx * each + q
            offsets[q] = running[0]
            running[0] += sizes[q]
            if writes:
                if expert < experts:
                    true_offsets[expert] = offsets[q]
                    true_sizes[expert] = sizes[q]
                    expert_first_token_offset[expert] = T.cast(offsets[q], "int64")
        if writes:
            if tx == 0:
                expert_first_token_offset[experts] = T.cast(running[1], "int64")

    return write


def row_copier(op: MoePermute, threads: int, splits: int):
    """Two macros: `load` a part of a token's row into registers, `store` it as a row of perm_h."""
    words = op.row_bytes // 16
    share = -(-words // splits)
    turns = -(-share // threads)
    scales = op.scales
    scale_turns = -(-scales // threads)

    @T.macro
    def load(hidden_states, scale, row, scale_row, token, part, tx):
        base = T.cast(token, "int64") * words
        for j in T.unroll(turns):
            word = part * share + j * threads + tx
            if (j * threads + tx < share) & (word < words):
                for v in T.vectorized(WORD):
                    row[j * WORD + v] = hidden_states[base + word, v]
        for j in T.unroll(scale_turns):
            if (part == 0) & (j * threads + tx < scales):
                scale_row[j] = scale[token * scales + j * threads + tx]

    @T.macro
    def store(perm_h, perm_scale, row, scale_row, place, part, tx):
        base = T.cast(place, "int64") * words
        for j in T.unroll(turns):
            word = part * share + j * threads + tx
            if (j * threads + tx < share) & (word < words):
                for v in T.vectorized(WORD):
                    perm_h[base + word, v] = row[j * WORD + v]
        for j in T.unroll(scale_turns):
            if (part == 0) & (j * threads + tx < scales):
                perm_scale[T.cast(place, "int64") * scales + j * threads + tx] = scale_row[j]

    return turns * WORD, max(1, scale_turns), load, store


def direct(op: MoePermute, threads: int, splits: int):
    """The kernel of the direct form: `splits` blocks a token."""
    topk, experts = op.static("topk"), op.static("local_experts")
    warps, pairs_of_counts = threads // 32, -(-topk // 2)
    each = routing.per_thread(experts, threads)
    ids = gcd(topk, WORD)  # a load
    translate, write_tables = translator(op), table_writer(op, threads)
    row_words, scale_words, load, store = row_copier(op, threads, splits)

    @T.macro
    def count_before(topk_ids, expert_map, own, places, parts, token, pairs, tx):
        """own[p] = whether pair p of the token is there, places[p] = the pairs that sort before it."""
        expert = T.alloc_local((1,), "int32")
        counts = T.alloc_local((2 * pairs_of_counts,), "int32")
        packed = T.alloc_local((1,), "uint32")
        word = T.alloc_local((ids,), "int32")
        for p in T.unroll(topk):
            translate(expert_map, topk_ids[(token * topk + p) // ids, (token * topk + p) % ids], expert)
            own[p] = T.if_then_else(expert[0] == ABSENT, -1, expert[0] * pairs + token * topk + p)
            counts[p] = 0
        if topk % 2:
            counts[topk] = 0
        for turn in T.serial(T.ceildiv(pairs, threads * ids)):
            first = (turn * threads + tx) * ids
            if first < pairs:
                for v in T.vectorized(ids):
                    word[v] = topk_ids[first // ids, v]
                for v in T.unroll(ids):
                    translate(expert_map, word[v], expert)
                    key = T.if_then_else(expert[0] == ABSENT, LAST, expert[0] * pairs + first + v)
                    for p in T.unroll(topk):
                        counts[p] += T.if_then_else(key < own[p], 1, 0)
        for c in T.unroll(pairs_of_counts):  # both are under 2 ** 16
            packed[0] = add_u32(T.cast(counts[2 * c] | (counts[2 * c + 1] << 16), "uint32"))
            if tx % 32 == 0:
                parts[tx // 32, c] = T.cast(packed[0], "int32")
        T.sync_threads()
        for c in T.unroll(pairs_of_counts):
            expert[0] = 0
            for w in T.unroll(warps):
                expert[0] += parts[w, c]
            places[2 * c] = expert[0] & 0xFFFF
            places[2 * c + 1] = (expert[0] >> 16) & 0xFFFF

    @T.prim_func
    def kernel(
        hidden_states: T.Tensor((CHUNKS, WORD), "uint32"),
        topk_ids: T.Tensor((CHUNKS, ids), "int32"),
        expert_map: T.Tensor((CHUNKS,), "int32"),
        scale: T.Tensor((CHUNKS,), "float32"),
        perm_h: T.Tensor((CHUNKS, WORD), "uint32"),
        perm_scale: T.Tensor((CHUNKS,), "float32"),
        true_offsets: T.Tensor((experts,), "int32"),
        true_sizes: T.Tensor((experts,), "int32"),
        expert_first_token_offset: T.Tensor((experts + 1,), "int64"),
        fwd_idx: T.Tensor((CHUNKS,), "int32"),
        tokens: T.int32,
    ):
        with T.Kernel(tokens * splits + 1, threads=threads) as block:
            tx = T.get_thread_binding()
            row = T.alloc_local((row_words,), "uint32")
            scale_row = T.alloc_local((scale_words,), "float32")
            own = T.alloc_local((topk,), "int32")
            places = T.alloc_local((2 * pairs_of_counts,), "int32")
            sizes = T.alloc_local((each,), "int32")
            offsets = T.alloc_local((each,), "int32")
            expert = T.alloc_local((1,), "int32")
            counts = T.alloc_shared((experts,), "int32")
            parts = T.alloc_shared((warps, pairs_of_counts), "int32")
            sums = T.alloc_shared((warps,), "int32")
            pairs = tokens * topk
            if block == 0:
                for turn in T.serial(each):
                    if turn * threads + tx < experts:
                        counts[turn * threads + tx] = 0
                T.sync_threads()
                for turn in T.serial(T.ceildiv(pairs, threads)):
                    if turn * threads + tx < pairs:
                        translate(
                            expert_map, topk_ids[(turn * threads + tx) // ids, (turn * threads + tx) % ids], expert
                        )
                        if expert[0] != ABSENT:
                            T.atomic_add(counts[expert[0]], 1)
                T.sync_threads()
                for q in T.unroll(each):
                    sizes[q] = 0
                    if tx * each + q < experts:
                        sizes[q] = counts[tx * each + q]
                write_tables(sizes, offsets, sums, true_offsets, true_sizes, expert_first_token_offset, True, tx)
            else:
                token = (block - 1) // splits
                part = (block - 1) % splits
                load(hidden_states, scale, row, scale_row, token, part, tx)
                count_before(topk_ids, expert_map, own, places, parts, token, pairs, tx)
                for p in T.unroll(topk):
                    if own[p] >= 0:
                        store(perm_h, perm_scale, row, scale_row, places[p], part, tx)
                    if (part == 0) & (tx == 0):
                        fwd_idx[token * topk + p] = T.if_then_else(own[p] >= 0, places[p], -1)

    return kernel


def sort(op: MoePermute, cluster: int, threads: int):
    """The first kernel of the sorted form: places and tables."""
    topk, experts = op.static("topk"), op.static("local_experts")
    warps, each = threads // 32, routing.per_thread(experts, threads)
    look_up, write_tables = routing.look_up(translator(op)), table_writer(op, threads)
    clear, count = routing.clear(warps * experts, threads), routing.count(look_up)
    place, rank_runs = routing.place(look_up, inverse=True), routing.rank_runs(experts, threads, cluster)

    @T.prim_func
    def kernel(
        topk_ids: T.Tensor((CHUNKS,), "int32"),
        expert_map: T.Tensor((CHUNKS,), "int32"),
        true_offsets: T.Tensor((experts,), "int32"),
        true_sizes: T.Tensor((experts,), "int32"),
        expert_first_token_offset: T.Tensor((experts + 1,), "int64"),
        fwd_idx: T.Tensor((CHUNKS, WORD), "int32"),
        tokens: T.int32,
    ):
        with T.Kernel(cluster, threads=threads, cluster_dims=cluster) as rank:
            T.import_source(routing.READ_CLUSTER)
            T.pdl_trigger()
            tx = T.get_thread_binding()
            counts = T.alloc_shared((warps, experts), "int32")
            totals = T.alloc_shared((experts,), "int32")
            bases = T.alloc_shared((experts,), "int32")
            parts = T.alloc_shared((warps,), "int32")
            before = T.alloc_local((each,), "int32")
            all = T.alloc_local((each,), "int32")
            offsets = T.alloc_local((each,), "int32")
            pairs = tokens * topk
            turns = T.ceildiv(pairs, cluster * threads)
            first = T.min(rank * turns * threads, pairs)
            last = T.min(first + turns * threads, pairs)
            clear(counts, tx)
            T.sync_threads()
            count(topk_ids, expert_map, counts, first, last, turns, tx)
            T.sync_threads()
            rank_runs(counts, totals, before, all, rank, tx)
            write_tables(all, offsets, parts, true_offsets, true_sizes, expert_first_token_offset, rank == 0, tx)
            for q in T.unroll(each):
                if tx * each + q < experts:
                    bases[tx * each + q] = offsets[q] + before[q]
            T.sync_threads()
            place(topk_ids, expert_map, counts, bases, fwd_idx, first, last, turns, tx)
            if cluster > 1:
                T.cluster_wait()

    return kernel


def copy(op: MoePermute, threads: int):
    """The second kernel of the sorted form: a block a token. It waits for the first one only for the places."""
    topk = op.static("topk")
    row_words, scale_words, load, store = row_copier(op, threads, 1)

    @T.prim_func
    def kernel(
        hidden_states: T.Tensor((CHUNKS, WORD), "uint32"),
        scale: T.Tensor((CHUNKS,), "float32"),
        perm_h: T.Tensor((CHUNKS, WORD), "uint32"),
        perm_scale: T.Tensor((CHUNKS,), "float32"),
        fwd_idx: T.Tensor((CHUNKS,), "int32"),
        tokens: T.int32,
    ):
        with T.Kernel(tokens, threads=threads) as token:
            tx = T.get_thread_binding()
            row = T.alloc_local((row_words,), "uint32")
            scale_row = T.alloc_local((scale_words,), "float32")
            places = T.alloc_local((topk,), "int32")
            load(hidden_states, scale, row, scale_row, token, 0, tx)
            T.pdl_sync()
            for p in T.unroll(topk):
                # Not an ordinary load: that of what a kernel only reads may move to before the wait.
                places[p] = T.atomic_load(fwd_idx[token * topk + p], memory_order="relaxed")
            for p in T.unroll(topk):
                if places[p] >= 0:
                    store(perm_h, perm_scale, row, scale_row, places[p], 0, tx)

    return kernel
