"""The driver through ``cuda.bindings.driver`` of the package cuda-bindings (a part of cuda-python)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from kgen.runtime.drivers.common import (
    CLUSTER_DIMENSION,
    COOPERATIVE,
    INVALID_VALUE,
    PROGRAMMATIC_STREAM_SERIALIZATION,
    Driver,
    LaunchConfig,
)
from kgen.runtime.errors import DriverError, DriverNotFound, DriverTooOld

try:
    from cuda.bindings import driver as cuda
except ImportError as error:
    raise DriverNotFound(
        f"cuda.bindings cannot be imported ({error}): reinstall cuda-bindings, or use the driver 'ctypes'"
    ) from error

# Where a function takes an enumerator: the argument's place and its type.
_ENUMS = {
    "cuGetErrorName": (0, cuda.CUresult),
    "cuGetErrorString": (0, cuda.CUresult),
    "cuDeviceGetAttribute": (0, cuda.CUdevice_attribute),
    "cuFuncSetAttribute": (1, cuda.CUfunction_attribute),
    "cuFuncGetAttribute": (0, cuda.CUfunction_attribute),
    "cuStreamBeginCapture": (1, cuda.CUstreamCaptureMode),
}


class CudaPythonDriver(Driver):
    """`Driver` over cuda-python.

    Raises:
        DriverNotFound: there is no libcuda.so.1.
        DriverError: ``cuInit`` failed.
    """

    name = "cuda-python"

    def __init__(self) -> None:
        try:
            code = int(cuda.cuInit(0)[0])
        except RuntimeError as error:  # from the binding's own search for the library
            raise DriverNotFound(
                f"libcuda.so.1 cannot be loaded ({error}): install the NVIDIA driver, or give the container the GPUs"
            ) from None
        if code:
            raise self._error("cuInit", code)
        word, pointer = ctypes.c_int, ctypes.c_void_p
        self._tensor_map_encode = self._native(
            "cuTensorMapEncodeTiled", pointer, word, ctypes.c_uint32, *[pointer] * 5, word, word, word, word
        )
        self._pointer_attribute = self._native("cuPointerGetAttribute", pointer, word, ctypes.c_uint64)

    def _native(self, function: str, *argtypes: Any) -> Callable[..., int]:
        """The driver's own function, where the binding's does not serve."""
        code, address, _ = cuda.cuGetProcAddress(function.encode(), 12000, 0)
        if code or not int(address):
            raise DriverTooOld(f"the driver has no {function}: install a CUDA driver for CUDA 12.0 or newer")
        return ctypes.CFUNCTYPE(ctypes.c_int, *argtypes)(int(address))

    def _invoke(self, function: str, *args: Any) -> tuple[int, Any]:
        if function == "cuPointerGetAttribute":
            # cuda-bindings 13.3 answers 0 for the device ordinal of every pointer.
            value = ctypes.c_int()
            return self._pointer_attribute(ctypes.addressof(value), *args), value.value
        if function in _ENUMS:
            place, enum = _ENUMS[function]
            try:
                args = (*args[:place], enum(args[place]), *args[place + 1 :])
            except ValueError:  # the binding has no such enumerator: what the driver itself would say
                return INVALID_VALUE, None
        try:
            code, *values = getattr(cuda, function)(*args)
        except RuntimeError as error:  # the binding did not find the function in the library
            raise DriverTooOld(f"{error}: install a CUDA driver for CUDA 12.0 or newer") from None
        except ValueError as error:  # a result that this version of the binding does not know
            raise DriverError(function, 999, "CUDA_ERROR_UNKNOWN", f"{error}: upgrade cuda-bindings") from None
        return code, values[0] if values else None

    def device_name(self, device: int) -> str:
        return self._call("cuDeviceGetName", 256, device).partition(b"\0")[0].decode()

    def _encode(
        self, tensor_map: int, data_type: int, address: int, dims: Sequence[int], strides: Sequence[int],
        box: Sequence[int], element_strides: Sequence[int], interleave: int, swizzle: int, l2_promotion: int,
        oob_fill: int,
    ) -> int:  # fmt: skip
        # cuda-python encodes into memory of its own, which need not be aligned to 64 bytes as the driver asks.
        rank = len(dims)
        longs, words = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
        return self._tensor_map_encode(
            tensor_map, data_type, rank, address, longs(*dims), longs(*strides), words(*box),
            words(*element_strides), interleave, swizzle, l2_promotion, oob_fill,
        )  # fmt: skip

    def _config(self, wanted: LaunchConfig, stream: int) -> cuda.CUlaunchConfig:
        config = cuda.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = wanted.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = wanted.block
        config.sharedMemBytes, config.hStream = wanted.smem, stream
        attributes = []
        if tuple(wanted.cluster) != (1, 1, 1):
            attribute = cuda.CUlaunchAttribute()
            attribute.id = cuda.CUlaunchAttributeID(CLUSTER_DIMENSION)
            dim = attribute.value.clusterDim
            dim.x, dim.y, dim.z = wanted.cluster
            attributes.append(attribute)
        if wanted.pdl:
            attribute = cuda.CUlaunchAttribute()
            attribute.id = cuda.CUlaunchAttributeID(PROGRAMMATIC_STREAM_SERIALIZATION)
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if wanted.cooperative:
            attribute = cuda.CUlaunchAttribute()
            attribute.id = cuda.CUlaunchAttributeID(COOPERATIVE)
            attribute.value.cooperative = 1
            attributes.append(attribute)
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config

    def _launcher(self, function: int, config: LaunchConfig, params: int, stream: int) -> Callable[[], None]:
        # With an int for the parameters, cuda-python packs nothing: it passes the address on.
        call, error = cuda.cuLaunchKernelEx, self._error
        prepared, handle = self._config(config, stream), cuda.CUfunction(function)

        def launch() -> None:
            (code,) = call(prepared, handle, params, 0)
            if code:
                raise error("cuLaunchKernelEx", code)

        return launch

    def _memset_launcher(self, address: int, byte: int, count: int, stream: int) -> Callable[[], None]:
        call, error = cuda.cuMemsetD8Async, self._error
        where, queue = cuda.CUdeviceptr(address), cuda.CUstream(stream)

        def memset() -> None:
            (code,) = call(where, byte, count, queue)
            if code:
                raise error("cuMemsetD8Async", code)

        return memset
