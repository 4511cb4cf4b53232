"""``kgen verify`` finds kernels that are wrong on purpose, on a real GPU. Needs nvcc there, and the base install."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import products
import pytest

from kgen.build.verify import points, verify
from kgen.runtime import Bundle, drivers
from kgen.runtime.drivers import Attribute

pytestmark = pytest.mark.gpu

SOURCE = Path(__file__).with_name("wrong.cu")
NAMES = ("right", "off_by_one_row", "wrong_scale", "unwritten_tail", "race", "fault")


def find_nvcc() -> str | None:
    """On the path, or where NVIDIA's installer puts it."""
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("needs nvcc: neither on the path nor in /usr/local/cuda/bin")
    folder = tmp_path_factory.mktemp("wrong")
    driver = drivers.open()
    capability = (Attribute.COMPUTE_CAPABILITY_MAJOR, Attribute.COMPUTE_CAPABILITY_MINOR)
    major, minor = (driver.attribute(0, attribute) for attribute in capability)
    target = f"sm_{major}{minor}"
    code = {}
    for kind in ("cubin", "ptx"):
        arch = target if kind == "cubin" else f"compute_{major}{minor}"
        code[kind] = folder / f"wrong.{kind}"
        subprocess.run([nvcc, f"-{kind}", f"-arch={arch}", str(SOURCE), "-o", str(code[kind])], check=True)
    return products.write(
        folder / "wrong.kgen",
        map(products.contract, NAMES),
        code["cubin"].read_bytes(),
        code["ptx"].read_bytes(),
        target,
        zeroed=("race",),
    )


def cases(bundle: Path, name: str, driver: str | None = None):
    with Bundle.open(bundle).load(0, driver=drivers.open(driver)) as kernels:
        return list(verify(kernels, points(products.contract(name)), 1))


@pytest.mark.parametrize("driver", ["ctypes", "cuda-python"])
def test_the_right_kernel_passes(bundle, driver):
    assert [case.failures for case in cases(bundle, "right", driver)] == [()] * 8


@pytest.mark.parametrize(
    ("name", "passes", "words"),
    [
        ("off_by_one_row", {1}, r"half ulps of the row's magnitude \S+ exceeds 4, worst at \[\d+, \d+\]: got"),
        ("wrong_scale", set(), r"relative Frobenius error of sampled rows 0\.0[23]\d* exceeds 0\.002"),
        ("unwritten_tail", {64}, r"elements are never written, the first at \[\d+, 0\]"),
        ("race", set(), r"exceeds|differ from run to run"),
    ],
)
def test_a_wrong_kernel_is_caught(bundle, name, passes, words):
    found = {case.point.dims["m"]: case for case in cases(bundle, name) if case.point.kind == "normal"}
    assert len(found) == 7 and {m for m, case in found.items() if case.status == "ok"} == passes
    for m in found.keys() - passes:
        assert re.search(words, " ".join(found[m].failures)), found[m].failures


def test_a_fault_ends_in_a_report(bundle):
    """In another process: the fault costs this one its device."""
    command = [sys.executable, "-m", "kgen.build.cli", "verify", str(bundle), "--op", "fault", "--op", "right"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert re.search(r"\[1/16\] failed  fault .*\n +DriverError: cu\w+ failed with CUDA_ERROR_\w+", done.stdout), (
        done.stdout
    )
    assert done.stderr.startswith("0 of 16 cases passed, 1 failed, 15 not run")
