"""The analytic model: bounds it must respect, effects it must show, and measured times it must be near to."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kgen.compiler.model import H200, NEAR, estimate, middle, occupancy, points, prune, rank
from kgen.compiler.ops import gemm, quantize
from kgen.compiler.ops.contract import Traffic, Work
from kgen.runtime.format.expr import evaluate


def product(n=4096, k=7168, m=(1, 8192), dtype="bfloat16", workloads=None):
    return gemm.Gemm(
        name="g",
        dims={"m": m, "n": (n, n), "k": (k, k)},
        workloads=workloads or {},
        a=gemm.A(dtype=dtype),
        b=gemm.B(dtype=dtype),
        out=gemm.Out(dtype=dtype),
    )


def codes(k=4096, m=(1, 65536), dtype="bfloat16", workloads=None):
    return quantize.Quantize(
        name="q",
        dims={"m": m, "k": (k, k)},
        workloads=workloads or {},
        x=quantize.X(dtype=dtype),
        q=quantize.Q(dtype="int8", scale="channel"),
    )


def tile(tile_n, stages, raster=8):
    return {"form": "persistent", "tile_m": 128, "tile_n": tile_n, "tile_k": 64, "stages": stages, "raster": raster}


def made_of(**changes):
    """An estimate of the given work; nothing to do for the memory."""
    work = Work(**{"blocks": 1, "threads": 128, "smem": 0, "read": 1 << 14, "written": 0, "flops": 0} | changes)
    contract = SimpleNamespace(math="bfloat16", work=lambda config, dims: work, traffic=lambda dims: Traffic(0, 0))
    return estimate(contract, {}, {}, H200)


contracts = st.one_of(
    st.builds(product, st.sampled_from([64, 136, 1024, 4096]), st.sampled_from([64, 200, 2048, 7168])),
    st.builds(codes, st.sampled_from([5, 128, 4096, 4099, 8192])),
)
sizes = st.integers(1, 8192)


@given(contracts, sizes, st.sampled_from([1, 16, 78, 132, 160]))
def test_never_below_the_roofline(contract, m, sm_count):
    machine = H200._replace(sm_count=sm_count)
    seconds = contract.traffic({"m": m}).total / machine.memory
    if contract.math:
        seconds = max(seconds, contract.flops({"m": m}) / (machine.flops[contract.math] * sm_count))
    for _, config in contract.candidates():
        assert estimate(contract, config, {"m": m}, machine).seconds >= seconds + machine.overhead


@given(contracts, sizes, sizes)
def test_more_rows_never_take_less_time(contract, a, b):
    for _, config in contract.candidates():
        less, more = (estimate(contract, config, {"m": m}, H200) for m in sorted((a, b)))
        assert less.seconds <= more.seconds * (1 + 1e-12) and less.waves <= more.waves


@given(st.integers(8, 512), st.integers(8, 512), st.integers(1, 512), st.integers(0, 64), st.integers(0, 64))
def test_wider_products_never_take_less_time(n, k, m, more_n, more_k):
    small, large = product(8 * n, 8 * k), product(8 * (n + more_n), 8 * (k + more_k))
    for config in (tile(64, 8), tile(256, 4)):
        less, more = (estimate(contract, config, {"m": m}, H200).seconds for contract in (small, large))
        assert less <= more * (1 + 1e-12)


@given(
    st.integers(1, 100_000), st.integers(32, 1024), st.integers(0, 227 << 10), st.integers(16, 255), st.booleans(),
    st.integers(1, 4), st.integers(0, 1 << 20),
)  # fmt: skip
def test_more_work_never_takes_less_time(blocks, threads, smem, registers, persistent, times, flops):
    fixed = {"threads": threads, "smem": smem, "registers": registers, "persistent": persistent, "flops": flops}
    less, more = made_of(blocks=blocks, **fixed), made_of(blocks=blocks * times + 1, **fixed)
    assert less.seconds <= more.seconds * (1 + 1e-12)


def test_the_last_wave_counts_whole():
    contract, config = product(n=256), tile(256, 4)
    one, two, also = (estimate(contract, config, {"m": 128 * tiles}, H200) for tiles in (132, 133, 264))
    assert (one.waves, two.waves, also.waves) == (1, 2, 2)
    assert two.seconds / one.seconds > 1.9 and also.seconds == pytest.approx(two.seconds, rel=0.1)
    fixed = {"smem": 120 << 10, "registers": 32, "flops": 1 << 28}  # one block an SM
    plain = [made_of(blocks=blocks, **fixed) for blocks in (132, 133)]
    assert [item.waves for item in plain] == [1, 2] and plain[1].seconds > 1.9 * plain[0].seconds


def test_blocks_that_share_an_sm_share_its_rates():
    """Two waves of one block an SM, or one wave of two: the arithmetic is the same, a trip to memory less."""
    apart = made_of(blocks=264, smem=120 << 10, registers=32, flops=1 << 28)
    together = made_of(blocks=264, smem=100 << 10, registers=32, flops=1 << 28)
    assert (apart.occupancy, together.occupancy, apart.waves, together.waves) == (1, 2, 2, 1)
    assert apart.seconds - together.seconds == pytest.approx(H200.trip)
    half = made_of(blocks=132, smem=100 << 10, registers=32, flops=1 << 28)
    assert (half.occupancy, half.waves) == (2, 1) and half.seconds < 0.6 * together.seconds


def test_a_persistent_kernel_waits_for_memory_once():
    arithmetic = (1 << 28) / H200.flops["bfloat16"]
    plain, persistent = (
        [made_of(blocks=b, smem=120 << 10, flops=1 << 28, registers=32, persistent=p).seconds for b in (132, 264)]
        for p in (False, True)
    )
    assert persistent[1] - persistent[0] == pytest.approx(arithmetic)
    assert plain[1] - plain[0] == pytest.approx(arithmetic + H200.trip)


@given(st.integers(0, 300 << 10), st.integers(0, 300 << 10), st.integers(32, 1024), st.integers(16, 255))
def test_more_smem_means_fewer_blocks(a, b, threads, registers):
    few, many = (occupancy(Work(1, threads, smem, 0, 0, 0, registers), H200) for smem in sorted((a, b), reverse=True))
    assert few <= many <= 32


@pytest.mark.parametrize(
    ("threads", "smem", "registers", "expected"),
    [
        (32, 0, 16, 32),
        (128, 0, 32, 16),
        (128, 0, 40, 12),
        (128, 0, 33, 12),
        (1024, 0, 64, 1),
        (128, 75 << 10, 32, 3),
        (128, 76 << 10, 32, 2),
        (128, 227 << 9, 32, 1),
        (128, 226 << 9, 32, 2),
        (128, 227 << 10, 32, 1),
        (128, (227 << 10) + 1, 32, 0),
        (1024, 0, 72, 0),
    ],
)
def test_occupancy(threads, smem, registers, expected):
    work = Work(1, threads, smem, 0, 0, 0, registers)
    assert occupancy(work, H200) == expected
    assert occupancy(work._replace(persistent=True), H200) == min(expected, 1), "its grid is a block an SM"


def test_what_does_not_fit_comes_last():
    contract = product()
    assert estimate(contract, tile(256, 5), {"m": 1}, H200).bound == "does not fit"
    ranked = rank(contract, {"m": 1}, H200, [(1, tile(256, 5)), (1, tile(256, 4))])
    assert [config["stages"] for config, _ in ranked] == [4, 5]
    assert tile(256, 5) not in [config for _, config in prune(contract, H200)]


@pytest.mark.parametrize(
    ("contract", "config", "m", "bound"),
    [
        (product(), tile(256, 4), 4096, "compute"),
        (product(), tile(64, 8), 4096, "L2"),
        (codes(), {"form": "row", "threads": 128}, 14336, "memory"),
        (codes(k=16), {"form": "row", "threads": 64}, 60000, "launch"),
        (codes(k=16), {"form": "row", "threads": 64}, 1, "latency"),
    ],
)
def test_bounds(contract, config, m, bound):
    assert estimate(contract, config, {"m": m}, H200).bound == bound


@pytest.mark.parametrize(
    ("contract", "config", "m", "us"),
    [  # medians on an H200
        (product(), tile(256, 4), 4096, 292.1),
        (product(), tile(256, 4), 128, 68.4),
        (codes(), {"form": "row", "threads": 128}, 14336, 43.9),
        (codes(dtype="float32"), {"form": "row", "threads": 128}, 14336, 72.3),
    ],
)
def test_near_what_was_measured(contract, config, m, us):
    assert us / 2 < estimate(contract, config, {"m": m}, H200).seconds * 1e6 < us * 2


def test_few_rows_want_narrow_tiles():
    """Not before 16 row tiles does a tile of 256 columns leave no SM idle."""
    contract = product()
    best = {m: rank(contract, {"m": m}, H200, contract.candidates())[0][0]["tile_n"] for m in (1, 128, 512, 4096)}
    assert best[1] == best[128] == 64 and best[512] < best[4096] == 256
    narrow, wide = (estimate(contract, tile(*config), {"m": 4096}, H200).seconds for config in ((64, 8), (256, 4)))
    assert narrow > 1.5 * wide, "narrow tiles read the operands more often"


def test_ranking():
    contract = product()
    candidates = contract.candidates()
    ranked = rank(contract, {"m": 4096}, H200, candidates)
    assert ranked == rank(contract, {"m": 4096}, H200, iter(candidates)) and len(ranked) == len(candidates)
    seconds = [found.seconds for _, found in ranked]
    assert seconds == sorted(seconds)
    level = [config for config, found in ranked if found.seconds == seconds[0]]
    assert len(level) > 1 and level == [config for _, config in candidates if config in level], "equals stay in order"
    few = rank(contract, {"m": 100}, H200, candidates)
    assert few and all(config["raster"] == 8 for config, _ in few), "the others' guards are false"
    small = H200._replace(sm_count=78)
    assert len(rank(contract, {"m": 1}, small, [(["<", "sm_count", 100], tile(64, 8)), (0, tile(64, 7))])) == 1


def test_points():
    contract = product(m=(3, 1000), workloads={"a": {"m": 77}, "b": {"m": 900}, "c": {"m": 16}})
    assert [dims["m"] for dims in points(contract)] == [3, 4, 16, 64, 77, 256, 900, 1000]
    assert middle(contract) == {"m": 77}
    assert middle(product(m=(1, 64))) == {"m": 16} and points(product(m=(5, 5))) == [{}] == [middle(product(m=(5, 5)))]


@given(contracts, st.integers(1, 30), sizes)
def test_pruning(contract, keep, workload):
    contract = replace(contract, workloads={"w": {"m": workload}})
    candidates, untuned = contract.candidates(), [config for _, config in contract.dispatch()]
    kept = prune(contract, H200, keep)
    assert all(item in candidates for item in kept) and len(kept) <= max(keep, len(untuned))
    assert all(config in [config for _, config in kept] for config in untuned)
    assert kept == prune(contract, H200, keep)
    order = [config for config, _ in rank(contract, {"m": workload}, H200, kept)]
    assert [config for _, config in kept][: len(order)] == order


@given(contracts)
def test_every_point_keeps_its_best_and_loses_the_hopeless(contract):
    candidates, kept = contract.candidates(), [config for _, config in prune(contract, H200, 1000)]
    few = [config for _, config in prune(contract, H200, 12)]
    hopeful = [config for _, config in contract.dispatch()]
    for dims in points(contract):
        ranked = rank(contract, dims, H200, candidates)
        hopeful += [config for config, found in ranked if found.seconds <= NEAR * ranked[0][1].seconds]
        assert any(found.seconds == ranked[0][1].seconds for config, found in ranked if config in few)
    assert all((config in kept) == (config in hopeful) for _, config in candidates)


def test_what_is_far_from_the_best_is_not_built():
    """For one row tile, 64 columns take a quarter of the time of 256, half of 128, a third of 192."""
    kept = [config["tile_n"] for _, config in prune(product(m=(5, 5)), H200)]
    assert kept == [64, 64, 128, 128, 256], "256: the untuned choice"


def test_the_untuned_configs_are_kept_however_many():
    class Split(gemm.Gemm):
        def dispatch(self):
            return [(["<=", "m", 64], tile(64, 8)), (["<=", "m", 256], tile(128, 6)), (1, tile(256, 4))]

    contract = Split(**{field.name: getattr(product(), field.name) for field in fields(gemm.Gemm)})
    assert [config["tile_n"] for _, config in prune(contract, H200, 1)] == [64, 128, 256]


def test_a_guard_that_is_never_true_is_not_built():
    contract = product(m=(1, 512))
    assert any(config["raster"] != 8 for _, config in contract.candidates())
    assert all(evaluate(guard, {"m": 512}) for guard, _ in prune(contract, H200))
