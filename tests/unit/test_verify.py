"""What `verify` finds in kernels, on the fake driver: device memory is host memory, kernels are Python functions."""

from __future__ import annotations

import re
import shlex
from itertools import count
from typing import Any

import numpy as np
import products
import pytest
from products import N
from stand_ins import memory, product, right, unwritten_tail, verify, wrong_scale

from kgen.build import compare
from kgen.build.verify import Point, verify_point
from kgen.compiler.ops.gemm import Gemm
from kgen.runtime import Bundle
from kgen.runtime.format import manifest as m


def failed(*args: Any) -> str:
    """What a failing run prints on stdout."""
    result = verify(*args)
    assert (result.exit_code, type(result.exception)) == (1, SystemExit), (result.output, result.exception)
    return result.stdout


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


def with_workspace(path, name, part, writes):
    """A bundle with the product `name` and a part of a workspace, which its kernel gets where `writes` was."""
    contract = products.contract(name)
    (variant,) = Bundle.open(products.write(path / "plain.kgen", [contract])).manifest.operators[name].variants
    (launch,) = variant.program.steps
    args = tuple(m.Arg(pointer=part.name) if arg.pointer == writes else arg for arg in launch.args)
    program = m.Program((launch._replace(args=args),), (part,), ["+", part.offset, part.bytes])
    changed = products.operator(contract, program, {})
    return products.write(path / "changed.kgen", [contract], **{name: changed})


def test_scratch_memory_is_poisoned_before_each_run(tmp_path, fake, driver):
    """The kernel copies what it finds in scratch memory to its output."""
    path = with_workspace(tmp_path, "copies", m.Workspace("scratch", "scratch", 256, ["*", "m", 2 * N]), "b")

    def copy(call):
        _, source, out, rows = (int.from_bytes(param, "little") for param in call["params"])
        memory(out, rows, N)[...] = memory(source, rows, N)

    fake.register("copies", [8, 8, 8, 4])
    fake.on_launch(copy)
    with Bundle.open(path).load(0, driver=driver) as kernels:
        case = verify_point(kernels, Point(products.contract("copies"), None, {"m": 17}, "normal"), 1)
    assert any("got nan" in failure for failure in case.failures)


@pytest.mark.parametrize("left", [0, 3])
def test_locks_are_zero_again_after_a_run(tmp_path, fake, driver, left):
    """The kernel gets locks in b's place, and must find and leave them zero."""
    path = with_workspace(tmp_path, "meets", m.Workspace("locks", "locks", 0, 256), "b")
    found = []

    def meet(call):
        locks = memory(int.from_bytes(call["params"][1], "little"), 128)
        found.append(locks.copy())
        locks[5] = left

    fake.register("meets", [8, 8, 8, 4])
    fake.on_launch(meet)
    with Bundle.open(path).load(0, driver=driver) as kernels:
        case = verify_point(kernels, Point(products.contract("meets"), None, {"m": 17}, "normal"), 1)
    told = [failure for failure in case.failures if "locks" in failure]
    assert not found[0].any() and told == (["locks: not zero after a run, the first at byte 11 of 256"] if left else [])


def test_bits_tell_what_values_do_not():
    nan, zero = np.array([np.nan, 0.0], np.float32), np.array([np.nan, -0.0], np.float32)
    assert list(compare.changed("x", nan, nan)) == []
    assert list(compare.changed("x", nan, zero)) == [
        "x: 1 of 2 elements of this input were changed, the first at [1]: 0.0 became -0.0"
    ]
