"""`DeviceBuffer` on both drivers over the fake libcuda.so.1."""

from __future__ import annotations

import numpy as np
import pytest

from kgen.runtime.errors import ArgumentError, DriverError
from kgen.runtime.memory import DeviceBuffer


@pytest.mark.parametrize("dtype", ["float32", "bool", "bfloat16", "float8_e4m3fn", "float8_e8m0fnu"])
@pytest.mark.parametrize("shape", [(), (3, 5), (0, 4)])
def test_round_trip(driver, dtype, shape):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.arange(np.prod(shape)).reshape(shape).astype(getattr(ml_dtypes, dtype, None) or np.dtype(dtype))
    with DeviceBuffer.from_numpy(array, driver=driver) as buffer:
        assert (buffer.shape, buffer.dtype, buffer.device, buffer.nbytes) == (shape, dtype, 0, array.nbytes)
        assert (
            buffer.strides == tuple(stride // array.itemsize for stride in np.empty(shape, array.dtype).strides)
            or 0 in shape
        )
        assert driver.pointer_device(buffer.address) == 0
        out = buffer.to_numpy()
        assert out.dtype == array.dtype and out.shape == shape and out.tobytes() == array.tobytes()
        buffer.fill(0)
        assert buffer.to_numpy().tobytes() == bytes(array.nbytes)
    assert driver.current() == 0
    with pytest.raises(ArgumentError, match="freed"):
        buffer.to_numpy()


def test_it_takes_strided_arrays_and_refuses_unknown_dtypes(driver):
    array = np.arange(12).reshape(3, 4).T
    assert (DeviceBuffer.from_numpy(array, driver=driver).to_numpy() == array).all()
    with pytest.raises(ArgumentError, match="complex64"):
        DeviceBuffer.empty((2,), "complex64", driver=driver)


def test_it_gives_its_context_back(driver, fake):
    with DeviceBuffer.empty((4,), "int32", driver=driver):
        pass
    with pytest.raises(DriverError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        DeviceBuffer.empty((1 << 40,), "int64", driver=driver)
    assert len(fake.calls("cuDevicePrimaryCtxRetain")) == len(fake.calls("cuDevicePrimaryCtxRelease")) == 2
