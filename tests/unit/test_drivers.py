"""Both drivers do the same, here on the fake libcuda.so.1; the last test, marked gpu, on a device."""

from __future__ import annotations

import ctypes
import mmap
import struct
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
from fake import tensor_map

from kgen.runtime import drivers
from kgen.runtime.drivers import Attribute, FunctionAttribute, LaunchConfig
from kgen.runtime.errors import ArgumentError, DriverError
from kgen.runtime.memory import DeviceBuffer

CUBIN = b"\x7fELF" + bytes(60)
PTX = b".version 8.0\n.target sm_90\n"
ONE = LaunchConfig((1, 1, 1), (32, 1, 1))


@pytest.fixture
def context(driver):
    context = driver.retain(0)
    with driver.using(context):
        yield context
    driver.release(0)


@pytest.fixture
def function(driver, context):
    return driver.function(driver.kernel(driver.load_library(CUBIN), "entry"))


class Params:
    """Kernel parameters and the array of pointers to them, as the runtime will lay them out."""

    def __init__(self, *values: bytes):
        self.values = [ctypes.create_string_buffer(value, len(value)) for value in values]
        self.pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, self.values))
        self.address = ctypes.addressof(self.pointers)


def test_open_gives_one_object(driver):
    assert drivers.open(driver.name) is driver
    assert drivers.open() is drivers.open("cuda-python")
    assert isinstance(driver, drivers.Driver)


def test_versions_and_attributes(driver, fake):
    fake.configure(devices=2, driver_version=12040)
    fake.device(1, "Fake H20", sm_count=78)
    assert driver.version() == 12040
    assert driver.device_count() == 2
    assert [driver.device_name(i) for i in range(2)] == ["Fake H200", "Fake H20"]
    assert driver.attribute(1, Attribute.MULTIPROCESSOR_COUNT) == 78
    assert driver.attribute(0, 16) == 132
    assert driver.attribute(0, Attribute.COMPUTE_CAPABILITY_MAJOR) == 9
    assert driver.attribute(0, Attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN) == 232448
    with pytest.raises(DriverError, match=r"cuDeviceGetAttribute failed with CUDA_ERROR_INVALID_DEVICE \(101\)"):
        driver.attribute(2, Attribute.CLUSTER_LAUNCH)


def test_attributes_and_results_that_nobody_knows(driver, fake, context):
    with pytest.raises(DriverError, match=r"cuDeviceGetAttribute failed with CUDA_ERROR_INVALID_VALUE \(1\)"):
        driver.attribute(0, 9999)
    fake.fail("cuMemAlloc", 12345)
    with pytest.raises(DriverError, match=r"(?i)cuMemAlloc.*unknown.*12345"):
        driver.allocate(4)


def test_contexts(driver, fake):
    fake.configure(devices=2)
    first, second = driver.retain(0), driver.retain(1)
    assert driver.current() == 0
    with driver.using(first):
        with driver.using(second):
            assert driver.current() == second
        assert driver.current() == first
        with pytest.raises(KeyError), driver.using(second):
            raise KeyError
        assert driver.current() == first
    assert driver.current() == 0
    driver.set_current(second)
    assert driver.current() == second
    driver.set_current(0)
    assert driver.current() == 0
    driver.release(0)
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_CONTEXT"):
        driver.release(0)


def test_contexts_are_a_thread_s_own(driver, context):
    seen = []
    thread = threading.Thread(target=lambda: seen.append(driver.current()))
    thread.start()
    thread.join()
    assert seen == [0] and driver.current() == context


def test_a_mapped_cubin_is_not_copied(driver, fake, tmp_path):
    (tmp_path / "bundle").write_bytes(bytes(4096) + CUBIN)
    with (tmp_path / "bundle").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    view = memoryview(mapped)
    library = driver.load_library(view[4096:])
    (call,) = fake.calls("cuLibraryLoadData")
    assert call["kind"] == "elf"
    assert call["image"] == np.frombuffer(view, np.uint8).ctypes.data + 4096
    driver.unload_library(library)
    with pytest.raises(DriverError, match="cuLibraryUnload failed with CUDA_ERROR_INVALID_HANDLE"):
        driver.unload_library(library)


def test_ptx_gets_its_end(driver, fake):
    driver.load_library(memoryview(PTX + b"// what follows in the bundle")[: len(PTX)])
    assert fake.calls("cuLibraryLoadData")[0]["text_bytes"] == len(PTX)


def test_bad_image_and_missing_entry(driver, fake, context):
    with pytest.raises(
        DriverError, match=r"cuLibraryLoadData.*CUDA_ERROR_INVALID_IMAGE.*device kernel image is invalid"
    ):
        driver.load_library(b"neither")
    fake.missing("absent")
    with pytest.raises(DriverError, match="cuLibraryGetKernel failed with CUDA_ERROR_NOT_FOUND"):
        driver.kernel(driver.load_library(CUBIN), "absent")


def test_function_attributes(driver, fake, function):
    driver.set_max_dynamic_smem(function, 200_000)
    assert driver.function_attribute(function, FunctionAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES) == 200_000
    assert driver.function_attribute(function, FunctionAttribute.NUM_REGS) == 32
    with pytest.raises(DriverError, match="cuFuncSetAttribute failed with CUDA_ERROR_INVALID_VALUE"):
        driver.set_max_dynamic_smem(function, 300_000)
    config = LaunchConfig((32, 1, 1), (128, 1, 1), (16, 1, 1), 1024)
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_CLUSTER_SIZE"):
        driver.max_active_clusters(function, config)
    driver.set_nonportable_cluster(function)
    assert driver.max_active_clusters(function, config) == 132 // 16


@pytest.mark.parametrize("cluster", [(1, 1, 1), (2, 1, 1), (1, 2, 4)])
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("cooperative", [False, True])
def test_a_launch_passes_what_it_was_given(driver, fake, function, cluster, pdl, cooperative):
    fake.register("entry", [128, 8, 4])
    params = Params(bytes(range(128)), struct.pack("<Q", 0xDEAD_BEEF_0000), struct.pack("<i", -7))
    stream = driver.create_stream()
    driver.set_max_dynamic_smem(function, 65536)
    config = LaunchConfig([4, 6, 8], (128, 2, 1), list(cluster), 65536, pdl, cooperative)
    launch = driver.launcher(function, config, params.address, stream)
    fake.clear()
    launch()
    params.values[2].raw = struct.pack("<i", 9)  # read at each launch
    launch()
    first, second = fake.calls()
    assert first == {
        "call": "cuLaunchKernelEx",
        "entry": "entry",
        "device": 0,
        "grid": [4, 6, 8],
        "block": [128, 2, 1],
        "cluster": list(cluster),
        "smem": 65536,
        "pdl": pdl,
        "cooperative": cooperative,
        "stream": stream,
        "captured": False,
        "params": [bytes(range(128)), struct.pack("<Q", 0xDEAD_BEEF_0000), struct.pack("<i", -7)],
    }
    assert second["params"][2] == struct.pack("<i", 9)


def test_a_failed_launch(driver, fake, function):
    launch = driver.launcher(function, ONE, 0, 0)
    fake.fail("cuLaunchKernelEx", 719)
    with pytest.raises(DriverError) as error:
        launch()
    assert (error.value.function, error.value.code) == ("cuLaunchKernelEx", 719)
    assert type(error.value.code) is int
    assert str(error.value) == "cuLaunchKernelEx failed with CUDA_ERROR_LAUNCH_FAILED (719): unspecified launch failure"
    launch()  # only the next call was to fail
    driver.set_current(0)
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_CONTEXT"):
        launch()
    driver.set_current(driver.retain(0))
    driver.release(0)


def test_launch_sizes_that_do_not_fit(driver, function):
    for grid in ((1 << 32, 1, 1), (-1, 1, 1)):
        with pytest.raises(ArgumentError, match="32 bits"):
            driver.launcher(function, ONE._replace(grid=grid), 0, 0)
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
        driver.launcher(function, ONE._replace(grid=(0, 1, 1)), 0, 0)()


def test_one_launcher_from_two_threads(driver, fake, function, context):
    fake.register("entry", [8])
    params = Params(struct.pack("<Q", 42))
    launch = driver.launcher(function, LaunchConfig((3, 1, 1), (32, 1, 1), pdl=True), params.address, 0)
    fake.clear()
    failures = []

    def work() -> None:
        try:
            with driver.using(context):
                for _ in range(200):
                    launch()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    launches = fake.launches()
    assert not failures and len(launches) == 400
    assert all(launch == launches[0] for launch in launches) and launches[0]["params"] == [struct.pack("<Q", 42)]


def test_memory_round_trip(driver, context):
    address = driver.allocate(16)
    assert address % 256 == 0
    driver.copy_to_device(address, memoryview(bytes(range(16))))
    out = np.zeros(8, np.uint16)
    driver.copy_to_host(out, address)
    assert out.tobytes() == bytes(range(16))
    driver.memset(address + 4, 255, 4)
    driver.memset_launcher(address + 8, 0, 4, 0)()
    driver.synchronize()
    driver.copy_to_host(out, address)
    assert out.tobytes() == bytes([0, 1, 2, 3, 255, 255, 255, 255, 0, 0, 0, 0, 12, 13, 14, 15])
    driver.free(address)
    with pytest.raises(DriverError, match="cuMemFree failed with CUDA_ERROR_INVALID_VALUE"):
        driver.free(address)
    with pytest.raises(DriverError, match="cuMemsetD8Async failed with CUDA_ERROR_INVALID_VALUE"):
        driver.memset_launcher(address, 0, 4, 0)()


def test_buffers_that_cannot_be_copied(driver, context):
    address = driver.allocate(16)
    with pytest.raises(ArgumentError, match="contiguous"):
        driver.copy_to_device(address, np.zeros((4, 4), np.uint8)[:, ::2])
    with pytest.raises(ArgumentError, match="writable"):
        driver.copy_to_host(bytes(16), address)
    with pytest.raises(ArgumentError):
        driver.copy_to_device(address, 5)
    with pytest.raises(ArgumentError, match=r"0\.\.255"):
        driver.memset(address, 256, 16)


def test_pointer_device(driver, fake):
    fake.configure(devices=2)
    with driver.using(driver.retain(1)):
        address = driver.allocate(100)
    assert driver.pointer_device(address) == driver.pointer_device(address + 99) == 1
    assert driver.pointer_device(ctypes.addressof(ctypes.create_string_buffer(8))) is None
    assert driver.pointer_device(0) is None
    fake.fail("cuPointerGetAttribute", 201)
    with pytest.raises(DriverError, match="cuPointerGetAttribute"):
        driver.pointer_device(address)


def test_events_and_streams(driver, context):
    stream, start, end = driver.create_stream(), driver.create_event(), driver.create_event()
    driver.record_event(start, stream)
    driver.record_event(end, stream)
    assert 0 <= driver.elapsed_ms(start, end) < 1000
    driver.synchronize_stream(stream)
    for destroy, handle in (
        (driver.destroy_event, start),
        (driver.destroy_event, end),
        (driver.destroy_stream, stream),
    ):
        destroy(handle)


def test_a_captured_graph_runs_what_was_captured(driver, fake, function):
    fake.register("entry", [4])
    params, stream, address = Params(struct.pack("<i", 5)), driver.create_stream(), driver.allocate(4)
    launch = driver.launcher(function, ONE, params.address, stream)
    clear, ran = driver.memset_launcher(address, 1, 4, stream), []
    fake.on_launch(lambda launch: ran.append(launch["params"]))
    driver.begin_capture(stream)
    clear()
    launch()
    with pytest.raises(DriverError, match="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"):
        driver.synchronize()
    graph = driver.end_capture(stream)
    executable = driver.instantiate(graph)
    assert ran == [] and [call["captured"] for call in fake.launches()] == [True]
    driver.launch_graph(executable, stream)
    driver.launch_graph(executable, stream)
    out = bytearray(4)
    driver.copy_to_host(out, address)
    assert ran == [[struct.pack("<i", 5)]] * 2 and out == b"\1\1\1\1"
    driver.destroy_graph_exec(executable)
    driver.destroy_graph(graph)


TENSOR_MAP = {
    "data_type": 9,
    "address": 1 << 40,
    "dims": [7168, 4096],
    "strides": [14336],
    "box": [64, 128],
    "element_strides": [1, 1],
    "interleave": 0,
    "swizzle": 3,
    "l2_promotion": 2,
    "oob_fill": 0,
}


def test_tensor_map(driver, fake):
    encoded = driver.encode_tensor_map(**TENSOR_MAP)
    assert ctypes.sizeof(encoded) == 128 and ctypes.addressof(encoded) % 64 == 0
    assert tensor_map(bytes(encoded)) == TENSOR_MAP
    assert fake.calls() == [{"call": "cuTensorMapEncodeTiled", "rank": 2, **TENSOR_MAP}]
    flat = TENSOR_MAP | {"dims": [64], "strides": [], "box": [64], "element_strides": [1]}
    assert tensor_map(bytes(driver.encode_tensor_map(**flat))) == flat


@pytest.mark.parametrize(
    "wrong",
    [{"address": 8}, {"strides": [24]}, {"box": [128, 128]}, {"dims": [7168, 0]}, {"swizzle": 9}, {"data_type": 77}],
)
def test_a_refused_tensor_map_names_its_arguments(driver, wrong):
    ((key, value),) = wrong.items()
    text = hex(value) if key == "address" else str(value)
    with pytest.raises(DriverError) as error:
        driver.encode_tensor_map(**TENSOR_MAP | wrong)
    assert "cuTensorMapEncodeTiled failed with CUDA_ERROR_INVALID_VALUE" in str(error.value)
    assert f"{key}={text}" in str(error.value)


@pytest.mark.parametrize("wrong", [{"strides": []}, {"box": [64]}, {"dims": [-1, 2]}, {"address": 1 << 64}])
def test_an_impossible_tensor_map(driver, wrong):
    with pytest.raises(ArgumentError):
        driver.encode_tensor_map(**TENSOR_MAP | wrong)


def run(script: str) -> str:
    """What the script prints in a Python of its own, which has no libcuda.so.1 and no CUDA device."""
    hidden = """
        import ctypes, sys
        real = ctypes.CDLL
        def CDLL(name, *args, **kwargs):
            if name == "libcuda.so.1":
                raise OSError("libcuda.so.1: cannot open shared object file")
            return real(name, *args, **kwargs)
        ctypes.CDLL = CDLL
    """
    script = textwrap.dedent(hidden) + textwrap.dedent(script)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert not result.returncode, result.stderr
    return result.stdout


TRY = """
    from kgen.runtime import drivers, errors
    try:
        drivers.open({name!r})
    except errors.KgenError as error:
        print(type(error).__name__, error)
"""


def test_unknown_driver():
    with pytest.raises(ArgumentError, match=r"'rocm'.*'cuda-python' or 'ctypes'"):
        drivers.open("rocm")


def test_without_libcuda():
    assert run(TRY.format(name="ctypes")).startswith("DriverNotFound libcuda.so.1 cannot be loaded")


def test_cuda_python_without_libcuda():
    pytest.importorskip("cuda.bindings.driver")
    fail = """
        from cuda.bindings import driver
        def cuInit(flags):
            raise RuntimeError("Failed to dlopen libcuda.so.1")
        driver.cuInit = cuInit
    """
    assert run(textwrap.dedent(fail) + textwrap.dedent(TRY.format(name="cuda-python"))).startswith(
        "DriverNotFound libcuda.so.1 cannot be loaded"
    )


def test_without_the_binding():
    hide = "sys.modules['cuda.bindings'] = None\n"
    output = run(hide + textwrap.dedent(TRY.format(name="cuda-python")))
    assert output.startswith("DriverNotFound") and "pip install cuda-bindings" in output
    # None then chooses ctypes, whose turn it is to fail
    assert "libcuda.so.1 cannot be loaded" in run(hide + textwrap.dedent(TRY.format(name=None)))


ADD = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry add(.param .u64 x, .param .u32 n)
{
    .reg .b32 %r<6>; .reg .b64 %d<4>; .reg .pred %p;
    ld.param.u64 %d1, [x]; ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x;
    mad.lo.u32 %r2, %r2, %r3, %r4;
    mul.wide.u32 %d2, %r2, 4; add.u64 %d1, %d1, %d2;
    ld.global.u32 %r5, [%d1]; add.u32 %r5, %r5, %r1; st.global.u32 [%d1], %r5;
    ret;
}
"""


@pytest.mark.gpu
@pytest.mark.parametrize("name", drivers.NAMES)
def test_on_a_device(name):
    driver = drivers.open(name)
    assert (
        driver.version() >= 12000 and driver.attribute(0, Attribute.MULTIPROCESSOR_COUNT) > 0 and driver.device_name(0)
    )
    with DeviceBuffer.from_numpy(np.arange(1024, dtype=np.int32), driver=driver) as x, driver.using(driver.retain(0)):
        library = driver.load_library(ADD)
        function = driver.function(driver.kernel(library, "add"))
        params, stream = Params(struct.pack("<Q", x.address), struct.pack("<i", 3)), driver.create_stream()
        expected = np.arange(1024, dtype=np.int32)
        plain = LaunchConfig((8, 1, 1), (128, 1, 1))
        clusters = plain._replace(cluster=(2, 1, 1))
        for config in (
            plain,
            plain._replace(pdl=True),
            plain._replace(cooperative=True),
            clusters,
            clusters._replace(pdl=True),
        ):
            launch = driver.launcher(function, config, params.address, stream)
            launch()
            driver.begin_capture(stream)
            launch()
            graph = driver.end_capture(stream)
            executable = driver.instantiate(graph)
            driver.launch_graph(executable, stream)
            driver.synchronize_stream(stream)
            driver.destroy_graph_exec(executable)
            driver.destroy_graph(graph)
            expected += 6
            assert (x.to_numpy() == expected).all()
        assert driver.max_active_clusters(function, clusters) > 0
        assert driver.pointer_device(x.address) == 0 and driver.pointer_device(params.address) is None
        driver.set_max_dynamic_smem(function, 200_000)
        driver.set_nonportable_cluster(function)
        assert driver.function_attribute(function, FunctionAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES) == 200_000
        driver.memset_launcher(x.address, 0, x.nbytes, stream)()
        start, end = driver.create_event(), driver.create_event()
        driver.record_event(start, stream)
        launch()
        driver.record_event(end, stream)
        assert driver.elapsed_ms(start, end) >= 0
        assert (x.to_numpy() == 3).all()
        bf16 = TENSOR_MAP | {"address": x.address, "dims": [64, 8], "strides": [128], "box": [64, 8]}
        assert bytes(driver.encode_tensor_map(**bf16)) != bytes(128)
        flat = bf16 | {"dims": [64], "strides": [], "box": [64], "element_strides": [1]}
        assert bytes(driver.encode_tensor_map(**flat)) != bytes(128)
        with pytest.raises(DriverError, match=r"cuTensorMapEncodeTiled.*CUDA_ERROR_INVALID_VALUE.*address="):
            driver.encode_tensor_map(**bf16 | {"address": x.address + 8})
        with pytest.raises(DriverError, match="cuLibraryGetKernel failed with CUDA_ERROR_NOT_FOUND"):
            driver.kernel(library, "absent")
        for destroy, handle in (
            (driver.destroy_event, start),
            (driver.destroy_event, end),
            (driver.destroy_stream, stream),
        ):
            destroy(handle)
        driver.unload_library(library)
    driver.release(0)
