"""``kgen verify`` on the fake driver: device memory is host memory, kernels are Python functions on numpy arrays."""

from __future__ import annotations

import ctypes
import json
import re
import shlex
from itertools import count
from typing import Any

import numpy as np
import products
import pytest
from click.testing import CliRunner

from kgen.build import compare
from kgen.build.cli import main
from kgen.build.records import Records
from kgen.build.verify import Point, verify_point
from kgen.compiler.ops.gemm import Gemm
from kgen.compiler.ops.quantize import Q, Quantize, X
from kgen.runtime import Bundle
from kgen.runtime.format import manifest as m

N, K = products.N, products.K
TURN = count()


def memory(address: int, *shape: int) -> np.ndarray:
    """Device memory as float16, writable."""
    nbytes = 2 * int(np.prod(shape))
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), np.float16).reshape(shape)


def product(a, b):
    return (a.astype(np.float32) @ b.astype(np.float32).T).astype(np.float16)


def right(a, b, out):
    out[...] = product(a, b)


def off_by_one_row(a, b, out):
    out[...] = np.roll(product(a, b), 1, axis=0)


def wrong_scale(a, b, out):
    out[...] = product(a, b) * np.float16(1.03)


def unwritten_tail(a, b, out):
    whole = len(a) // 16 * 16
    out[:whole] = product(a, b)[:whole]


def race(a, b, out):
    right(a, b, out)
    toward = np.float16(100 if next(TURN) % 2 else -100)
    out[-1, 5] = np.nextafter(out[-1, 5], toward)  # each as right as rounding may be, but never the same twice


def out_of_bounds(a, b, out):
    right(a, b, out)
    memory(out.ctypes.data + out.nbytes, 8)[:] = 0


def changes_input(a, b, out):
    right(a, b, out)
    a[0, 2] = 7


STAND_INS = {
    kernel.__name__: kernel
    for kernel in (right, off_by_one_row, wrong_scale, unwritten_tail, race, out_of_bounds, changes_input)
}


@pytest.fixture
def device(fake):
    """Runs a launch as the stand-in of its entry's name. Tests may change the stand-ins."""
    stand_ins = dict(STAND_INS)

    def launch(call: dict[str, Any]) -> None:
        a, b, out, rows = (int.from_bytes(param, "little") for param in call["params"])
        stand_ins[call["entry"]](memory(a, rows, K), memory(b, N, K), memory(out, rows, N))

    for name in stand_ins:
        fake.register(name, [8, 8, 8, 4])
    fake.on_launch(launch)
    return stand_ins


@pytest.fixture
def bundle(tmp_path):
    """A bundle with an operator for each stand-in."""
    return products.write(tmp_path / "made by hand.kgen", map(products.contract, STAND_INS))


def verify(*args: Any):
    return CliRunner().invoke(main, ["verify", *map(str, args)])


def failed(*args: Any) -> str:
    """What a failing run prints on stdout."""
    result = verify(*args)
    assert (result.exit_code, type(result.exception)) == (1, SystemExit), (result.output, result.exception)
    return result.stdout


def ran(*args: Any) -> list[tuple[str, dict[str, int], str]]:
    """(operator, dims, kind) of each case that such a run has, whatever comes of it."""
    cases = json.loads(verify(*args, "--json").stdout)["cases"]
    return [(case["operator"], case["dims"], case["kind"]) for case in cases]


@pytest.mark.parametrize("name", ["ctypes", "cuda-python"])
def test_a_right_kernel_passes(bundle, device, name):
    result = verify(bundle, "--op", "right", "--driver", name, "--seed", 3)
    assert result.exit_code == 0, result.output
    assert [re.split(r"  \[", line)[0] for line in result.stdout.splitlines()] == [
        "[1/8] ok      right m=17 (decode) normal",
        "[2/8] ok      right m=33 (prefill) normal",
        "[3/8] ok      right m=1 normal",
        "[4/8] ok      right m=63 normal",
        "[5/8] ok      right m=64 normal",
        "[6/8] ok      right m=65 normal",
        "[7/8] ok      right m=70 normal",
        "[8/8] ok      right m=63 integers",
    ]
    assert result.stderr == "8 of 8 cases passed, seed 3\n"


CHECK, STEADY, WRITTEN = "exceeds", "differ from run to run", "never written"
WHAT_IS_SAID = {
    "off_by_one_row": (r"out: half ulps of the row's magnitude \S+ exceeds 4, worst at \[\d+, \d+\]: got \S+, expect",),
    "wrong_scale": (r"out: relative Frobenius error of sampled rows 0\.0[23]\d* exceeds 0\.002",),
    "unwritten_tail": (r"row's magnitude nan exceeds 4, worst at \[16, 0\]: got nan, expected -?\d",
                       r"out: 64 of 1088 elements are never written, the first at \[16, 0\]"),
    "race": (r"out: 1 of 1088 elements differ from run to run, the first at \[16, 5\]: (\S+), then (?!\1)\S+: a race",),
    "out_of_bounds": (r"out: 16 bytes after it were overwritten, the first at byte 2176 of 2176",),
    "changes_input": (r"a: 1 of 1088 elements of this input were changed, the first at \[0, 2\]: \S+ became 7.0",),
}  # fmt: skip
NOT_SAID = {
    "off_by_one_row": (STEADY, WRITTEN),
    "wrong_scale": (STEADY, WRITTEN),
    "unwritten_tail": (STEADY,),
    "race": (CHECK, WRITTEN),
    "out_of_bounds": (CHECK, STEADY, WRITTEN),
    "changes_input": (CHECK, STEADY, WRITTEN),
}


@pytest.mark.parametrize("name", WHAT_IS_SAID)
def test_a_wrong_kernel_is_caught(bundle, device, name):
    text = failed(bundle, "--op", name, "--workload", "decode", "--kind", "normal", "--seed", 1)
    assert text.startswith(f"[1/1] failed  {name} m=17 (decode) normal")
    for pattern in WHAT_IS_SAID[name]:
        assert re.search(pattern, text), text
    for words in NOT_SAID[name]:
        assert words not in text
    assert "    variant 0 ran: form=rows threads=128\n" in text
    again = f"kgen verify '{bundle}' --op {name} --dims m=17 --kind normal --seed 1"
    assert text.endswith(f"    reproduce: {again}\n")
    repeated = failed(*shlex.split(again)[2:])
    said = [line for line in text.splitlines()[1:] if "run to run" not in line]
    assert said == [line for line in repeated.splitlines()[1:] if "run to run" not in line]


def test_the_second_run_replays_a_graph_on_another_stream(bundle, device, fake):
    assert verify(bundle, "--op", "right", "--workload", "decode", "--kind", "normal").exit_code == 0
    first, second = fake.launches()
    assert (first["captured"], second["captured"]) == (False, True) and first["stream"] != second["stream"]
    (replay,) = fake.calls("cuGraphLaunch")
    assert replay["stream"] == second["stream"]


def test_every_failing_case_is_told(bundle, device):
    result = verify(bundle, "--op", "unwritten_tail", "--op", "right", "--seed", 5)
    failing = [line.split("  ")[1].split(" ")[1] for line in result.stdout.splitlines() if "failed" in line]
    assert failing == ["m=17", "m=33", "m=1", "m=63", "m=65", "m=70", "m=63"]
    assert result.exit_code == 1 and result.stderr == "9 of 16 cases passed, 7 failed, seed 5\n"


@pytest.fixture
def kernels(bundle, device, driver):
    with Bundle.open(bundle).load(0, driver=driver) as loaded:
        yield loaded


class Unsteady(Gemm):
    deterministic = False


def test_without_determinism_the_contract_checks_the_second_run_too(kernels, device):
    contract = Unsteady(**vars(products.contract("race")))
    assert verify_point(kernels, Point(contract, None, {"m": 17}, "normal"), 1).failures == ()
    turn = count()
    device["race"] = lambda *tensors: (wrong_scale if next(turn) % 2 else right)(*tensors)
    case = verify_point(kernels, Point(contract, None, {"m": 17}, "normal"), 1)
    assert case.failures and all("exceeds" in failure for failure in case.failures)
    assert [check.ok for check in case.checks[:3]] == [True] * 3
    device["race"] = unwritten_tail
    assert any(WRITTEN in f for f in verify_point(kernels, Point(contract, None, {"m": 17}, "normal"), 1).failures)


class Accumulate(Gemm):
    """``out += a · b``."""

    def tensors(self):
        a, b, out = super().tensors()
        return a, b, out._replace(role="inout")

    def inputs(self, dims, rng, kind):
        shape = (dims["m"], N)
        return super().inputs(dims, rng, kind) | {"out": rng.standard_normal(shape).astype(np.float16)}

    def check(self, dims, inputs, outputs, rng):
        added = outputs["out"].astype(np.float32) - inputs["out"].astype(np.float32)
        return super().check(dims, inputs, {"out": added}, rng)[:1]


class Transposed(Gemm):
    """Columns of the output are contiguous and start at multiples of 16 bytes."""

    def tensors(self):
        a, b, out = super().tensors()
        return a, b, out._replace(strides=(1, ["align", "m", 8]))


def of_one(tmp_path, driver, contract):
    """A loaded bundle with the operator ``right`` alone, of that contract."""
    return Bundle.open(products.write(tmp_path / "one.kgen", [contract])).load(0, driver=driver)


def test_tensors_that_are_read_and_written_start_alike(tmp_path, device, driver):
    contract = Accumulate(**vars(products.contract("right")))
    with of_one(tmp_path, driver, contract) as kernels:
        point = Point(contract, None, {"m": 17}, "normal")
        assert verify_point(kernels, point, 1).failures, "out = a · b is not what the contract says"

        def accumulate(a, b, out):
            out += product(a, b)

        device["right"] = accumulate
        assert verify_point(kernels, point, 1).failures == ()


def test_strided_outputs(tmp_path, device, driver):
    contract = Transposed(**vars(products.contract("right")))
    point = Point(contract, None, {"m": 17}, "normal")
    with of_one(tmp_path, driver, contract) as kernels:

        def columns(a, b, out, height=17):
            """Writes `height` of the 24 rows that there is room for."""
            memory(out.ctypes.data, N, 24).T[:height] = np.pad(product(a, b), ((0, 7), (0, 0)))[:height]

        device["right"] = columns
        assert verify_point(kernels, point, 1).failures == ()
        device["right"] = lambda *tensors: columns(*tensors, height=18)
        after, inside = verify_point(kernels, point, 1).failures
        assert inside == "out: 126 bytes between its elements were overwritten, the first at byte 34 of 3058"
        assert after == "out: 2 bytes after it were overwritten, the first at byte 3058 of 3058"
        device["right"] = right
        assert any("exceeds" in failure for failure in verify_point(kernels, point, 1).failures)


def test_scratch_memory_is_poisoned_before_each_run(tmp_path, fake, driver):
    """The kernel copies what it finds in scratch memory to its output."""
    contract = products.contract("copies")
    path = products.write(tmp_path / "one.kgen", [contract])
    built = Bundle.open(path).manifest
    (variant,) = built.operators["copies"].variants
    scratch = m.Workspace("scratch", "scratch", 256, ["*", "m", 2 * N])
    (launch,) = variant.program.steps
    args = (m.Arg(pointer="a"), m.Arg(pointer="scratch"), m.Arg(pointer="out"), m.Arg(value="m"))
    program = m.Program((launch._replace(args=args),), (scratch,), ["+", 256, scratch.bytes])
    changed = products.operator(contract, program, {})
    path = products.write(tmp_path / "two.kgen", [contract], copies=changed)

    def copy(call):
        _, source, out, rows = (int.from_bytes(param, "little") for param in call["params"])
        memory(out, rows, N)[...] = memory(source, rows, N)

    fake.register("copies", [8, 8, 8, 4])
    fake.on_launch(copy)
    with Bundle.open(path).load(0, driver=driver) as kernels:
        case = verify_point(kernels, Point(contract, None, {"m": 17}, "normal"), 1)
    assert any("got nan" in failure for failure in case.failures)


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
    assert any(WRITTEN in failure for failure in case["failures"])


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


def test_bits_tell_what_values_do_not():
    nan, zero = np.array([np.nan, 0.0], np.float32), np.array([np.nan, -0.0], np.float32)
    assert list(compare.changed("x", nan, nan)) == []
    assert list(compare.changed("x", nan, zero)) == [
        "x: 1 of 2 elements of this input were changed, the first at [1]: 0.0 became -0.0"
    ]
