"""Device memory for a contract's tensors, with guard bytes around each buffer and between strided elements."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kgen.compiler.ops import numerics
from kgen.compiler.ops.contract import Arrays, Operator
from kgen.runtime.drivers import Driver
from kgen.runtime.errors import DriverError
from kgen.runtime.format.expr import evaluate
from kgen.runtime.tensors import Ptr, TensorRef, tensor_ref

if TYPE_CHECKING:
    from kgen.runtime.kernels import Plan

GUARD = 4096  # bytes before and after every buffer
GUARD_BYTE = 0xA5


class Buffer(NamedTuple):
    """`nbytes` of device memory from `address`, between guards. `gaps` (bool, a byte each) are guards inside of it."""

    address: int
    nbytes: int
    gaps: np.ndarray | None

    def guards(self) -> dict[str, np.ndarray]:
        """Offsets from `address` of the guard bytes, ascending, by where they are."""
        sides = {"before it": np.arange(-GUARD, 0), "after it": np.arange(self.nbytes, self.nbytes + GUARD)}
        return sides if self.gaps is None else sides | {"between its elements": np.flatnonzero(self.gaps)}


class Arena:
    """Device buffers with guard bytes on both sides, and streams, freed together."""

    def __init__(self, driver: Driver):
        self.driver = driver
        self.buffers: dict[str, Buffer] = {}
        self._streams: list[int] = []

    def add(self, name: str, nbytes: int, gaps: np.ndarray | None = None) -> int:
        """Allocate `nbytes` between guards, all filled with the guard byte; returns the address."""
        base = self.driver.allocate(nbytes + 2 * GUARD)
        self.buffers[name] = Buffer(base + GUARD, nbytes, gaps)
        self.driver.memset(base, GUARD_BYTE, nbytes + 2 * GUARD)
        return base + GUARD

    def stream(self) -> int:
        """A new stream."""
        self._streams.append(self.driver.create_stream())
        return self._streams[-1]

    def broken(self) -> list[str]:
        """A sentence for each guard that was written."""
        found = []
        for name, buffer in self.buffers.items():
            for side, offsets in buffer.guards().items():
                start = int(offsets[0])
                memory = np.empty(int(offsets[-1]) - start + 1, np.uint8)
                self.driver.copy_to_host(memory, buffer.address + start)
                wrong = offsets[memory[offsets - start] != GUARD_BYTE]
                if wrong.size:
                    where = f"the first at byte {wrong[0]} of {buffer.nbytes}"
                    found.append(f"{name}: {wrong.size} bytes {side} were overwritten, {where}")
        return found

    def close(self) -> None:
        """Free everything.

        Raises:
            DriverError: the driver refuses, as it does after a fault.
        """
        while self._streams:
            self.driver.destroy_stream(self._streams.pop())
        while self.buffers:
            _, buffer = self.buffers.popitem()
            self.driver.free(buffer.address - GUARD)

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # after a fault nothing can be freed, and the fault is what to tell
            with suppress(DriverError):
                self.close()


def stage(arena: Arena, contract: Operator, dims: Mapping[str, int], inputs: Arrays) -> dict[str, Ptr]:
    """Memory for every tensor of the contract at `dims`, in its strides, the inputs uploaded."""
    full = contract.full_dims(dims)
    tensors: dict[str, Ptr] = {}
    for tensor in contract.tensors():
        strides = tuple(evaluate(stride, full) for stride in tensor.strides)
        pointer = Ptr(0, numerics.shape(tensor, full), tensor.dtype, strides)
        ref = tensor_ref(tensor.name, pointer)
        tensors[tensor.name] = pointer._replace(address=arena.add(tensor.name, ref.nbytes, _gaps(ref)))
        if tensor.name in inputs:
            upload(arena.driver, tensors[tensor.name], inputs[tensor.name])
    return tensors


def workspace(arena: Arena, plan: Plan) -> Ptr | None:
    """Memory for the plan's workspace, if it needs any."""
    if not plan.workspace_bytes:
        return None
    name = f"workspace {len(arena.buffers)}"
    return Ptr(arena.add(name, plan.workspace_bytes), (plan.workspace_bytes,), "uint8")


def poison(arena: Arena, contract: Operator, tensors: Mapping[str, Ptr], byte: int) -> None:
    """Fill every element of every output with `byte`."""
    for tensor in contract.tensors():
        if tensor.role == "out":
            address, nbytes, gaps = arena.buffers[tensor.name]
            if gaps is None:
                arena.driver.memset(address, byte, nbytes)
            else:
                arena.driver.copy_to_device(address, np.where(gaps, GUARD_BYTE, byte).astype(np.uint8))


def upload(driver: Driver, pointer: Ptr, array: np.ndarray) -> None:
    """Copy `array`, of the pointer's shape and dtype, to its memory; bytes between its elements get the guard byte."""
    ref = tensor_ref("array", pointer)
    image = np.full(ref.nbytes, GUARD_BYTE, np.uint8)
    if image.size:
        _elements(image, ref)[...] = as_bytes(array).reshape(*ref.shape, -1)
        driver.copy_to_device(ref.address, image)


def read(driver: Driver, pointer: Ptr) -> np.ndarray:
    """A row-major copy in host memory."""
    ref = tensor_ref("array", pointer)
    image = np.empty(ref.nbytes, np.uint8)
    if image.size:
        driver.copy_to_host(image, ref.address)
    dtype = numerics.numpy_dtype(ref.dtype)
    return as_bytes(_elements(image, ref)).view(dtype).reshape(ref.shape)


def outputs(driver: Driver, contract: Operator, tensors: Mapping[str, Ptr]) -> Arrays:
    """Copies of what the contract's calls write."""
    return {t.name: read(driver, tensors[t.name]) for t in contract.tensors() if t.role in ("out", "inout")}


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The array's bytes, flat."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _elements(image: np.ndarray, ref: TensorRef) -> np.ndarray:
    """The bytes of each element, ``[*shape, itemsize]``: a view of `image`, the tensor's memory with an item a byte."""
    size = numerics.itemsize(ref.dtype)
    return np.ndarray((*ref.shape, size), image.dtype, image, strides=(*(size * stride for stride in ref.strides), 1))


def _gaps(ref: TensorRef) -> np.ndarray | None:
    """Which bytes of the tensor's memory are of no element; None where every one is."""
    gaps = np.ones(ref.nbytes, bool)
    if gaps.size:
        _elements(gaps, ref)[...] = False
    return gaps if gaps.any() else None
