"""How long a config's kernel should take, from a handful of figures of a device: what is worth building and measuring.

With B blocks (of a persistent kernel: tiles) on S SMs that each hold R of them at a time:

    T = overhead + max(memory, launch, blocks)
    memory = bytes of `Operator.traffic` / memory bandwidth
    launch = B · seconds a block launch
    blocks = rounds of block(c), where block(c) is the time of c blocks that share an SM:
             trip + max(c · bytes / l2(c), c · flops / flops a second of an SM)
    l2(c)  = l2_peak · q / (q + l2_half),   q = bytes that the c blocks keep in flight

A plain kernel has ⌊B / (S·R)⌋ full rounds of block(R), and one of what remains, ⌈rest / S⌉ an SM. A persistent kernel
has one trip, as a tile's loads run during the tile before it, and ⌈B / S⌉ tiles one after the other. So the last,
partly filled round costs a whole one: 133 tiles take twice the time of 132 on as many SMs. A block keeps in flight
its shared-memory stages, or 16 bytes a thread, though no more than it moves.

The estimate ranks; it does not promise. It leaves out bank conflicts, synchronization, scalar loads and L2 misses.

NVIDIA's nvidia-matmul-heuristics is not used: it works without a GPU, but ranks CUTLASS's kernels (clusters, split-k),
not these, knows products alone, and would make the candidates hang on the version of a closed library.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kgen.compiler.ops.contract import Config, Dims, Operator, Work
from kgen.runtime.format.expr import Expr, evaluate

Candidate = tuple[Expr, Config]
NEAR = 2.0  # a candidate this much slower than the best of a point, by its estimate, is not built for it
LADDER = 4  # a range dim is looked at on powers of this


class Machine(NamedTuple):
    """A device.

    Attributes:
        memory: device memory bandwidth, bytes/s, reads and writes together.
        l2_peak, l2_half: bytes/s into an SM from L2 with unlimited bytes in flight, and the bytes in flight at which
            half of that is reached.
        flops: operand type -> tensor-core flop/s of an SM.
        smem, block_smem: bytes of shared memory of an SM, and the most a block may have.
        threads, blocks, registers: the most an SM holds.
        overhead: seconds of an empty kernel.
        block_launch: seconds between the launches of two blocks.
        trip: seconds from a load to its value, from device memory.
    """

    sm_count: int
    memory: float
    l2_peak: float
    l2_half: int
    flops: Mapping[str, float]
    smem: int
    block_smem: int
    threads: int
    blocks: int
    registers: int
    overhead: float
    block_launch: float
    trip: float


# Measured on an H200 with driver 13.0; limits from the CUDA C++ Programming Guide 13.0, "Compute Capabilities".
H200 = Machine(
    sm_count=132,
    memory=4.3e12,  # a large copy
    # All SMs from L2: 4.9e12 bytes/s with 512 threads an SM, 8.4e12 with 2,048, each with a 16-byte load in flight.
    # Both lie on 11.0e12 · q / (q + 10 KiB), where q is 8 KiB and 32 KiB.
    l2_peak=11.0e12 / 132,
    l2_half=10 << 10,
    # Dense products in bursts, before the power limit. int8 has the nominal rate of float8 and was not measured.
    flops={
        "bfloat16": 800e12 / 132,
        "float16": 800e12 / 132,
        "float8_e4m3fn": 1500e12 / 132,
        "int8": 1500e12 / 132,
    },
    smem=228 << 10,
    block_smem=227 << 10,
    threads=2048,
    blocks=32,
    registers=65536,
    overhead=0.64e-6,
    block_launch=(9.2e-6 - 0.64e-6) / 14336,  # an empty kernel of 14,336 blocks of 128 threads takes 9.2 µs
    trip=0.34e-6,
)


class Estimate(NamedTuple):
    """What the model says of a config at a point.

    Attributes:
        bound: the largest part: memory, compute, L2, launch or latency; ``does not fit`` where a block exceeds an SM.
        waves: rounds of blocks, the last one counted whole; of a persistent kernel the tiles that an SM walks at most.
        occupancy: blocks that an SM holds at a time.
    """

    seconds: float
    bound: str
    waves: int
    occupancy: int


def occupancy(work: Work, machine: Machine) -> int:
    """Blocks that an SM holds at a time; 0 if not even one. Each also takes 1 KiB of shared memory for the system."""
    if work.smem > machine.block_smem:
        return 0
    warps = -(-work.threads // 32)
    registers = -(-work.registers // 8) * 8 * 32 * warps  # given to a warp in units of 256
    most = min(
        machine.blocks,
        machine.threads // (32 * warps),
        machine.smem // (work.smem + 1024),
        machine.registers // registers,
    )
    return min(most, 1) if work.persistent else most


def estimate(contract: Operator, config: Config, dims: Dims, machine: Machine) -> Estimate:
    """The estimate of `config` at `dims`, by the formula above."""
    work = contract.work(config, dims)
    held = occupancy(work, machine)
    if held == 0:
        return Estimate(math.inf, "does not fit", 0, 0)
    rate = machine.flops[contract.math] if contract.math else math.inf
    moved = work.read + work.written
    flying = min(max(work.smem, 16 * work.threads), moved)

    def shared(count: int, times: int) -> tuple[float, float]:
        """Seconds through L2 and in the tensor cores of `times` rounds of `count` blocks that share an SM."""
        l2 = machine.l2_peak * count * flying / (count * flying + machine.l2_half)
        return times * count * moved / l2, times * count * work.flops / rate

    if work.persistent:
        waves = -(-work.blocks // machine.sm_count)
        trips, rounds = 1, [shared(1, waves)]
    else:
        full, rest = divmod(work.blocks, machine.sm_count * held)
        waves = trips = full + (rest > 0)
        rounds = [shared(held, full), shared(-(-rest // machine.sm_count), 1)] if rest else [shared(held, full)]
    parts = {
        "memory": contract.traffic(dims).total / machine.memory,
        "compute": sum(compute for _, compute in rounds),
        "L2": sum(l2 for l2, _ in rounds),
        "launch": work.blocks * machine.block_launch,
        "latency": machine.overhead + trips * machine.trip,
    }
    blocks = trips * machine.trip + sum(map(max, rounds))
    seconds = machine.overhead + max(parts["memory"], parts["launch"], blocks)
    return Estimate(seconds, max(parts, key=parts.__getitem__), waves, held)


def rank(
    contract: Operator, dims: Dims, machine: Machine, candidates: Iterable[Candidate]
) -> list[tuple[Config, Estimate]]:
    """The configs whose guards are true at `dims`, fastest first; of equals the first given comes first."""
    symbols = {**contract.full_dims(dims), "sm_count": machine.sm_count}
    right = [config for guard, config in candidates if evaluate(guard, symbols)]
    ranked = [(config, estimate(contract, config, dims, machine)) for config in right]
    return sorted(ranked, key=lambda item: item[1].seconds)


def points(contract: Operator) -> list[dict[str, int]]:
    """The workloads, and every range dim's ends and the powers of four between them; from little to much traffic."""
    ranges = {dim: ends for dim, ends in contract.dims.items() if ends[0] != ends[1]}
    ladders = [
        sorted({least, most, *(size for p in range(31) if least < (size := LADDER**p) < most)})
        for least, most in ranges.values()
    ]
    found = [dict(dims) for dims in contract.workloads.values()]
    found += [dict(zip(ranges, sizes, strict=True)) for sizes in itertools.product(*ladders)]
    return sorted(
        (dims for i, dims in enumerate(found) if dims not in found[:i]), key=lambda dims: contract.traffic(dims).total
    )


def middle(contract: Operator) -> dict[str, int]:
    """The workload in the middle, by traffic; without workloads the middle one of `points`."""
    sizes = [dims for dims in points(contract) if dims in contract.workloads.values()] or points(contract)
    return sizes[len(sizes) // 2]


def prune(contract: Operator, machine: Machine, keep: int = 24) -> list[Candidate]:
    """The candidates worth building, in the model's order at the operator's middle workload.

    Those within `NEAR` of the best at one of `points`; where they are more than `keep`, those with the best place at
    some point. The configs of the untuned dispatch are always among them.
    """
    candidates = contract.candidates()
    configs = [config for _, config in candidates]
    places = {configs.index(config): -1 for _, config in contract.dispatch()}
    keep = max(keep, len(places))
    for dims in points(contract):
        ranked = rank(contract, dims, machine, candidates)
        for place, (config, found) in enumerate(ranked):
            if found.seconds <= NEAR * ranked[0][1].seconds:
                index = configs.index(config)
                places[index] = min(place, places.get(index, place))
    kept = [candidates[index] for index in sorted(sorted(sorted(places), key=places.__getitem__)[:keep])]
    order = [config for config, _ in rank(contract, middle(contract), machine, kept)]
    return sorted(kept, key=lambda item: order.index(item[1]) if item[1] in order else len(order))
