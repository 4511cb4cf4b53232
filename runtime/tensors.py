"""Tensor arguments of any library, as addresses with shapes; streams of any library, as handles."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from kgen.runtime.errors import ArgumentError, DeviceMismatch, DtypeMismatch
from kgen.runtime.format.dtypes import DTYPES, FROM_ARRAY_INTERFACE, FROM_DLPACK

_CUDA, _CUDA_MANAGED = 2, 13  # DLDeviceType


class Ptr(NamedTuple):
    """Device memory by address: `shape` of `dtype` (a kgen name), `strides` in elements or None (row-major)."""

    address: int
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None


class TensorRef(NamedTuple):
    """What kgen needs to know of a tensor. `owner` keeps the memory alive."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    owner: Any

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the end of the last element."""
        if 0 in self.shape:
            return 0
        last = sum((extent - 1) * abs(stride) for extent, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * DTYPES[self.dtype].bytes


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous row-major tensor."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def tensor_ref(name: str, value: Any) -> TensorRef:
    """Read a tensor argument.

    Args:
        name: the argument's name, for errors.
        value: a `Ptr` or `DeviceBuffer`; anything with ``data_ptr()``, ``shape``, ``stride()`` and ``dtype`` (torch);
            with ``__cuda_array_interface__``; or with ``__dlpack__``.

    Raises:
        ArgumentError: `value` is none of these.
        DtypeMismatch: its element type has no kgen name.
        DeviceMismatch: it does not live on a GPU.
    """
    if hasattr(value, "address"):
        shape = tuple(value.shape)
        return TensorRef(
            value.address, shape, tuple(value.strides or row_major(shape)), _known(name, value.dtype), value
        )
    if hasattr(value, "data_ptr"):
        dtype = str(value.dtype).rpartition(".")[2]
        return TensorRef(value.data_ptr(), tuple(value.shape), tuple(value.stride()), _known(name, dtype), value)
    if hasattr(value, "__cuda_array_interface__"):
        return _from_array_interface(name, value)
    if hasattr(value, "__dlpack__"):
        return _from_dlpack(name, value)
    raise ArgumentError(
        f"{name}: a {type(value).__name__} is no tensor: pass something with data_ptr(), __cuda_array_interface__ or "
        "__dlpack__, or kgen.runtime.Ptr(address, shape, dtype)"
    )


def _known(name: str, dtype: str) -> str:
    if dtype not in DTYPES:
        raise DtypeMismatch(f"{name}: dtype {dtype} is not one of kgen's: {', '.join(DTYPES)}")
    return dtype


def _from_array_interface(name: str, value: Any) -> TensorRef:
    interface = value.__cuda_array_interface__
    dtype = FROM_ARRAY_INTERFACE.get(interface["typestr"])
    if dtype is None:
        raise DtypeMismatch(
            f"{name}: array interface type {interface['typestr']!r} has no kgen name; use DLPack or Ptr"
        )
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    size = DTYPES[dtype].bytes
    elements = row_major(shape) if strides is None else tuple(stride // size for stride in strides)
    return TensorRef(interface["data"][0], shape, elements, dtype, value)


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


def _from_dlpack(name: str, value: Any) -> TensorRef:
    if value.__dlpack_device__()[0] not in (_CUDA, _CUDA_MANAGED):
        raise DeviceMismatch(f"{name}: this {type(value).__name__} does not live on a GPU: copy it there first")
    capsule = value.__dlpack__(stream=-1)  # -1: no synchronization, the caller's stream order counts
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    kind = api.PyCapsule_GetName(capsule)
    address = api.PyCapsule_GetPointer(capsule, kind)
    versioned = kind == b"dltensor_versioned"
    tensor = _Versioned.from_address(address).tensor if versioned else _DLTensor.from_address(address)
    dtype = FROM_DLPACK.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise DtypeMismatch(f"{name}: DLPack type (code {tensor.code}, {tensor.bits} bits) has no kgen name")
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else row_major(shape)
    # The capsule is kept, unconsumed: its own destructor releases the exporter's view.
    return TensorRef((tensor.data or 0) + tensor.byte_offset, shape, strides, dtype, (value, capsule))


def stream_handle(stream: Any) -> int:
    """The ``CUstream`` of an int, of anything with ``__cuda_stream__`` (cuda.core), or of a torch stream.

    Raises:
        ArgumentError: it is none of these; None is not taken for a default.
    """
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    if hasattr(stream, "cuda_stream"):
        return int(stream.cuda_stream)
    raise ArgumentError(
        f"stream: a {type(stream).__name__} is no stream: pass a CUstream as an int (0 is the legacy default stream), "
        "a torch.cuda.Stream, or something with __cuda_stream__"
    )
