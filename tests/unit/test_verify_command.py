"""``kgen verify``: what its options leave to run, faults, JSON and records, on the fake driver."""

from __future__ import annotations

import json
import re
from itertools import count
from typing import Any

import products
import pytest
from stand_ins import right, verify

from kgen.build.records import Records
from kgen.compiler.ops.gemm import Gemm
from kgen.compiler.ops.quantize import Q, Quantize, X
from kgen.runtime import Bundle
from kgen.runtime.format import manifest as m


def ran(*args: Any) -> list[tuple[str, dict[str, int], str]]:
    """(operator, dims, kind) of each case that such a run has, whatever comes of it."""
    cases = json.loads(verify(*args, "--json").stdout)["cases"]
    return [(case["operator"], case["dims"], case["kind"]) for case in cases]


def quantizer() -> m.Operator:
    """An operator of another family, of one size, that does nothing."""
    contract = Quantize(
        name="quantizer", dims={"m": (9, 9), "k": (32, 32)}, workloads={"fixed": {}},
        x=X(dtype="float32"), q=Q(dtype="int8", scale="channel"),
    )  # fmt: skip
    return products.operator(contract, m.Program((), (), 0), {})


@pytest.fixture
def two_families(tmp_path):
    gemms = map(products.contract, ("right", "race"))
    return products.write(tmp_path / "two.kgen", gemms, quantizer=quantizer())


def test_filters(two_families, device):
    path = two_families
    of = {name: [case for case in ran(path) if case[0] == name] for name in ("quantizer", "race", "right")}
    assert [len(cases) for cases in of.values()] == [7, 8, 8] and ran(path) == [
        *of["quantizer"],
        *of["race"],
        *of["right"],
    ]
    assert ran(path, "--op", "right", "--op", "race") == of["right"] + of["race"]
    assert ran(path, "--op", "race", "--workload", "prefill", "--kind", "normal") == [("race", {"m": 33}, "normal")]
    assert ran(path, "--workload", "decode", "--workload", "fixed", "--kind", "normal") == [
        ("quantizer", {}, "normal"),
        ("race", {"m": 17}, "normal"),
        ("right", {"m": 17}, "normal"),
    ]
    assert ran(path, "--op", "right", "--dims", "m=5") == [("right", {"m": 5}, kind) for kind in Gemm.input_kinds]
    assert ran(path, "--dims", "m=9", "--dims", "m=70", "--kind", "normal") == [
        ("quantizer", {}, "normal"),  # its m is always 9
        *((name, {"m": rows}, "normal") for name in ("race", "right") for rows in (9, 70)),
    ]
    sizes = [dims for _, dims, kind in of["right"] if kind == "normal"]
    assert ran(path, "--op", "right", "--kind", "integers") == [("right", dims, "integers") for dims in sizes]
    assert ran(path, "--kind", "ties", "--kind", "zeros") == [("quantizer", {}, kind) for kind in ("ties", "zeros")]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("--op wrong", "no operator 'wrong'; the bundle has quantizer, race, right"),
        ("--workload slow", "no workload 'slow'; the operators have fixed, decode, prefill"),
        ("--workload decode --op quantizer", "no workload 'decode'; the operators have fixed"),
        ("--kind odd --op right", "no kind of input 'odd'; the operators have normal, integers"),
        ("--dims m=71 --op right", "right: m=71 is outside the declared 1..70"),
        ("--dims m=17 --dims m=71 --op right", "right: m=71 is outside the declared 1..70"),
        ("--dims m=71", "quantizer: m=71 is outside the declared 9.*race: m=71 is outside the declared 1..70"),
        ("--dims q=1 --op right", "right has no dim 'q'; its dims: k, m, n"),
        ("--dims n=64 --op right", "right: dim m is missing; it may be 1..70"),
        ("--dims 17", "'17' is not of the form DIM=INTEGER"),
        ("--dims m=17 --workload decode", "'m=17' .* 'decode'"),
        ("--seed -1", "-1 is not in the range x>=0"),
    ],
)
def test_what_an_option_names_must_be_there(two_families, args, words):
    result = verify(two_families, *args.split())
    assert result.exit_code == 2 and result.stdout == ""
    said = re.sub(r"[│\s]+", " ", result.stderr)
    assert re.search(f"Invalid value.*{words}", said), said


def test_nothing_to_verify(two_families):
    result = verify(two_families, "--workload", "decode", "--kind", "ties")
    assert result.exit_code == 1 and result.stdout == ""
    assert "nothing to verify: no operator of" in result.stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"op": "moe"}, "right: this kgen has no operator family 'moe'; it has dequantize, gemm, "),
        ({"abi": 9}, "right is of gemm@9; this kgen has gemm@1"),
        ({"attrs": {"a": {"dtype": "float16"}, "bias": {}}}, r"gemm \(a, b, out\) has other fields .* \(a, bias\)"),
        ({"attrs": {}}, r"other fields than the bundle's \(\)"),
        ({"attrs": {"a": {"kind": 1}}}, r"other fields than the bundle's \(a\)"),
    ],
)
def test_an_operator_that_this_kgen_does_not_know(tmp_path, device, change, words):
    contracts = [products.contract(name) for name in ("right", "race")]
    known = products.operator(contracts[0], m.Program((), (), 0), {})
    path = products.write(tmp_path / "other.kgen", contracts, right=known._replace(**change))
    result = verify(path)
    assert result.exit_code == 2 and re.search(f"^UnknownOperator: .*{words}", result.stderr), result.stderr
    assert verify(path, "--op", "race").exit_code == 1, "the other operator is verified, and fails"


def faulty(fake, rows: int):
    """A kernel that reads where it must not, at that many rows."""

    def kernel(a, b, out):
        right(a, b, out)
        if len(a) == rows:
            fake.fault(700)

    return kernel


def test_a_fault_ends_the_run(bundle, device, fake, tmp_path):
    device["right"] = faulty(fake, 33)
    records = tmp_path / "records"
    result = verify(bundle, "--op", "right", "--op", "race", "--seed", 4, "--record", records)
    assert (result.exit_code, type(result.exception)) == (1, SystemExit), result.output
    first, second, *rest = result.stdout.splitlines()
    assert first.startswith("[1/16] ok      right m=17 (decode) normal")
    assert second == "[2/16] failed  right m=33 (prefill) normal"
    assert rest[0].strip().startswith("DriverError: cuStreamSynchronize failed with CUDA_ERROR_ILLEGAL_ADDRESS (700)")
    assert "context is lost" in rest[1] and "variant 0 ran: form=rows" in rest[2]
    assert rest[3].endswith("--op right --dims m=33 --kind normal --seed 4")
    assert rest[4] == "[3/16] not run right m=1 normal" and rest[-1] == "[16/16] not run race m=63 integers"
    assert len(rest[4:]) == 14 and all("] not run r" in line for line in rest[4:])
    assert result.stderr == "1 of 16 cases passed, 1 failed, 14 not run, seed 4\n"
    (entries,) = Records.load(records).devices.values()
    assert [(entry["dims"], entry["ok"]) for entry in entries] == [({"m": 17}, True), ({"m": 33}, False)]


def test_a_fault_as_json(bundle, device, fake):
    device["right"] = faulty(fake, 17)
    cases = json.loads(verify(bundle, "--op", "right", "--json").stdout)["cases"]
    assert [case["status"] for case in cases] == ["failed", *["not run"] * 7]


def test_a_launch_that_is_refused_ends_the_case_alone(bundle, device, fake):
    fake.fail("cuLaunchKernelEx", 1)
    result = verify(bundle, "--op", "right", "--workload", "decode", "--workload", "prefill", "--kind", "normal")
    lines = result.stdout.splitlines()
    assert "DriverError: cuLaunchKernelEx failed with CUDA_ERROR_INVALID_VALUE (1)" in lines[1] and "ok" in lines[-1]
    assert result.stderr.startswith("1 of 2 cases passed, 1 failed")


def test_a_launch_that_is_refused_in_the_capture_ends_it(bundle, device, fake):
    turn = count()

    def kernel(a, b, out):
        right(a, b, out)
        if next(turn) == 0:
            fake.fail("cuLaunchKernelEx", 900)

    device["right"] = kernel
    result = verify(bundle, "--op", "right", "--workload", "decode", "--workload", "prefill", "--kind", "normal")
    lines = result.stdout.splitlines()
    assert "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" in lines[1] and lines[-1].startswith("[2/2] ok")


def strict(text: str) -> Any:
    """JSON without NaN and infinities."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_json(bundle, device):
    result = verify(bundle, "--op", "unwritten_tail", "--workload", "decode", "--seed", 1, "--json")
    value = strict(result.stdout)
    assert (value["device"], value["seed"], result.exit_code) == ("Fake H200", 1, 1)
    assert "[1/2] failed  unwritten_tail" in result.stderr and "0 of 2 cases passed" in result.stderr
    case = value["cases"][0]
    assert (case["operator"], case["workload"], case["dims"]) == ("unwritten_tail", "decode", {"m": 17})
    assert (case["status"], case["kind"], case["config"]["form"]) == ("failed", "normal", "rows")
    worst = case["checks"][1]
    assert (worst["ok"], worst["got"], worst["error"], worst["worst"]) == (False, None, None, [16, 0])
    assert any("never written" in failure for failure in case["failures"])


def test_records(bundle, device, fake, tmp_path):
    fake.device(0, sm_count=78)
    records = tmp_path / "records"
    assert verify(bundle, "--op", "right", "--op", "unwritten_tail", "--seed", 9, "--record", records).exit_code == 1
    strict((records / "fake_h200.json").read_text())
    entries = {(e["operator"], e["dims"]["m"]): e for e in Records.load(records).devices["Fake H200"]}
    # Equal contracts are one, whatever their names: the later operator's entries stay.
    assert set(entries) == {("unwritten_tail", rows) for rows in (1, 17, 33, 63, 64, 65, 70)}
    entry = entries["unwritten_tail", 63]
    contract = products.contract("unwritten_tail")
    assert entry["contract"] == contract.digest() == products.contract("right").digest()
    assert (entry["sm_count"], entry["driver"], entry["seed"]) == (78, 13000, 9)
    assert (entry["kind"], entry["inputs"], entry["ok"]) == ("verify", ["integers", "normal"], False)
    assert entry["errors"]["out: half ulps of the row's magnitude"] is None, "NaN is not lost"
    assert entries["unwritten_tail", 64]["ok"] and 0 < entries["unwritten_tail", 64]["errors"][
        "out: relative Frobenius error of sampled rows"] < 2e-3  # fmt: skip
    assert entry["kernels"] == [launch.kernel for launch in Bundle.open(bundle).manifest.operators[
        "unwritten_tail"].variants[0].program.launches]  # fmt: skip
