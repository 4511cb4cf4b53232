"""Device memory for a contract's tensors, with guard bytes around each buffer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from kgen.compiler.ops import numerics
from kgen.compiler.ops.contract import Arrays, Operator
from kgen.runtime.drivers import Driver
from kgen.runtime.tensors import Ptr

if TYPE_CHECKING:
    from kgen.runtime.kernels import Plan

GUARD = 4096  # bytes before and after every buffer
GUARD_BYTE = 0xA5


class Arena:
    """Device buffers with guard bytes on both sides, freed together."""

    def __init__(self, driver: Driver):
        self.driver = driver
        self.buffers: dict[str, tuple[int, int]] = {}

    def add(self, name: str, nbytes: int) -> int:
        """Allocate `nbytes` between guards; returns the address."""
        base = self.driver.allocate(nbytes + 2 * GUARD)
        self.driver.memset(base, GUARD_BYTE, nbytes + 2 * GUARD)
        self.buffers[name] = (base, nbytes)
        return base + GUARD

    def broken(self) -> list[str]:
        """The buffers whose guards were written."""
        found = []
        for name, (base, nbytes) in self.buffers.items():
            for side, address in (("before", base), ("after", base + GUARD + nbytes)):
                guard = np.empty(GUARD, np.uint8)
                self.driver.copy_to_host(guard, address)
                if (guard != GUARD_BYTE).any():
                    found.append(f"{name}: bytes {side} it were overwritten")
        return found

    def close(self) -> None:
        for base, _ in self.buffers.values():
            self.driver.free(base)
        self.buffers.clear()

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def stage(arena: Arena, contract: Operator, dims: Mapping[str, int], inputs: Arrays) -> dict[str, Ptr]:
    """Memory for every tensor of the contract at `dims`, the inputs uploaded."""
    full = contract.full_dims(dims)
    tensors: dict[str, Ptr] = {}
    for tensor in contract.tensors():
        shape = numerics.shape(tensor, full)
        nbytes = int(np.prod(shape)) * numerics.itemsize(tensor.dtype)
        tensors[tensor.name] = Ptr(arena.add(tensor.name, nbytes), shape, tensor.dtype)
        if tensor.name in inputs:
            arena.driver.copy_to_device(tensors[tensor.name].address, as_bytes(inputs[tensor.name]))
    return tensors


def workspace(arena: Arena, plan: Plan) -> Ptr | None:
    """Memory for the plan's workspace, if it needs any."""
    if not plan.workspace_bytes:
        return None
    name = f"workspace {len(arena.buffers)}"
    return Ptr(arena.add(name, plan.workspace_bytes), (plan.workspace_bytes,), "uint8")


def poison(arena: Arena, contract: Operator, tensors: Mapping[str, Ptr], byte: int) -> None:
    """Fill every output with `byte`."""
    for tensor in contract.tensors():
        if tensor.role == "out":
            arena.driver.memset(tensors[tensor.name].address, byte, arena.buffers[tensor.name][1])


def read(driver: Driver, pointer: Ptr) -> np.ndarray:
    """A copy in host memory."""
    array = np.empty(pointer.shape, numerics.numpy_dtype(pointer.dtype))
    driver.copy_to_host(array.reshape(-1).view(np.uint8), pointer.address)
    return array


def outputs(driver: Driver, contract: Operator, tensors: Mapping[str, Ptr]) -> Arrays:
    """Copies of what the contract's calls write."""
    return {t.name: read(driver, tensors[t.name]) for t in contract.tensors() if t.role in ("out", "inout")}


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The array's bytes, flat."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
