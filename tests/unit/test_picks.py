"""Tuning records become the guards of a build."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kgen.build import picks
from kgen.build.coverage import check_coverage
from kgen.build.records import Records
from kgen.compiler.ops import gemm, quantize
from kgen.runtime.format import manifest
from kgen.runtime.format.expr import evaluate

ROWS = quantize.Quantize(
    name="rows",
    dims={"m": (1, 1000), "k": (4096, 4096)},
    workloads={},
    x=quantize.X(dtype="bfloat16"),
    q=quantize.Q(dtype="int8", scale="channel"),
)
PRODUCT = gemm.Gemm(
    name="product",
    dims={"m": (1, 8192), "n": (4096, 4096), "k": (128, 128)},
    workloads={},
    a=gemm.A(dtype="float16"),
    b=gemm.B(dtype="float16"),
    out=gemm.Out(dtype="float16"),
)
UNTUNED = PRODUCT.dispatch()[0][1]


def threads(count):
    return {"form": "row", "threads": count}


def entry(m, config, until=None, contract=ROWS, sm_count=132, kernels=("k",)):
    return {
        "kind": "tune",
        "operator": "whatever",
        "contract": contract.digest(),
        "dims": {} if m is None else {"m": m},
        "config": config,
        "kernels": list(kernels),
        "until": {} if until is None else {"m": until},
        "sm_count": sm_count,
    }


def frozen(*entries, contract=ROWS, **others):
    return picks.dispatch(contract, Records({"NVIDIA H200": list(entries), **others}))


def test_without_records_the_contract_chooses():
    others = [entry(5, threads(64)) | {"contract": "0" * 16}, {"kind": "bench", "operator": "rows", "dims": {"m": 1}}]
    assert frozen() == frozen(*others) == ROWS.dispatch()


def test_picks_become_guards():
    """By size, not in the record's order; neighbours that agree are one variant; the last has no bound."""
    assert frozen(
        entry(256, threads(128), 700),
        entry(1, threads(512), 3),
        entry(4, threads(512), 33),
        entry(1000, threads(64)),
        entry(64, threads(256), 255),
        entry(777, threads(128), 999),
    ) == [
        (["<=", "m", 33], threads(512)),
        (["<=", "m", 255], threads(256)),
        (["<=", "m", 999], threads(128)),
        (1, threads(64)),
    ]
    assert frozen(entry(4, threads(512), 9), entry(10, threads(512))) == [(1, threads(512))]


def test_no_range_dim():
    contract = quantize.Quantize(name="fixed", dims={"m": (7, 7), "k": (4096, 4096)}, workloads={}, x=ROWS.x, q=ROWS.q)
    assert frozen(entry(None, threads(256), contract=contract), contract=contract) == [(1, threads(256))]


def test_a_point_tuned_later_bounds_the_one_before():
    """Its neighbour's crossover was measured before the point was there."""
    entries = [entry(4, threads(512), 500), entry(64, threads(256), 100), entry(1000, threads(64))]
    assert [guard for guard, _ in frozen(*entries)] == [["<=", "m", 63], ["<=", "m", 100], 1]
    ended = [entry(4, threads(512)), entry(64, threads(256))]  # 4 was the last point once
    assert [guard for guard, _ in frozen(*ended)] == [["<=", "m", 63], 1]


def test_a_configs_own_guard_stays_in_force():
    wide = UNTUNED | {"raster": 16}  # offered where m > 1024
    assert frozen(entry(4096, wide, contract=PRODUCT), contract=PRODUCT) == [([">", "m", 1024], wide), (1, UNTUNED)]
    bounded = frozen(entry(2048, wide, 3000, PRODUCT), entry(4096, UNTUNED, contract=PRODUCT), contract=PRODUCT)
    assert bounded == [(["and", [">", "m", 1024], ["<=", "m", 3000]], wide), (1, UNTUNED)]


def test_devices_are_told_apart():
    """The device with the most entries is the rule, the others exceptions; two with as many SMs cannot both be."""
    small = [entry(1, threads(64), sm_count=78)]
    large = [entry(1, threads(512), 9), entry(64, threads(256))]
    expected = [
        (["==", "sm_count", 78], threads(64)),
        (["<=", "m", 9], threads(512)),
        (1, threads(256)),
    ]
    assert frozen(*large, A100=small) == frozen(*large, Z100=small) == expected
    assert frozen(*large, A100=small, H100=[entry(1, threads(1024))]) == expected
    two = [entry(1, threads(64), 9, sm_count=78), entry(10, threads(128), sm_count=78)]
    assert frozen(*large, A100=two) == [
        (["and", ["==", "sm_count", 132], ["<=", "m", 9]], threads(512)),
        (["==", "sm_count", 132], threads(256)),
        (["<=", "m", 9], threads(64)),
        (1, threads(128)),
    ], "as many entries: the first by name is the rule"


@given(
    st.dictionaries(st.integers(1, 1000), st.tuples(st.sampled_from([64, 128, 256]), st.integers(0, 1000)), min_size=1),
    st.dictionaries(st.integers(1, 1000), st.sampled_from([64, 128, 256])),
)
def test_each_tuned_point_runs_its_pick(tuned, elsewhere):
    entries = [entry(m, threads(count), max(m, until)) for m, (count, until) in tuned.items()]
    others = [entry(m, threads(count), sm_count=78) for m, count in elsewhere.items()]
    rules = frozen(*entries, other=others)
    check_coverage("rows", ROWS.dims, [guard for guard, _ in rules])
    for sm_count, points in ((132, {m: count for m, (count, _) in tuned.items()}), (78, elsewhere)):
        for m, count in points.items():
            symbols = {"m": m, "k": 4096, "sm_count": sm_count}
            assert next(config for guard, config in rules if evaluate(guard, symbols)) == threads(count)


def built(*variants):
    programs = [
        manifest.Program(tuple(manifest.Launch(kernel, (1, 1, 1), ()) for kernel in kernels), (), 0)
        for _, kernels in variants
    ]
    made = [manifest.Variant("sm_90a", 1, c, program) for (c, _), program in zip(variants, programs, strict=True)]
    return manifest.Operator("rows", "quantize", 1, ROWS.dims, ROWS.attrs(), ROWS.tensors(), tuple(made), {})


def test_picks_of_other_code_are_told():
    records = Records({"NVIDIA H200": [entry(1, threads(64), 9, kernels=("a", "b")), entry(10, threads(128))]})
    assert list(picks.stale(ROWS, records, built((threads(64), "ab"), (threads(128), "k")))) == []
    told = list(picks.stale(ROWS, records, built((threads(64), "ba"), (threads(128), "k"))))
    assert told == ["rows m=1: tuned on other code; run kgen tune again"]
    assert len(list(picks.stale(ROWS, records, built((threads(64), "k"), (threads(128), "ab"))))) == 2
    assert list(picks.stale(PRODUCT, records, built())) == []
