"""Fixtures: a fake CUDA driver where there is no GPU. One process has either the fake or the real libcuda.so.1.

KGEN_FAKE_CUDA=1 chooses the fake on a machine with a GPU.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from fake import FakeCuda

from kgen.runtime import drivers

FAKE_CHOSEN = os.environ.get("KGEN_FAKE_CUDA") == "1"


@functools.cache
def real_cuda() -> bool:
    """Whether libcuda.so.1 can be loaded; asked in another process, as this one may be about to load the fake."""
    return not subprocess.run(
        [sys.executable, "-c", "import ctypes; ctypes.CDLL('libcuda.so.1')"], stderr=-3
    ).returncode


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        if FAKE_CHOSEN:
            pytest.skip("KGEN_FAKE_CUDA=1 puts the fake CUDA driver in place of the real one")
        if not real_cuda():
            pytest.skip("needs a GPU: libcuda.so.1 cannot be loaded here")


@pytest.fixture(scope="session")
def _fake_library(tmp_path_factory: pytest.TempPathFactory) -> FakeCuda:
    if real_cuda() and not FAKE_CHOSEN:
        pytest.skip("a real libcuda.so.1 is present: KGEN_FAKE_CUDA=1 runs the tests on the fake one")
    try:
        return FakeCuda(tmp_path_factory.mktemp("cuda"))
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture
def fake(_fake_library: FakeCuda) -> Iterator[FakeCuda]:
    """The fake CUDA driver, reset."""
    _fake_library.reset()
    yield _fake_library
    if _fake_library.errors:
        raise _fake_library.errors[0]


@pytest.fixture(params=["ctypes", "cuda-python"])
def driver(request: pytest.FixtureRequest, fake: FakeCuda) -> drivers.Driver:
    """Each of the drivers, on top of the fake."""
    if request.param == "cuda-python":
        pytest.importorskip("cuda.bindings.driver")
    driver = drivers.open(request.param)
    fake.clear()
    return driver
