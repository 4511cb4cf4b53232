"""A driver that needs no GPU: it runs the PTX of a bundle's kernels on the CPU, thread by thread.

It finds what a GPU may not show: reads outside of a buffer, a barrier that is missing or that not all reach, loads that
are misaligned. The time that it takes says nothing.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from kgen.runtime import Bundle
from kgen.runtime.drivers import Attribute, Driver, LaunchConfig
from kgen.runtime.drivers.buffers import buffer_address
from kgen.runtime.errors import DriverError

from .translate import Unsupported, translate

__all__ = ["HostDriver", "Unsupported", "build", "compiler", "translate"]

COMPILE = ("-std=c++20", "-O1", "-fno-exceptions", "-ffp-contract=off", "-w", "-shared", "-fPIC")
ALIGN = 256  # bytes, of allocations
MESSAGE_BYTES = 1024
DEVICE, CONTEXT = 0, 1
INVALID_VALUE, NOT_FOUND, LAUNCH_FAILED, NOT_SUPPORTED = 1, 500, 719, 801  # CUDA_ERROR_…
NAMES = {INVALID_VALUE: "CUDA_ERROR_INVALID_VALUE", NOT_FOUND: "CUDA_ERROR_NOT_FOUND"}
NAMES |= {LAUNCH_FAILED: "CUDA_ERROR_LAUNCH_FAILED", NOT_SUPPORTED: "CUDA_ERROR_NOT_SUPPORTED"}
ATTRIBUTES = {
    Attribute.MAX_THREADS_PER_BLOCK: 1024,
    Attribute.L2_CACHE_SIZE: 60 << 20,
    Attribute.COMPUTE_CAPABILITY_MAJOR: 9,
    Attribute.COMPUTE_CAPABILITY_MINOR: 0,
    Attribute.COOPERATIVE_LAUNCH: 1,
    Attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: 232448,
    Attribute.CLUSTER_LAUNCH: 1,
}  # an H200's


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_uint64), ("end", ctypes.c_uint64))


class _Launch(ctypes.Structure):
    """``Launch`` of machine.h."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("smem", ctypes.c_uint32),
        ("cooperative", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("params", ctypes.c_void_p),
        ("memory", ctypes.POINTER(_Range)),
        ("ranges", ctypes.c_uint64),
        ("message", ctypes.c_void_p),
        ("message_size", ctypes.c_uint64),
    )


def compiler() -> str | None:
    """The C++ compiler, None where there is none."""
    return shutil.which("g++")


def build(ptx: str, folder: Path) -> Path:
    """A shared library of the entries of `ptx`, in `folder`; made only where it is not there yet.

    Raises:
        Unsupported: the translator does not know some instruction.
        subprocess.CalledProcessError: g++ refuses the translation.
    """
    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.iterdir()) if path.is_file()]
    digest = hashlib.sha256(b"\0".join([ptx.encode(), *map(str.encode, COMPILE), *sources])).hexdigest()
    library = folder / f"{digest[:32]}.so"
    if not library.exists():
        source = library.with_suffix(".cpp")
        source.write_text(translate(ptx))
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as made:  # renamed when whole: others may build too
            pass
        command = [compiler() or "g++", *COMPILE, f"-I{Path(__file__).parent}", source, "-o", made.name]
        subprocess.run(command, check=True, capture_output=True, text=True)
        os.replace(made.name, library)
    return library


class HostDriver(Driver):
    """The CPU as a device with few multiprocessors. Everything has run when a call returns.

    Args:
        bundle: whose cubins can be loaded: their PTX is what runs. Without one only PTX can be.
        folder: for the compiled code, kept from one driver to the next.
        guard: bytes at both ends of every allocation that kernels must not touch.
        seed: of the order in which threads run.
    """

    name = "host"

    def __init__(self, bundle: Bundle | None, folder: Path, sm_count: int = 4, guard: int = 0, seed: int = 0):
        self._folder, self._guard, self._seed = folder, guard, seed
        self._attributes = {**ATTRIBUTES, Attribute.MULTIPROCESSOR_COUNT: sm_count}
        kernels = bundle.manifest.kernels.values() if bundle else ()
        self._ptx = {kernel.cubin: bytes(bundle.blob(kernel.ptx)) for kernel in kernels if bundle and kernel.ptx}
        self._handles = count(1)
        self._launches = count(1)
        self._libraries: dict[int, str] = {}
        self._kernels: dict[int, tuple[str, str]] = {}  # PTX and entry
        self._memory: dict[int, Any] = {}  # address: the object that owns it
        self._captures: dict[int, list[Callable[[], None]]] = {}
        self._graphs: dict[int, list[Callable[[], None]]] = {}
        self._thread = threading.local()

    def _failure(self, function: str, code: int, hint: str) -> DriverError:
        return DriverError(function, code, NAMES[code], hint)

    # Devices and contexts.

    def version(self) -> int:
        return 13000

    def device_count(self) -> int:
        return 1

    def device_name(self, device: int) -> str:
        return "the CPU"

    def attribute(self, device: int, attribute: int) -> int:
        return self._attributes[attribute]

    def retain(self, device: int) -> int:
        return CONTEXT

    def release(self, device: int) -> None:
        pass

    def current(self) -> int:
        return getattr(self._thread, "context", 0)

    def set_current(self, context: int) -> None:
        self._thread.context = context

    @contextmanager
    def using(self, context: int) -> Iterator[None]:
        before = self.current()
        self.set_current(context)
        try:
            yield
        finally:
            self.set_current(before)

    def synchronize(self) -> None:
        pass

    # Code.

    def load_library(self, image: bytes | memoryview) -> int:
        image = bytes(image)
        handle = next(self._handles)
        self._libraries[handle] = self._ptx.get(hashlib.sha256(image).hexdigest(), image).decode()
        return handle

    def unload_library(self, library: int) -> None:
        del self._libraries[library]

    def kernel(self, library: int, entry: str) -> int:
        handle = next(self._handles)
        self._kernels[handle] = (self._libraries[library], entry)
        return handle

    def function(self, kernel: int) -> int:
        return kernel

    def set_max_dynamic_smem(self, function: int, bytes: int) -> None:
        pass

    def set_nonportable_cluster(self, function: int) -> None:
        pass

    def _code(self, function: int) -> Callable[[Any], None]:
        ptx, entry = self._kernels[function]
        try:
            library = ctypes.CDLL(str(build(ptx, self._folder)))
            return getattr(library, f"launch_{entry}")
        except (Unsupported, AttributeError) as error:
            raise self._failure("cuKernelGetFunction", NOT_FOUND, str(error)) from None

    # Launches.

    def encode_tensor_map(self, **arguments: Any) -> Any:
        raise self._failure("cuTensorMapEncodeTiled", NOT_SUPPORTED, "the host driver has no tensor maps")

    def _launcher(self, function: int, config: LaunchConfig, params: int, stream: int) -> Callable[[], None]:
        code = self._code(function)
        return lambda: self._enqueue(stream, lambda: self._run(code, config, params))

    def _memset_launcher(self, address: int, byte: int, count: int, stream: int) -> Callable[[], None]:
        return lambda: self._enqueue(stream, lambda: self.memset(address, byte, count))

    def _enqueue(self, stream: int, work: Callable[[], None]) -> None:
        if stream in self._captures:
            self._captures[stream].append(work)
        else:
            work()

    def _run(self, code: Callable[[Any], None], config: LaunchConfig, params: int) -> None:
        grid, block, cluster = config.grid, config.block, config.cluster
        if any(extent % along for extent, along in zip(grid, cluster, strict=True)):
            raise self._failure(
                "cuLaunchKernel", INVALID_VALUE, f"the grid {grid} is no multiple of the cluster {cluster}"
            )
        memory = [
            (address + self._guard, address + ctypes.sizeof(owner) - ALIGN - self._guard)
            for address, owner in self._memory.items()
        ]
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        launch = _Launch(
            grid,
            block,
            cluster,
            config.smem,
            config.cooperative,
            self._seed * 1_000_003 + next(self._launches),
            params,
            (_Range * len(memory))(*memory),
            len(memory),
            ctypes.addressof(message),
            MESSAGE_BYTES,
        )
        code(ctypes.byref(launch))
        if message.value:
            raise self._failure("cuLaunchKernel", LAUNCH_FAILED, message.value.decode())

    # Memory.

    def allocate(self, bytes: int) -> int:
        owner = (ctypes.c_char * (bytes + ALIGN))()
        address = -(-ctypes.addressof(owner) // ALIGN) * ALIGN
        self._memory[address] = owner
        return address

    def free(self, address: int) -> None:
        del self._memory[address]

    def copy_to_device(self, address: int, buffer: Any) -> None:
        with buffer_address(buffer) as (pointer, size):
            ctypes.memmove(self._inside(address, size), pointer, size)

    def copy_to_host(self, buffer: Any, address: int) -> None:
        with buffer_address(buffer, writable=True) as (pointer, size):
            ctypes.memmove(pointer, self._inside(address, size), size)

    def memset(self, address: int, byte: int, count: int) -> None:
        ctypes.memset(self._inside(address, count), byte, count)

    def _inside(self, address: int, size: int) -> int:
        if size and not any(
            start <= address and address + size <= start + ctypes.sizeof(owner) - ALIGN
            for start, owner in self._memory.items()
        ):
            raise self._failure(
                "cuMemcpy", INVALID_VALUE, f"{size} bytes at {address:#x} are outside of every allocation"
            )
        return address

    def pointer_device(self, address: int) -> int | None:
        inside = (start <= address < start + ctypes.sizeof(owner) - ALIGN for start, owner in self._memory.items())
        return DEVICE if any(inside) else None

    # Streams, events, graphs.

    def create_stream(self) -> int:
        return next(self._handles)

    def destroy_stream(self, stream: int) -> None:
        pass

    def synchronize_stream(self, stream: int) -> None:
        pass

    def begin_capture(self, stream: int) -> None:
        self._captures[stream] = []

    def end_capture(self, stream: int) -> int:
        handle = next(self._handles)
        self._graphs[handle] = self._captures.pop(stream)
        return handle

    def instantiate(self, graph: int) -> int:
        handle = next(self._handles)
        self._graphs[handle] = self._graphs[graph]
        return handle

    def launch_graph(self, executable: int, stream: int) -> None:
        for work in self._graphs[executable]:
            work()

    def destroy_graph_exec(self, executable: int) -> None:
        del self._graphs[executable]

    def destroy_graph(self, graph: int) -> None:
        del self._graphs[graph]
