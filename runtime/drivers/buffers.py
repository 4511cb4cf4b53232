"""Addresses of host memory, through CPython's buffer protocol."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kgen.runtime.errors import ArgumentError


class _PyBuffer(ctypes.Structure):
    """``Py_buffer`` of CPython's stable ABI."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes, _release_buffer.restype = (ctypes.POINTER(_PyBuffer),), None


@contextmanager
def buffer_address(buffer: Any, writable: bool = False) -> Iterator[tuple[int, int]]:
    """Address and size in bytes of a buffer's memory, which stays put inside the ``with``.

    ctypes' own ``from_buffer`` refuses read-only memory, such as a bundle's memory map.
    """
    view = _PyBuffer()
    try:
        _get_buffer(buffer, view, int(writable))  # PyBUF_SIMPLE (0) or PyBUF_WRITABLE (1): contiguous in both
    except (BufferError, TypeError, ValueError) as error:
        raise ArgumentError(f"{'writable ' * writable}contiguous memory is needed: {error}") from None
    try:
        yield view.buf or 0, view.len
    finally:
        _release_buffer(view)
