"""Staging tensors on the fake driver, whose device memory is host memory: strides, guards, poison, cleaning up."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kgen.build import arena
from kgen.compiler.ops.gemm import A, B, Gemm, Out
from kgen.runtime import errors
from kgen.runtime.format.manifest import Tensor

COLUMN_MAJOR = (1, ["align", "m", 4])  # a column of float32 starts at a multiple of 16 bytes


@dataclass(frozen=True, kw_only=True)
class Scales(Gemm):
    """A contract with column-major scales, in and out, beside a row-major output."""

    def tensors(self) -> tuple[Tensor, ...]:
        return (
            Tensor("scale", "in", "float32", ("m", 3), COLUMN_MAJOR, 4),
            Tensor("out_scale", "out", "float32", ("m", 3), COLUMN_MAJOR, 4),
            self.tensor("out", "out", "bfloat16", "m", 5),
        )


@pytest.fixture
def contract():
    half: Any = {"dtype": "float16"}
    dims = {"m": (1, 64), "n": (8, 8), "k": (8, 8)}
    return Scales(name="scales", dims=dims, workloads={}, a=A(**half), b=B(**half), out=Out(**half))


@pytest.fixture
def buffers(driver):
    context = driver.retain(0)
    with driver.using(context), arena.Arena(driver) as made:
        yield made


def memory(address: int, count: int, dtype: Any = np.uint8) -> np.ndarray:
    """Device memory of the fake driver, as a view."""
    nbytes = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype)


def test_column_major_elements_lie_where_their_strides_say(buffers, contract):
    scale = np.arange(15, dtype=np.float32).reshape(5, 3)
    tensors = arena.stage(buffers, contract, {"m": 5}, {"scale": scale})
    pointer = tensors["scale"]
    assert (pointer.shape, pointer.strides) == ((5, 3), (1, 8))
    there = memory(pointer.address, 2 * 8 + 5, np.float32)
    for row in range(5):
        for column in range(3):
            assert there[row + 8 * column] == scale[row, column]
    padding = memory(pointer.address, 4 * 21).reshape(-1, 4)[[5, 6, 7, 13, 14, 15]]
    assert (padding == arena.GUARD_BYTE).all()
    assert buffers.buffers["scale"].nbytes == 4 * 21, "the memory ends with the last element"
    back = arena.read(buffers.driver, pointer)
    assert back.flags.c_contiguous and np.array_equal(back, scale)


@pytest.mark.parametrize("m", [1, 4, 5])
def test_poison_fills_every_element_and_no_padding(buffers, contract, m):
    tensors = arena.stage(buffers, contract, {"m": m}, {"scale": np.ones((m, 3), np.float32)})
    arena.poison(buffers, contract, tensors, 0x5A)
    outputs = arena.outputs(buffers.driver, contract, tensors)
    assert {name: value.shape for name, value in outputs.items()} == {"out_scale": (m, 3), "out": (m, 5)}
    assert all((value.view(np.uint8) == 0x5A).all() for value in outputs.values())
    assert (arena.read(buffers.driver, tensors["scale"]) == 1).all(), "inputs keep their values"
    assert buffers.broken() == []


@pytest.mark.parametrize(
    ("tensor", "offset", "words"),
    [
        ("out", -1, "out: 1 bytes before it were overwritten, the first at byte -1 of 50"),
        ("out", -4096, "out: 1 bytes before it were overwritten, the first at byte -4096 of 50"),
        ("out", 50, "out: 1 bytes after it were overwritten, the first at byte 50 of 50"),
        ("out", 57, "out: 1 bytes after it were overwritten, the first at byte 57 of 50"),
        ("out_scale", 4 * 5, "out_scale: 1 bytes between its elements were overwritten, the first at byte 20 of 84"),
        ("scale", 4 * 16 - 1, "scale: 1 bytes between its elements were overwritten, the first at byte 63 of 84"),
        ("scale", 4 * 21, "scale: 1 bytes after it were overwritten, the first at byte 84 of 84"),
    ],
)
def test_a_byte_written_beside_the_elements_is_told(buffers, contract, tensor, offset, words):
    tensors = arena.stage(buffers, contract, {"m": 5}, {})
    arena.poison(buffers, contract, tensors, 0xFF)
    buffers.driver.memset(tensors[tensor].address + offset, 0, 1)
    assert buffers.broken() == [words]


def test_an_empty_tensor(buffers, contract):
    tensors = arena.stage(buffers, contract, {"m": 0}, {"scale": np.empty((0, 3), np.float32)})
    arena.poison(buffers, contract, tensors, 0xFF)
    assert arena.read(buffers.driver, tensors["out"]).shape == (0, 5) and buffers.broken() == []


def test_everything_is_given_back(driver, fake):
    context = driver.retain(0)
    with driver.using(context), arena.Arena(driver) as made:
        made.add("x", 100), made.add("y", 100), made.stream()
    calls = [call["call"] for call in fake.calls("cuMemAlloc", "cuMemFree", "cuStreamCreate", "cuStreamDestroy")]
    assert sorted(calls) == ["cuMemAlloc", "cuMemAlloc", "cuMemFree", "cuMemFree", "cuStreamCreate", "cuStreamDestroy"]


def test_a_fault_is_told_rather_than_that_nothing_can_be_freed_after_it(driver, fake):
    context = driver.retain(0)
    with driver.using(context):
        with pytest.raises(errors.DriverError, match="cuCtxSynchronize"), arena.Arena(driver) as made:
            made.add("x", 100)
            for function in ("cuCtxSynchronize", "cuMemFree"):
                fake.fail(function, 700)
            driver.synchronize()
        with pytest.raises(errors.DriverError, match="cuMemFree"), arena.Arena(driver) as made:
            made.add("x", 100)
            fake.fail("cuMemFree", 700)
