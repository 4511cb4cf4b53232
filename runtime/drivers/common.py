"""`Driver`: what both bindings do, written once over the one thing in which they differ, how a function is called."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from kgen.runtime.drivers.buffers import buffer_address
from kgen.runtime.errors import ArgumentError, DriverError

Dim3 = tuple[int, int, int]

INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
POINTER_MEMORY_TYPE, POINTER_DEVICE_ORDINAL = 2, 9  # CU_POINTER_ATTRIBUTE_…
MEMORY_TYPE_DEVICE = 2  # CU_MEMORYTYPE_DEVICE
CAPTURE_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: other threads may go on allocating
TENSOR_MAP_BYTES, TENSOR_MAP_ALIGN = 128, 64  # sizeof and alignof of CUtensorMap


class Attribute:
    """``CU_DEVICE_ATTRIBUTE_…``; sizes are in bytes."""

    MAX_THREADS_PER_BLOCK = 1
    MULTIPROCESSOR_COUNT = 16
    L2_CACHE_SIZE = 38
    COMPUTE_CAPABILITY_MAJOR = 75
    COMPUTE_CAPABILITY_MINOR = 76
    COOPERATIVE_LAUNCH = 95
    MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97
    CLUSTER_LAUNCH = 120


class FunctionAttribute:
    """``CU_FUNC_ATTRIBUTE_…``; sizes are in bytes."""

    MAX_THREADS_PER_BLOCK = 0
    SHARED_SIZE_BYTES = 1
    LOCAL_SIZE_BYTES = 3
    NUM_REGS = 4
    BINARY_VERSION = 6
    MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
    NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14


class LaunchConfig(NamedTuple):
    """How a kernel is launched.

    Attributes:
        grid, block, cluster: blocks, threads a block, blocks a cluster, (1, 1, 1) without clusters.
        smem: bytes of dynamic shared memory a block.
        pdl: let it start before the kernel ahead of it in the stream ends (programmatic stream serialization).
        cooperative: all blocks are on the device at once, or the launch is refused.
    """

    grid: Dim3
    block: Dim3
    cluster: Dim3 = (1, 1, 1)
    smem: int = 0
    pdl: bool = False
    cooperative: bool = False


class Driver:
    """The CUDA driver.

    Handles (contexts, libraries, kernels, functions, streams, events, graphs) and addresses are plain ints, sizes are
    bytes, a device is an ordinal. Unless its docstring says otherwise, a method works in the calling thread's current
    context, and raises `DriverError` when the driver refuses.
    """

    name: str

    # What a binding provides.

    def _invoke(self, function: str, *args: Any) -> tuple[int, Any]:
        """Call ``function`` (its name without version) with its input arguments: its CUresult and its output."""
        raise NotImplementedError

    def _launcher(self, function: int, config: LaunchConfig, params: int, stream: int) -> Callable[[], None]:
        raise NotImplementedError

    def _config(self, config: LaunchConfig, stream: int) -> Any:
        """A CUlaunchConfig that owns what it points to."""
        raise NotImplementedError

    def _memset_launcher(self, address: int, byte: int, count: int, stream: int) -> Callable[[], None]:
        raise NotImplementedError

    def _encode(
        self, tensor_map: int, data_type: int, address: int, dims: Sequence[int], strides: Sequence[int],
        box: Sequence[int], element_strides: Sequence[int], interleave: int, swizzle: int, l2_promotion: int,
        oob_fill: int,
    ) -> int:  # fmt: skip
        """cuTensorMapEncodeTiled into the 128 bytes at `tensor_map`: its CUresult."""
        raise NotImplementedError

    def _call(self, function: str, *args: Any) -> Any:
        code, value = self._invoke(function, *args)
        if code:
            raise self._error(function, code)
        return value

    def _error(self, function: str, code: int, hint: str = "") -> DriverError:
        name, text = (self._invoke(words, int(code))[1] for words in ("cuGetErrorName", "cuGetErrorString"))
        if code == INVALID_CONTEXT:
            hint = "this thread has no current context of the right device: call activate() of the loaded kernels in it"
        hint = "; ".join(part for part in (text.decode() if text else "", hint) if part)
        return DriverError(function, int(code), name.decode() if name else "an unknown error", hint)

    # Devices and contexts.

    def version(self) -> int:
        """The newest CUDA version that the driver supports: 13000 is 13.0. Needs no context."""
        return int(self._call("cuDriverGetVersion"))

    def device_count(self) -> int:
        """How many devices are visible. Needs no context."""
        return int(self._call("cuDeviceGetCount"))

    def device_name(self, device: int) -> str:
        """Such as ``NVIDIA H200``. Needs no context."""
        raise NotImplementedError

    def attribute(self, device: int, attribute: int) -> int:
        """The value of an `Attribute`. Needs no context."""
        return int(self._call("cuDeviceGetAttribute", attribute, device))

    def retain(self, device: int) -> int:
        """The device's primary context, created if need be (which takes 0.1 s or more); pair it with `release`."""
        return int(self._call("cuDevicePrimaryCtxRetain", device))

    def release(self, device: int) -> None:
        """Give back one `retain`; the last one destroys the context."""
        self._call("cuDevicePrimaryCtxRelease", device)

    def current(self) -> int:
        """The calling thread's current context, 0 without one."""
        return int(self._call("cuCtxGetCurrent"))

    def set_current(self, context: int) -> None:
        """Make `context` the calling thread's current one, in place of the one it has; 0 for none."""
        self._call("cuCtxSetCurrent", context)

    @contextmanager
    def using(self, context: int) -> Iterator[None]:
        """Have `context` current inside the ``with``, and what was current before after it."""
        self._call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def synchronize(self) -> None:
        """Wait until the current context's device has done all its work."""
        self._call("cuCtxSynchronize")

    # Code.

    def load_library(self, image: bytes | memoryview) -> int:
        """Load a cubin or PTX into all contexts; `image` is not needed afterwards. Needs no context.

        A cubin is read where it lies, a memory-mapped one too.
        """
        if bytes(image[:4]) != b"\x7fELF":
            image = bytes(image)  # PTX is read up to a NUL, which the bytes of an object have behind them
        with buffer_address(image) as (pointer, _):
            return int(self._call("cuLibraryLoadData", pointer, None, None, 0, None, None, 0))

    def unload_library(self, library: int) -> None:
        """Unload the library: its kernels and functions must not be used any more."""
        self._call("cuLibraryUnload", library)

    def kernel(self, library: int, entry: str) -> int:
        """The kernel with that symbol. Needs no context."""
        return int(self._call("cuLibraryGetKernel", library, entry.encode()))

    def function(self, kernel: int) -> int:
        """The kernel's CUfunction in the current context; this makes its code resident there."""
        return int(self._call("cuKernelGetFunction", kernel))

    def set_max_dynamic_smem(self, function: int, bytes: int) -> None:
        """Allow launches with up to `bytes` of dynamic shared memory; needed above 48 KiB."""
        self._call("cuFuncSetAttribute", function, FunctionAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes)

    def set_nonportable_cluster(self, function: int) -> None:
        """Allow clusters of more than 8 blocks."""
        self._call("cuFuncSetAttribute", function, FunctionAttribute.NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)

    def function_attribute(self, function: int, attribute: int) -> int:
        """The value of a `FunctionAttribute`."""
        return int(self._call("cuFuncGetAttribute", attribute, function))

    def max_active_clusters(self, function: int, config: LaunchConfig) -> int:
        """How many clusters of such a launch can be on the device at once."""
        return int(self._call("cuOccupancyMaxActiveClusters", function, self._config(config, 0)))

    # Launches.

    def encode_tensor_map(
        self, *, data_type: int, address: int, dims: Sequence[int], strides: Sequence[int], box: Sequence[int],
        element_strides: Sequence[int], interleave: int, swizzle: int, l2_promotion: int, oob_fill: int,
    ) -> ctypes.Array[ctypes.c_char]:  # fmt: skip
        """A CUtensorMap for tiled copies: 128 bytes at a multiple of 64, as a ctypes array that owns them.

        Args:
            address: of the tensor, in device memory.
            dims, strides: innermost first; `strides` in bytes, without the innermost.
            data_type, interleave, swizzle, l2_promotion, oob_fill: the values of the CUtensorMap enumerators.

        Raises:
            ArgumentError: the lists' lengths do not fit each other, or a number is out of its C type's range.
            DriverError: the driver refuses; the message has the arguments.
        """
        rank = len(dims)
        if not len(strides) + 1 == len(box) == len(element_strides) == rank:
            raise ArgumentError(f"tensor map ranks differ: {dims=}, {strides=}, {box=}, {element_strides=}")
        if not all(0 <= n < 1 << 64 for n in (address, *dims, *strides)) or not all(
            0 <= n < 1 << 32 for n in (*box, *element_strides)
        ):
            raise ArgumentError(f"tensor map out of range: {address=}, {dims=}, {strides=}, {box=}, {element_strides=}")
        arguments = (
            data_type,
            address,
            dims,
            strides,
            box,
            element_strides,
            interleave,
            swizzle,
            l2_promotion,
            oob_fill,
        )
        memory = ctypes.create_string_buffer(TENSOR_MAP_BYTES + TENSOR_MAP_ALIGN)
        tensor_map = (ctypes.c_char * TENSOR_MAP_BYTES).from_buffer(
            memory, -ctypes.addressof(memory) % TENSOR_MAP_ALIGN
        )
        code = self._encode(ctypes.addressof(tensor_map), *arguments)
        if code:
            hint = (
                f"data_type={data_type}, address={address:#x}, dims={list(dims)}, strides={list(strides)} (bytes), "
                f"box={list(box)}, element_strides={list(element_strides)}, interleave={interleave}, "
                f"swizzle={swizzle}, l2_promotion={l2_promotion}, oob_fill={oob_fill}; "
                "address and strides must be multiples of 16 bytes, no dim may be 0, box dims are 1..256, "
                "and the inner box must fit the swizzle's span"
            )
            raise self._error("cuTensorMapEncodeTiled", code, hint)
        return tensor_map

    def launcher(self, function: int, config: LaunchConfig, params_address: int, stream: int) -> Callable[[], None]:
        """A launch with everything prepared: call it, from any thread, as often as you like.

        It does not wait, allocates nothing and may be captured into a graph.

        Args:
            function: from `function`; its context must be current when `stream` is 0.
            params_address: of an array of pointers, one to each parameter. The caller keeps both alive; the
                parameters are read anew at each launch.
            stream: a CUstream.

        Raises:
            ArgumentError: a size does not fit 32 bits.
            DriverError: from the launch that is returned, when the driver refuses it.
        """
        grid, block, cluster, smem = config[:4]
        if not all(0 <= value < 1 << 32 for value in (*grid, *block, *cluster, smem)):
            raise ArgumentError(f"launch sizes must fit 32 bits: {grid=}, {block=}, {cluster=}, {smem=}")
        return self._launcher(function, config, params_address, stream)

    def memset_launcher(self, address: int, byte: int, count: int, stream: int) -> Callable[[], None]:
        """Like `launcher`: fills `count` bytes at `address` with `byte` (0..255) in stream order."""
        return self._memset_launcher(address, _byte(byte), count, stream)

    # Memory.

    def allocate(self, bytes: int) -> int:
        """The address, a multiple of 256, of `bytes` (at least 1) bytes of the current context's device."""
        return int(self._call("cuMemAlloc", bytes))

    def free(self, address: int) -> None:
        """Free what `allocate` gave; waits for work that uses it."""
        self._call("cuMemFree", address)

    def copy_to_device(self, address: int, buffer: Any) -> None:
        """Copy all bytes of a C-contiguous buffer to device memory.

        It is in the order of the default stream: before other, non-blocking streams use the bytes, `synchronize`.

        Raises:
            ArgumentError: no buffer, or not contiguous.
        """
        with buffer_address(buffer) as (pointer, size):
            self._call("cuMemcpyHtoD", address, pointer, size)

    def copy_to_host(self, buffer: Any, address: int) -> None:
        """Fill a writable C-contiguous buffer from device memory, in the order of the default stream.

        Raises:
            ArgumentError: no buffer, read-only, or not contiguous.
        """
        with buffer_address(buffer, writable=True) as (pointer, size):
            self._call("cuMemcpyDtoH", pointer, address, size)

    def memset(self, address: int, byte: int, count: int) -> None:
        """Fill `count` bytes with `byte` (0..255), in the order of the default stream."""
        self._call("cuMemsetD8", address, _byte(byte), count)

    def pointer_device(self, address: int) -> int | None:
        """The device whose memory `address` lies in; None for anything else, such as host memory."""
        for attribute in (POINTER_MEMORY_TYPE, POINTER_DEVICE_ORDINAL):
            code, value = self._invoke("cuPointerGetAttribute", attribute, address)
            if code == INVALID_VALUE or (attribute == POINTER_MEMORY_TYPE and not code and value != MEMORY_TYPE_DEVICE):
                return None
            if code:
                raise self._error("cuPointerGetAttribute", code)
        return int(value)

    # Streams, events, graphs.

    def create_stream(self) -> int:
        """A stream that keeps order with the default stream."""
        return int(self._call("cuStreamCreate", 0))

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy", stream)

    def synchronize_stream(self, stream: int) -> None:
        """Wait until the stream's work is done."""
        self._call("cuStreamSynchronize", stream)

    def create_event(self) -> int:
        return int(self._call("cuEventCreate", 0))

    def record_event(self, event: int, stream: int) -> None:
        """The event happens when the stream's work so far is done."""
        self._call("cuEventRecord", event, stream)

    def elapsed_ms(self, start: int, end: int) -> float:
        """Milliseconds between two recorded events; waits for `end`."""
        self._call("cuEventSynchronize", end)
        return float(self._call("cuEventElapsedTime", start, end))

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy", event)

    def begin_capture(self, stream: int) -> None:
        """Record what the stream is given into a graph instead of running it; not on the default stream."""
        self._call("cuStreamBeginCapture", stream, CAPTURE_THREAD_LOCAL)

    def end_capture(self, stream: int) -> int:
        """The graph captured since `begin_capture`."""
        return int(self._call("cuStreamEndCapture", stream))

    def instantiate(self, graph: int) -> int:
        """An executable graph."""
        return int(self._call("cuGraphInstantiate", graph, 0))

    def launch_graph(self, executable: int, stream: int) -> None:
        self._call("cuGraphLaunch", executable, stream)

    def destroy_graph_exec(self, executable: int) -> None:
        self._call("cuGraphExecDestroy", executable)

    def destroy_graph(self, graph: int) -> None:
        self._call("cuGraphDestroy", graph)


def _byte(value: int) -> int:
    if not 0 <= value <= 255:
        raise ArgumentError(f"a byte is 0..255, not {value}")
    return value
