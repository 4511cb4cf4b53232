"""Sorting pairs by expert within a cluster: what moe_align and moe_permute share.

Each warp has a run of pairs. It counts them by expert in a row of shared memory of its own (`count`); a thread an
expert sums the rows up, then the blocks of the cluster (`rank_runs`); a scan over the experts says where each starts
(`scan`). In the second pass over its pairs a warp takes 32 at a time, and those of an expert get successive places
(`place`). So an expert's pairs stay in ascending order.

Round trips: ids from memory, a handful of the block's barriers, two of the cluster's, ids again (from L1 or L2).
"""

import tilelang.language as T

from kgen.compiler.kernels.warp import lanes_before

ABSENT = -1
WORD = 4  # int32 of a 16-byte access

READ_CLUSTER = r"""
#ifndef KGEN_READ_CLUSTER
#define KGEN_READ_CLUSTER
// An int of another block's shared memory, of the block `rank` in the cluster.
__device__ __forceinline__ int kgen_read_cluster(const int* here, int rank) {
  unsigned address;
  int value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address) : "r"((unsigned)__cvta_generic_to_shared(here)), "r"(rank));
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
#endif
"""


def per_thread(experts: int, threads: int) -> int:
    """Experts that a thread sums up, neighbours."""
    return -(-experts // threads)


def scan(threads: int):
    """A macro: value[0], one a thread, becomes the sum of the threads before it, and value[1] the sum of all.

    `parts` is shared, [threads / 32].
    """

    @T.macro
    def run(value, parts, tx):
        own = T.alloc_local((2,), "int32")
        own[0] = value[0]
        for step in T.unroll(5):
            own[1] = T.shfl_up(own[0], 1 << step)
            if tx % 32 >= 1 << step:
                own[0] += own[1]
        if tx % 32 == 31:
            parts[tx // 32] = own[0]
        T.sync_threads()
        own[0] -= value[0]
        value[1] = 0
        for w in T.unroll(threads // 32):
            own[1] = parts[w]
            value[1] += own[1]
            if w < tx // 32:
                own[0] += own[1]
        value[0] = own[0]

    return run


def clear(size: int, threads: int):
    """A macro: counts, of `size` elements, are 0."""

    @T.macro
    def run(counts, tx):
        for turn in T.serial(-(-size // threads)):
            if turn * threads + tx < size:
                counts[(turn * threads + tx) // counts.shape[1], (turn * threads + tx) % counts.shape[1]] = 0

    return run


def translate(experts: int, local_experts: int, mapped: bool):
    """A macro: expert[0] = the expert of an id, or ABSENT; where `mapped`, what ``expert_map`` has for it."""

    @T.macro
    def run(expert_map, id, expert):
        expert[0] = id
        if T.cast(expert[0], "uint32") >= T.uint32(experts):
            expert[0] = ABSENT
        if mapped:
            if expert[0] != ABSENT:
                expert[0] = expert_map[expert[0]]
            if T.cast(expert[0], "uint32") >= T.uint32(local_experts):
                expert[0] = ABSENT

    return run


def look_up(translate):
    """A macro: expert[0] = the expert of pair i, or ABSENT."""

    @T.macro
    def run(topk_ids, expert_map, i, expert):
        translate(expert_map, topk_ids[i], expert)

    return run


def count(look_up):
    """A macro: counts[warp, expert] += pairs first..last - 1, `turns` · 32 a warp."""

    @T.macro
    def run(topk_ids, expert_map, counts, first, last, turns, tx):
        expert = T.alloc_local((1,), "int32")
        start = first + tx // 32 * turns * 32 + tx % 32
        for turn in T.serial(turns):
            if start + turn * 32 < last:
                look_up(topk_ids, expert_map, start + turn * 32, expert)
                if expert[0] != ABSENT:
                    T.atomic_add(counts[tx // 32, expert[0]], 1)

    return run


def rank_runs(experts: int, threads: int, cluster: int):
    """A macro over the experts of a thread, whose number q has all[q] pairs in the cluster, before[q] in blocks before.

    counts[warp, expert] becomes its pairs in the block's warps before. `totals` is shared, [experts].

    In a cluster it ends with the arrival at a barrier: wait for that before the block ends.
    """
    each = per_thread(experts, threads)

    @T.macro
    def run(counts, totals, before, all, rank, tx):
        passed = T.alloc_local((1,), "int32")
        for q in T.unroll(each):
            expert = tx * each + q
            before[q] = 0
            all[q] = 0
            if expert < experts:
                for w in T.unroll(threads // 32):
                    passed[0] = counts[w, expert]
                    counts[w, expert] = all[q]
                    all[q] += passed[0]
                totals[expert] = all[q]
        if cluster > 1:
            T.cluster_sync()
            for q in T.unroll(each):
                expert = tx * each + q
                if expert < experts:
                    all[q] = 0
                    for r in T.unroll(cluster):
                        passed[0] = T.call_extern("int32", "kgen_read_cluster", T.address_of(totals[expert]), r)
                        all[q] += passed[0]
                        if r < rank:
                            before[q] += passed[0]
            T.cluster_arrive()

    return run


def place(look_up, inverse: bool):
    """A macro over the pairs that `count` counted: pair i gets place bases[expert] + its number among the expert's.

    target[place] = i, or with `inverse` target[i] = place, -1 for an absent pair.
    """

    @T.macro
    def run(topk_ids, expert_map, counts, bases, target, first, last, turns, tx):
        start = first + tx // 32 * turns * 32 + tx % 32
        expert = T.alloc_local((1,), "int32")
        number = T.alloc_local((1,), "int32")
        slot = T.alloc_local((1,), "int32")
        same = T.alloc_local((1,), "uint32")
        for turn in T.serial(turns):
            i = start + turn * 32
            expert[0] = ABSENT
            if i < last:
                look_up(topk_ids, expert_map, i, expert)
            same[0] = T.match_any_sync(expert[0])
            slot[0] = -1
            if expert[0] != ABSENT:
                number[0] = counts[tx // 32, expert[0]] + lanes_before(same[0], tx)
                slot[0] = bases[expert[0]] + number[0]
            T.sync_warp()
            if expert[0] != ABSENT:
                if same[0] >> T.cast(tx % 32, "uint32") == T.uint32(1):  # the last of them
                    counts[tx // 32, expert[0]] = number[0] + 1
            T.sync_warp()
            if inverse:
                if i < last:
                    target[i // WORD, i % WORD] = slot[0]
            elif slot[0] >= 0:
                target[slot[0] // WORD, slot[0] % WORD] = i

    return run
