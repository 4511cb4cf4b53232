"""A kernel between lowering and compilation, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kgen.runtime.format import canonical, manifest
from kgen.runtime.format.parse import program_from_json


@dataclass(frozen=True)
class KernelSource:
    """A ``__global__`` function before it is compiled.

    Attributes:
        source, entry: CUDA C++, and the function's symbol in it.
        params: kinds of `manifest.PARAM_KINDS`, in the function's order.
        block, cluster: threads a block; blocks a cluster.
        dynamic_smem: bytes of dynamic shared memory.
        pdl: waits for the launch before it (programmatic dependent launch).
        cooperative: its blocks wait for each other, so all must be on the device at once.
        tolerates: what ptxas may complain of, by its code.
    """

    source: str
    entry: str
    params: tuple[str, ...]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_smem: int
    pdl: bool
    cooperative: bool = False
    tolerates: tuple[str, ...] = ()

    def id(self, toolchain: str) -> str:
        """The kernel's identity: sha256 of its source and of the toolchain's fingerprint (flags and toolkit)."""
        return canonical.sha256(canonical.dumps([self.source, self.entry, toolchain]))


@dataclass(frozen=True)
class Lowered:
    """A program and the kernels it launches, by id."""

    program: manifest.Program
    kernels: dict[str, KernelSource]

    def to_json(self) -> dict[str, Any]:
        """Plain data: the two fields, kernels by id."""
        kernels = {id: asdict(kernel) for id, kernel in self.kernels.items()}
        return {"program": manifest.program_to_json(self.program), "kernels": kernels}

    @classmethod
    def from_json(cls, value: dict[str, Any], symbols: set[str]) -> Lowered:
        """The inverse of `to_json`; `symbols` are the dims and device symbols that expressions may name."""
        kernels = {
            id: KernelSource(**{key: tuple(item) if isinstance(item, list) else item for key, item in fields.items()})
            for id, fields in value["kernels"].items()
        }
        return cls(program_from_json(value["program"], symbols), kernels)
