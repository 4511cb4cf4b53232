"""Other libraries' kernels, raced in the same run: adapters found in a folder, one module a library.

An adapter defines ``peers(op, dims, tensors)``: `op` is the contract, `dims` all its dims, `tensors` its tensors by
name as torch CUDA tensors over the memory that kgen's own call uses. It yields a `Peer` for each call it can race, and
nothing for operators that are not its business. What it prepares before it yields is not timed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from kgen.compiler.ops import numerics
from kgen.compiler.ops.contract import Operator
from kgen.runtime.errors import ArgumentError
from kgen.runtime.tensors import Ptr, tensor_ref

if TYPE_CHECKING:
    import torch


class Unavailable(Exception):
    """Why a peer cannot run here: shown as "not measured: …"."""


@dataclass(frozen=True)
class Peer:
    """A call to race.

    Attributes:
        name: such as ``cublas`` or ``vllm-cuda``.
        call: one call; everything it launches goes to torch's current stream, and it does not wait.
        outputs: after a call, the contract's outputs by name, in its shapes and dtypes.
        note: what it does otherwise than the contract, if anything.
    """

    name: str
    call: Callable[[], object]
    outputs: Callable[[], dict[str, torch.Tensor]]
    note: str = ""


def load(folder: Path) -> list[ModuleType]:
    """The adapters of a folder: every module whose name does not start with an underscore.

    Raises:
        ArgumentError: none there, or one without ``peers``.
    """
    modules = []
    sys.path.append(str(folder))  # for what adapters share
    for path in sorted(folder.glob("[!_]*.py")):
        spec = importlib.util.spec_from_file_location(f"kgen_peers_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        if not hasattr(module, "peers"):
            raise ArgumentError(f"{path} defines no peers(op, dims, tensors)")
        modules.append(module)
    if not modules:
        raise ArgumentError(f"{folder} holds no peer adapters (*.py)")
    return modules


def find(
    adapters: list[ModuleType], op: Operator, dims: Mapping[str, int], tensors: Mapping[str, Ptr]
) -> tuple[list[Peer], dict[str, str]]:
    """The peers that run here, and why others do not, by adapter."""
    views = {name: view(pointer) for name, pointer in tensors.items()}
    found: list[Peer] = []
    missing: dict[str, str] = {}
    for module in adapters:
        name = module.__name__.removeprefix("kgen_peers_")
        try:
            for peer in module.peers(op, dict(dims), views):
                peer.call()  # compiles, tunes, allocates
                found.append(peer)
        except Exception as error:  # whatever a foreign library raises is why it was not measured
            missing[name] = f"{error}" if isinstance(error, Unavailable) else f"{type(error).__name__}: {error}"
    return found, missing


class _Bytes:
    """Device memory as torch takes it without knowing its dtype."""

    def __init__(self, address: int, nbytes: int):
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def view(pointer: Ptr) -> torch.Tensor:
    """A torch tensor over the memory of `pointer`."""
    import torch

    ref = tensor_ref("tensor", pointer)
    flat = torch.as_tensor(_Bytes(ref.address, ref.nbytes), device="cuda")
    return flat.view(getattr(torch, ref.dtype)).as_strided(ref.shape, ref.strides)


def to_numpy(tensor: torch.Tensor, dtype: str) -> np.ndarray:
    """A copy in host memory, of kgen's `dtype`."""
    import torch

    host: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return host.view(numerics.numpy_dtype(dtype)).reshape(tuple(tensor.shape))
