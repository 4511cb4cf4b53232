"""`DeviceBuffer`: allocate, copy and free device memory in a script that has no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING

from kgen.runtime import drivers
from kgen.runtime.errors import ArgumentError
from kgen.runtime.format.dtypes import DTYPES
from kgen.runtime.tensors import row_major

if TYPE_CHECKING:
    import numpy as np

    from kgen.runtime.drivers import Driver


class DeviceBuffer:
    """A row-major tensor in device memory that this object owns. Use it in a ``with``, or call `free`.

    Its copies and fills are complete when they return, for every stream. It keeps the device's primary context alive.

    Attributes:
        address: of its first byte, a multiple of 256.
        shape, strides: in elements.
        dtype: kgen's name, such as ``bfloat16``.
        device: the device's ordinal.
        nbytes: its size in bytes.
    """

    def __init__(self, shape: Sequence[int], dtype: str, device: int = 0, driver: Driver | None = None) -> None:
        self.address = 0  # first, for free() after a failure below
        if dtype not in DTYPES:
            raise ArgumentError(f"no dtype is named {dtype!r}: choose one of {', '.join(DTYPES)}")
        if any(extent < 0 for extent in shape):
            raise ArgumentError(f"shape {tuple(shape)} has a negative extent")
        self.shape, self.dtype, self.device = tuple(shape), dtype, device
        self.strides = row_major(self.shape)
        self.nbytes = math.prod(self.shape) * DTYPES[dtype].bytes
        self._driver = driver or drivers.open()
        self._context = self._driver.retain(device)
        try:
            with self._driver.using(self._context):
                self.address = self._driver.allocate(max(self.nbytes, 1))
        except BaseException:
            self._driver.release(device)
            raise

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: str, device: int = 0, driver: Driver | None = None) -> DeviceBuffer:
        """A buffer with any content.

        Args:
            driver: None for `drivers.open`'s choice.

        Raises:
            ArgumentError: unknown dtype or negative extent.
            DriverError: such as CUDA_ERROR_OUT_OF_MEMORY, or no such device.
        """
        return cls(shape, dtype, device, driver)

    @classmethod
    def from_numpy(cls, array: np.ndarray, device: int = 0, driver: Driver | None = None) -> DeviceBuffer:
        """A copy of `array`; ml_dtypes' bfloat16 and float8 types are known by their names. Raises as `empty` does."""
        import numpy as np

        buffer = cls(array.shape, array.dtype.name, device, driver)
        with buffer._use():
            if buffer.nbytes:
                buffer._driver.copy_to_device(buffer.address, np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            buffer._driver.synchronize()  # until here the copy may be on its way for streams other than the default one
        return buffer

    def to_numpy(self) -> np.ndarray:
        """A copy in host memory, once all the device's work is done; bfloat16 and float8 as ml_dtypes' types."""
        import numpy as np

        try:
            dtype = np.dtype(self.dtype)
        except TypeError:
            import ml_dtypes

            dtype = np.dtype(getattr(ml_dtypes, self.dtype))
        data = np.empty(self.nbytes, np.uint8)
        with self._use():
            self._driver.synchronize()
            if self.nbytes:
                self._driver.copy_to_host(data, self.address)
        return data.view(dtype).reshape(self.shape)

    def fill(self, byte: int) -> None:
        """Set every byte to `byte`, 0..255."""
        with self._use():
            self._driver.memset(self.address, byte, self.nbytes)
            self._driver.synchronize()

    def free(self) -> None:
        """Give the memory back; safe to call again."""
        if self.address:
            address, self.address = self.address, 0
            try:
                with self._driver.using(self._context):
                    self._driver.free(address)
            finally:
                self._driver.release(self.device)

    def _use(self) -> AbstractContextManager[None]:
        if not self.address:
            raise ArgumentError("this DeviceBuffer has been freed")
        return self._driver.using(self._context)

    def __enter__(self) -> DeviceBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def __del__(self) -> None:
        with suppress(Exception):  # at interpreter exit the driver may be gone
            self.free()

    def __repr__(self) -> str:
        return f"DeviceBuffer({self.shape}, {self.dtype}, device={self.device}, address={self.address:#x})"
