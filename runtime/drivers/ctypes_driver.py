"""The driver through ctypes on ``libcuda.so.1``: needs nothing but the standard library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any

from kgen.runtime.drivers.common import (
    CLUSTER_DIMENSION,
    COOPERATIVE,
    PROGRAMMATIC_STREAM_SERIALIZATION,
    Driver,
    LaunchConfig,
)
from kgen.runtime.errors import DriverNotFound, DriverTooOld


class CUlaunchAttribute(ctypes.Structure):
    """``CUlaunchAttribute``; its union of 64 bytes as words, which is all that the attributes in use need."""

    _fields_ = (("id", c_uint), ("pad", c_uint), ("value", c_uint * 16))


class CUlaunchConfig(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("smem", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(CUlaunchAttribute)),
        ("count", c_uint),
    )


_handle = c_size_t  # reads as an int, where a null c_void_p reads as None
_address = c_uint64  # CUdeviceptr

# Symbol, output (the C function's first parameter), inputs.
_SIGNATURES: tuple[tuple[Any, ...], ...] = (
    ("cuInit", None, c_uint),
    ("cuGetErrorName", c_char_p, c_int),
    ("cuGetErrorString", c_char_p, c_int),
    ("cuDriverGetVersion", c_int),
    ("cuDeviceGetCount", c_int),
    ("cuDeviceGetName", None, c_char_p, c_int, c_int),
    ("cuDeviceGetAttribute", c_int, c_int, c_int),
    ("cuDevicePrimaryCtxRetain", _handle, c_int),
    ("cuDevicePrimaryCtxRelease_v2", None, c_int),
    ("cuCtxGetCurrent", _handle),
    ("cuCtxSetCurrent", None, _handle),
    ("cuCtxPushCurrent_v2", None, _handle),
    ("cuCtxPopCurrent_v2", _handle),
    ("cuCtxSynchronize", None),
    ("cuLibraryLoadData", _handle, c_void_p, c_void_p, c_void_p, c_uint, c_void_p, c_void_p, c_uint),
    ("cuLibraryUnload", None, _handle),
    ("cuLibraryGetKernel", _handle, _handle, c_char_p),
    ("cuKernelGetFunction", _handle, _handle),
    ("cuFuncSetAttribute", None, _handle, c_int, c_int),
    ("cuFuncGetAttribute", c_int, c_int, _handle),
    ("cuOccupancyMaxActiveClusters", c_int, _handle, POINTER(CUlaunchConfig)),
    ("cuTensorMapEncodeTiled", None, c_void_p, c_int, c_uint32, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p,
     c_int, c_int, c_int, c_int),
    ("cuMemAlloc_v2", _address, c_size_t),
    ("cuMemFree_v2", None, _address),
    ("cuMemcpyHtoD_v2", None, _address, c_void_p, c_size_t),
    ("cuMemcpyDtoH_v2", None, c_void_p, _address, c_size_t),
    ("cuMemsetD8_v2", None, _address, c_ubyte, c_size_t),
    ("cuPointerGetAttribute", c_int, c_int, _address),
    ("cuStreamCreate", _handle, c_uint),
    ("cuStreamDestroy_v2", None, _handle),
    ("cuStreamSynchronize", None, _handle),
    ("cuStreamBeginCapture_v2", None, _handle, c_int),
    ("cuStreamEndCapture", _handle, _handle),
    ("cuEventCreate", _handle, c_uint),
    ("cuEventRecord", None, _handle, _handle),
    ("cuEventSynchronize", None, _handle),
    ("cuEventElapsedTime", c_float, _handle, _handle),
    ("cuEventDestroy_v2", None, _handle),
    ("cuGraphInstantiateWithFlags", _handle, _handle, c_uint64),
    ("cuGraphLaunch", None, _handle, _handle),
    ("cuGraphExecDestroy", None, _handle),
    ("cuGraphDestroy", None, _handle),
)  # fmt: skip
_FUNCTIONS = {row[0].removesuffix("_v2").removesuffix("WithFlags"): row for row in _SIGNATURES}
_OUTPUT_LAST = ("cuGetErrorName", "cuGetErrorString", "cuStreamEndCapture")


class CtypesDriver(Driver):
    """`Driver` over ctypes.

    Raises:
        DriverNotFound: there is no libcuda.so.1.
        DriverError: ``cuInit`` failed.
    """

    name = "ctypes"

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DriverNotFound(
                f"libcuda.so.1 cannot be loaded ({error}): install the NVIDIA driver, or give the container the GPUs"
            ) from None
        self._bound: dict[str, Callable[..., tuple[int, Any]]] = {}
        self._call("cuInit", 0)

    def _symbol(self, symbol: str) -> Any:
        """A new object for the C function, so that its argument types can be set without touching another's."""
        try:
            return self._library[symbol]
        except AttributeError:
            raise DriverTooOld(f"the CUDA driver has no {symbol}: install one for CUDA 12.0 or newer") from None

    def _bind(self, function: str) -> Callable[..., tuple[int, Any]]:
        symbol, output, *inputs = _FUNCTIONS[function]
        call = self._symbol(symbol)
        if output is None:
            call.argtypes = inputs
            return lambda *args: (call(*args), None)
        last = function in _OUTPUT_LAST
        call.argtypes = [*inputs, POINTER(output)] if last else [POINTER(output), *inputs]

        def with_output(*args: Any) -> tuple[int, Any]:
            value = output()
            code = call(*args, value) if last else call(value, *args)
            return code, value.value

        return with_output

    def _invoke(self, function: str, *args: Any) -> tuple[int, Any]:
        bound = self._bound.get(function)
        if bound is None:
            bound = self._bound[function] = self._bind(function)
        return bound(*args)

    def device_name(self, device: int) -> str:
        name = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", name, len(name), device)
        return name.value.decode()

    def _encode(
        self, tensor_map: int, data_type: int, address: int, dims: Sequence[int], strides: Sequence[int],
        box: Sequence[int], element_strides: Sequence[int], interleave: int, swizzle: int, l2_promotion: int,
        oob_fill: int,
    ) -> int:  # fmt: skip
        rank = len(dims)
        longs, words = c_uint64 * rank, c_uint32 * rank
        return self._invoke(
            "cuTensorMapEncodeTiled", tensor_map, data_type, rank, address, longs(*dims), longs(*strides), words(*box),
            words(*element_strides), interleave, swizzle, l2_promotion, oob_fill,
        )[0]  # fmt: skip

    def _config(self, config: LaunchConfig, stream: int) -> CUlaunchConfig:
        attributes = []
        if tuple(config.cluster) != (1, 1, 1):
            attributes.append(CUlaunchAttribute(CLUSTER_DIMENSION, 0, tuple(config.cluster)))
        if config.pdl:
            attributes.append(CUlaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, (1,)))
        if config.cooperative:
            attributes.append(CUlaunchAttribute(COOPERATIVE, 0, (1,)))
        array = (CUlaunchAttribute * len(attributes))(*attributes)
        return CUlaunchConfig(tuple(config.grid), tuple(config.block), config.smem, stream, array, len(attributes))

    def _launcher(self, function: int, config: LaunchConfig, params: int, stream: int) -> Callable[[], None]:
        # Arguments converted once, and no argtypes to check them against at every launch.
        call, error = self._symbol("cuLaunchKernelEx"), self._error
        prepared = byref(self._config(config, stream))
        handle, pointers = c_void_p(function), c_void_p(params)

        def launch() -> None:
            code = call(prepared, handle, pointers, None)
            if code:
                raise error("cuLaunchKernelEx", code)

        return launch

    def _memset_launcher(self, address: int, byte: int, count: int, stream: int) -> Callable[[], None]:
        call, error = self._symbol("cuMemsetD8Async"), self._error
        where, value, size, queue = _address(address), c_ubyte(byte), c_size_t(count), c_void_p(stream)

        def memset() -> None:
            code = call(where, value, size, queue)
            if code:
                raise error("cuMemsetD8Async", code)

        return memset
