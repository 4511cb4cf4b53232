"""Open, check, load, plan, bind, call, on a fake driver: what is launched, and every way to be refused before it."""

from __future__ import annotations

import json
import os
import sys
import threading

import bundles
import numpy as np
import pytest

from kgen.runtime import Bundle, DeviceBuffer, Ptr, errors
from kgen.runtime.format import manifest as m


@pytest.fixture(params=["file", "directory"])
def path(request, tmp_path):
    return bundles.write(tmp_path / ("handmade.kgen" if request.param == "file" else "handmade"))


@pytest.fixture
def kernels(tmp_path, fake, driver):
    with Bundle.open(bundles.write(tmp_path / "handmade.kgen")).load(0, driver=driver) as loaded:
        yield loaded


@pytest.fixture
def buffers(driver, kernels):
    """Tensors for scale at m = 8, its workspace, and helpers to make more."""
    made = {
        "x": DeviceBuffer.from_numpy(np.arange(64, dtype=np.float32).reshape(8, 8), driver=driver),
        "out": DeviceBuffer.empty((8, 8), "float32", driver=driver),
        "workspace": DeviceBuffer.empty((4096,), "uint8", driver=driver),
    }
    yield made
    for buffer in made.values():
        buffer.free()


def test_open_names_and_verifies(path):
    bundle = Bundle.open(path)
    assert bundle.id.startswith("sha256:") and Bundle.open(path, expect=bundle.id).manifest == bundle.manifest
    assert bundle.manifest == bundles.manifest_and_files()[0]
    assert bundle.evidence("sources/scale.cu") == b"// source" and bundle.evidence("sources/none.cu") is None
    with pytest.raises(errors.IntegrityError, match="not the expected sha256:00"):
        Bundle.open(path, expect="sha256:00")


def test_a_folder_that_is_no_bundle_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "reading this would never end")
    with pytest.raises(errors.FormatError, match=r"no manifest\.json"):
        Bundle.open(tmp_path)


def test_both_forms_have_one_id(tmp_path):
    ids = {Bundle.open(bundles.write(tmp_path / name)).id for name in ("a.kgen", "a")}
    assert len(ids) == 1


def test_a_flipped_byte_anywhere_is_noticed(tmp_path):
    path = bundles.write(tmp_path / "b")
    files = [file for file in path.rglob("*") if file.is_file()]
    assert len(files) == 5
    for file in files:
        data = file.read_bytes()
        for at in range(0, len(data), max(1, len(data) // 60)):
            file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            with pytest.raises(errors.IntegrityError):
                Bundle.open(path)
        file.write_bytes(data)
    Bundle.open(path)
    (path / "blobs" / "stray").write_bytes(b"x")
    with pytest.raises(errors.FormatError, match="not in the manifest"):
        Bundle.open(path)
    for file in files:
        if "evidence" not in file.parts and file.parent.name == "blobs":
            file.unlink()
    (path / "blobs" / "stray").unlink()
    with pytest.raises(errors.IntegrityError, match="is missing"):
        Bundle.open(path)


def test_check_lists_every_reason_and_loads_nothing(path, fake, driver):
    bundle = Bundle.open(path)
    assert bundle.check(0, driver=driver) == []
    fake.configure(devices=2, driver_version=12080)
    fake.device(1, major=10, minor=0)
    fake.device(0, smem_optin=99_000, cluster=0)
    assert [type(r) for r in bundle.check(0, driver=driver)] == [errors.DriverTooOld, *[errors.DeviceLimit] * 2]
    reasons = bundle.check(1, driver=driver)
    assert [type(r) for r in reasons] == [errors.DriverTooOld, errors.ArchMismatch]
    assert "13.0" in str(reasons[0]) and "12.8" in str(reasons[0]) and "sm_100" in str(reasons[1])
    assert not fake.calls("cuDevicePrimaryCtxRetain", "cuLibraryLoadData")
    with pytest.raises(errors.DriverTooOld):
        bundle.load(0, driver=driver)


def test_loading(path, fake, driver):
    with Bundle.open(path).load(0, driver=driver) as kernels:
        assert list(kernels) == ["product", "scale"] and kernels.scale is kernels["scale"]
        assert len(fake.calls("cuLibraryLoadData")) == 1, "equal code is loaded once"
        assert len(fake.calls("cuKernelGetFunction")) == 3, "eager: every kernel is resident"
        assert len(fake.calls("cuFuncSetAttribute")) == 1, "only one kernel asks for more than 48 KiB"
        with pytest.raises(KeyError, match="no operator 'absent'; it has product, scale"):
            kernels["absent"]
        with pytest.raises(AttributeError, match="absent"):
            kernels.absent  # noqa: B018
    assert len(fake.calls("cuLibraryUnload")) == 1 and len(fake.calls("cuDevicePrimaryCtxRelease")) == 1
    fake.clear()
    with Bundle.open(path).load(0, driver=driver, lazy=True) as kernels:
        assert not fake.calls("cuLibraryLoadData")
        kernels.scale.plan(m=3)
        assert len(fake.calls("cuKernelGetFunction")) == 1


def test_a_refused_load_releases_what_it_took(path, fake, driver):
    fake.missing("product")
    with pytest.raises(errors.DriverError, match="cuLibraryGetKernel"):
        Bundle.open(path).load(0, driver=driver)
    assert len(fake.calls("cuLibraryUnload")) == len(fake.calls("cuDevicePrimaryCtxRelease")) == 1


def test_ptx_only_when_asked_for(tmp_path, fake, driver):
    built, _ = bundles.manifest_and_files()
    plain = {id: k._replace(target="sm_90") for id, k in built.kernels.items()}
    variants = {
        n: o._replace(variants=tuple(v._replace(target="sm_90") for v in o.variants))
        for n, o in built.operators.items()
    }
    path = bundles.write(tmp_path / "p.kgen", built._replace(targets=("sm_90",), kernels=plain, operators=variants))
    fake.device(0, major=10)
    bundle = Bundle.open(path)
    with pytest.raises(errors.ArchMismatch):
        bundle.load(0, driver=driver)
    with bundle.load(0, driver=driver, allow_ptx=True) as kernels:
        assert kernels.scale.plan(m=1).workspace_bytes == 512


def test_plans(kernels):
    plan = kernels.scale.plan(m=64)
    assert plan.workspace_bytes == 256 + 256 and plan.selection.index == 0
    assert "→ variant 0 [form=small] runs: m <= 64" in plan.explain() and "not reached" in plan.explain()
    assert "refused: m <= 64 is false" in kernels.scale.plan(m=65).explain()
    for dims, words in (
        ({"m": 1025}, "m=1025 is outside the declared 1..1024"),
        ({"m": 0}, "outside"),
        ({}, "dim m is missing"),
        ({"m": 1, "q": 2}, "has no dim 'q'"),
        ({"m": 1, "k": 9}, "k=9 is outside the declared 8"),
        ({"m": 1.5}, "not an integer"),
    ):
        with pytest.raises(errors.UnsupportedShape, match=words):
            kernels.scale.plan(**dims)


def test_a_call_launches_what_the_manifest_says(kernels, buffers, fake, driver):
    for entry in ("scale_small", "scale_large"):
        fake.register(entry, [8, 8, 8, 8, 4, 4])
    call = kernels.scale.plan(m=8).bind(**buffers)
    with driver.using(kernels.context):
        stream = driver.create_stream()
        fake.clear()
        call(stream)
        call(stream)
        memset, launch, *again = fake.calls()
    base = buffers["workspace"].address
    assert memset["call"] == "cuMemsetD8Async" and (memset["address"], memset["bytes"]) == (base + 256, 32)
    assert (launch["entry"], launch["grid"], launch["block"], launch["stream"]) == (
        "scale_small",
        [8, 1, 1],
        [128, 1, 1],
        stream,
    )
    expected = [buffers["x"].address, buffers["out"].address, base + 256, base, 8, 132]
    assert [bundles.word(p) for p in launch["params"]] == expected
    assert again == [memset, launch], "a second call enqueues the same and nothing else"


def test_locks_are_zeroed_once_at_bind(kernels, buffers, driver):
    buffers["workspace"].fill(0xFF)
    kernels.scale.plan(m=8).bind(**buffers)
    content = buffers["workspace"].to_numpy()
    assert not content[:256].any() and (content[256:] == 0xFF).all()


def test_tensor_maps_clusters_and_grids(kernels, fake, driver):
    from fake import tensor_map

    fake.register("product", [128, 8, 8])
    a, out = (DeviceBuffer.empty((100, 64), "bfloat16", driver=driver) for _ in range(2))
    with driver.using(kernels.context):
        kernels.product.plan(m=100).bind(a=a, out=out)(driver.create_stream())
    (launch,) = fake.launches()
    assert (launch["grid"], launch["cluster"]) == ([132, 1, 1], [2, 1, 1])
    encoded = tensor_map(launch["params"][0])
    assert (encoded["address"], encoded["dims"], encoded["strides"]) == (a.address, [64, 100], [128])
    assert bundles.word(launch["params"][2]) == 200


def test_graph_capture_sees_only_launches(kernels, buffers, fake, driver):
    call = kernels.scale.plan(m=100).bind(
        x=DeviceBuffer.empty((100, 8), "float32", driver=driver),
        out=DeviceBuffer.empty((100, 8), "float32", driver=driver),
        workspace=buffers["workspace"],
    )
    with driver.using(kernels.context):
        stream = driver.create_stream()
        driver.begin_capture(stream)
        fake.clear()
        call(stream)
        assert {c["call"] for c in fake.calls()} == {"cuMemsetD8Async", "cuLaunchKernelEx"}
        assert all(c["captured"] for c in fake.launches())
        assert fake.launches()[0]["pdl"] and fake.launches()[0]["cooperative"]
        driver.instantiate(driver.end_capture(stream))


def test_the_one_liner_binds_once_per_addresses(kernels, buffers, fake, driver):
    with driver.using(kernels.context):
        stream = driver.create_stream()
        kernels.scale(**buffers, stream=stream)
        bound = len(kernels.scale._calls)
        kernels.scale(**buffers, stream=stream)
    assert bound == len(kernels.scale._calls) == 1 and len(fake.launches()) == 2
    with pytest.raises(errors.DtypeMismatch):
        kernels.scale(**buffers | {"out": buffers["workspace"]}, stream=stream)


class Strided:
    """A torch-like tensor."""

    def __init__(self, buffer, dtype="torch.float32", shape=None, strides=None, offset=0):
        self._buffer, self.dtype, self.shape = buffer, dtype, shape or buffer.shape
        self._strides, self._offset = strides or buffer.strides, offset

    def data_ptr(self):
        return self._buffer.address + self._offset

    def stride(self):
        return self._strides


def test_every_kind_of_tensor_is_understood(kernels, buffers, fake, driver):
    x = buffers["x"]
    interface = {"data": (x.address, False), "shape": (8, 8), "typestr": "<f4", "version": 3}
    array = type("ArrayInterface", (), {"__cuda_array_interface__": interface})()
    for value in (x, Strided(x), array, Ptr(x.address, (8, 8), "float32")):
        kernels.scale.plan(m=8).bind(**buffers | {"x": value})


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda b: {"x": Ptr(b["x"].address, (8, 8), "int32")}, errors.DtypeMismatch, "x has dtype int32; it must be"),
        (lambda b: {"x": Strided(b["x"], "torch.complex64")}, errors.DtypeMismatch, "complex64 is not one of kgen's"),
        (lambda b: {"x": Ptr(b["x"].address, (4, 8), "float32")}, errors.ShapeMismatch, r"\[4, 8\].*must be \[8, 8\]"),
        (lambda b: {"x": Strided(b["x"], strides=(1, 8))}, errors.StrideMismatch, r"\[1, 8\].*make it contiguous"),
        (lambda b: {"x": Strided(b["x"], offset=4)}, errors.Misaligned, "aligned to 16 bytes"),
        (lambda b: {"x": Ptr(4096, (8, 8), "float32")}, errors.DeviceMismatch, "is not device memory"),
        (lambda b: {"x": np.zeros((8, 8), np.float32)}, errors.DeviceMismatch, "does not live on a GPU"),
        (lambda b: {"x": 5}, errors.ArgumentError, "a int is no tensor"),
        (lambda b: {"out": b["x"]}, errors.Overlap, "share memory"),
        (lambda b: {"workspace": b["out"]}, errors.WorkspaceTooSmall, "has 256 bytes; this plan needs 512"),
        (lambda b: {"workspace": None}, errors.WorkspaceTooSmall, "none was given"),
        (lambda b: {"workspace": Ptr(b["workspace"].address + 16, (2048,), "uint8")}, errors.Misaligned, "256 bytes"),
        (lambda b: {"y": b["x"]}, errors.ArgumentError, "has no tensor 'y'; its tensors: x, out"),
    ],
)  # fmt: skip
def test_every_wrong_argument_is_refused_before_a_launch(kernels, buffers, fake, change, error, words):
    fake.clear()
    with pytest.raises(error, match=words) as caught:
        kernels.scale.plan(m=8).bind(**buffers | change(buffers))
    assert (type(caught.value) is error and str(caught.value).startswith("scale: ")) or error is errors.ArgumentError
    assert not fake.launches()


def test_a_missing_tensor(kernels, buffers):
    with pytest.raises(errors.ArgumentError, match="tensor 'out' is missing"):
        kernels.scale.plan(m=8).bind(x=buffers["x"], workspace=buffers["workspace"])


def test_the_wrong_device(tmp_path, fake, driver):
    fake.configure(devices=2)
    with Bundle.open(bundles.write(tmp_path / "b.kgen")).load(1, driver=driver) as kernels:
        far, near = (
            DeviceBuffer.empty((9, 64), "bfloat16", 0, driver),
            DeviceBuffer.empty((9, 64), "bfloat16", 1, driver),
        )
        with pytest.raises(errors.DeviceMismatch, match="a lives on device 0; the kernels were loaded on device 1"):
            kernels.product.plan(m=9).bind(a=far, out=near)
        far.free(), near.free()


@pytest.mark.parametrize("stream", [None, "0", object()])
def test_a_stream_is_never_guessed(kernels, buffers, stream):
    with pytest.raises(errors.ArgumentError, match="is no stream"):
        kernels.scale.plan(m=8).bind(**buffers)(stream)


def test_streams_of_other_libraries(kernels, buffers, fake, driver):
    with driver.using(kernels.context):
        handle = driver.create_stream()
        call = kernels.scale.plan(m=8).bind(**buffers)
        call(type("Core", (), {"__cuda_stream__": lambda self: (0, handle)})())
        call(type("Torch", (), {"cuda_stream": handle})())
    assert [launch["stream"] for launch in fake.launches()] == [handle, handle]


def test_a_failing_launch_names_the_driver_call(kernels, buffers, fake, driver):
    call = kernels.scale.plan(m=8).bind(**buffers)
    with driver.using(kernels.context):
        stream = driver.create_stream()
        for name in ("cuLaunchKernel", "cuLaunchKernelEx"):
            fake.fail(name, 719)
        with pytest.raises(errors.DriverError, match="CUDA_ERROR_LAUNCH_FAILED"):
            call(stream)


def test_threads_and_contexts(kernels, buffers, driver):
    """Loading activates the context in a thread that has none; stream 0 of another thread needs it activated there."""
    assert driver.current() == kernels.context
    call = kernels.scale.plan(m=8).bind(**buffers)
    found = []

    def other():
        try:
            call(0)
        except errors.DriverError as error:
            found.append(str(error))
        kernels.activate()
        call(0)
        found.append("launched")

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert "call activate()" in found[0] and found[1] == "launched"
    kernels.close()
    assert driver.current() == 0


def test_nothing_is_bound_after_close(kernels, buffers):
    plan = kernels.scale.plan(m=8)
    kernels.scale(**buffers, stream=0)
    kernels.close()
    for again in (
        lambda: plan.bind(**buffers),
        lambda: kernels.scale.plan(m=8),
        lambda: kernels.scale(**buffers, stream=0),
    ):
        with pytest.raises(errors.ArgumentError, match="was closed"):
            again()


def test_manifest_round_trip():
    from kgen.runtime.format import canonical, parse

    built, _ = bundles.manifest_and_files()
    data = canonical.dumps(m.to_json(built))
    assert parse.parse(data) == built and json.loads(data)["format"] == [1, 0]
    assert sys.getsizeof(data) < 20_000
