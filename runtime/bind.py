"""Checking a call's tensors against the contract, and turning a program into prepared launches."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

from kgen.runtime.drivers import Driver, LaunchConfig
from kgen.runtime.errors import (
    ArgumentError,
    DeviceMismatch,
    DtypeMismatch,
    Misaligned,
    Overlap,
    ShapeMismatch,
    StrideMismatch,
    WorkspaceTooSmall,
)
from kgen.runtime.format.expr import evaluate
from kgen.runtime.format.manifest import WORKSPACE_ALIGN, Arg, Kernel, Launch, Memset, Tensor
from kgen.runtime.plan import Selection
from kgen.runtime.tensors import TensorRef, stream_handle, tensor_ref

MAX_STREAMS = 64  # prepared launches kept a call; a server uses a handful
_SCALARS = {"int32": ctypes.c_int32, "int64": ctypes.c_int64}


class Call:
    """A bound call. ``call(stream)`` only launches: no allocation, no synchronization, safe in graph capture.

    The tensors and the workspace are kept alive as long as the call. Calling from several threads is safe.
    """

    __slots__ = ("_keep", "_prepare", "_prepared")

    def __init__(self, prepare: Callable[[int], tuple[Callable[[], None], ...]], keep: Any):
        self._prepare, self._keep = prepare, keep
        self._prepared: dict[Any, tuple[Callable[[], None], ...]] = {}

    def forget_tensors(self) -> None:
        """Leave the tensors' lifetime to the caller."""
        self._keep = None

    def __call__(self, stream: Any) -> None:
        """Enqueue the program on `stream` (see `tensors.stream_handle`).

        Raises:
            ArgumentError: `stream` is no stream.
            DriverError: the driver refused a launch.
        """
        handle = stream if type(stream) is int else stream_handle(stream)
        launches = self._prepared.get(handle)
        if launches is None:
            if len(self._prepared) >= MAX_STREAMS:
                self._prepared.clear()
            launches = self._prepared[handle] = self._prepare(handle)
        for launch in launches:
            launch()


def bind(
    selection: Selection,
    functions: Mapping[str, tuple[Kernel, int]],
    driver: Driver,
    device: int,
    tensors: Mapping[str, Any],
    workspace: Any,
) -> Call:
    """Check the arguments of a selected program and prepare its launches.

    Args:
        functions: kernel id -> (kernel, CUfunction).
        tensors: name -> tensor.
        workspace: device memory of at least ``selection.workspace_bytes``, or None where that is 0.

    Raises:
        ArgumentError: and its subclasses, one a cause, before anything is launched.
    """
    name = selection.operator.name
    wanted = {tensor.name: tensor for tensor in selection.operator.tensors}
    for extra in tensors.keys() - wanted.keys():
        raise ArgumentError(f"{name} has no tensor {extra!r}; its tensors: {', '.join(wanted)}")
    for missing in wanted.keys() - tensors.keys():
        raise ArgumentError(f"{name}: tensor {missing!r} is missing; its tensors: {', '.join(wanted)}")
    refs = {key: tensor_ref(f"{name}: {key}", tensors[key]) for key in wanted}
    for key, tensor in wanted.items():
        _check_tensor(name, tensor, refs[key], selection.symbols)
        _check_device(f"{name}: {key}", refs[key], driver, device)
    spans = {key: (ref.address, ref.address + ref.nbytes) for key, ref in refs.items()}
    buffers = {key: ref.address for key, ref in refs.items()}
    if selection.variant.program.workspace:
        base = _check_workspace(name, selection, workspace, driver, device)
        spans["workspace"] = (base, base + selection.workspace_bytes)
        for part in selection.variant.program.workspace:
            buffers[part.name] = base + evaluate(part.offset, selection.symbols)
            if part.kind == "locks":
                driver.memset(buffers[part.name], 0, evaluate(part.bytes, selection.symbols))
    written = {key for key, tensor in wanted.items() if tensor.role != "in"} | {"workspace"}
    _check_overlap(name, spans, written)
    steps = [
        _prepare_step(step, selection.symbols, buffers, functions, driver) for step in selection.variant.program.steps
    ]
    return Call(lambda stream: tuple(prepare(stream) for prepare in steps if prepare), (refs, workspace))


def _check_tensor(name: str, tensor: Tensor, ref: TensorRef, symbols: Mapping[str, int]) -> None:
    where = f"{name}: {tensor.name}"
    if ref.dtype != tensor.dtype:
        raise DtypeMismatch(f"{where} has dtype {ref.dtype}; it must be {tensor.dtype}")
    shape = tuple(evaluate(extent, symbols) for extent in tensor.shape)
    if ref.shape != shape:
        raise ShapeMismatch(f"{where} has shape {list(ref.shape)}; at these dims it must be {list(shape)}")
    strides = tuple(evaluate(stride, symbols) for stride in tensor.strides)
    if any(extent > 1 and got != stride for extent, got, stride in zip(shape, ref.strides, strides, strict=True)):
        raise StrideMismatch(
            f"{where} has strides {list(ref.strides)}; it must have {list(strides)} (elements): make it contiguous"
        )
    if ref.address % tensor.align:
        raise Misaligned(f"{where} starts at {ref.address:#x}; it must be aligned to {tensor.align} bytes")


def _check_device(where: str, ref: TensorRef, driver: Driver, device: int) -> None:
    if ref.nbytes == 0:
        return
    owner = driver.pointer_device(ref.address)
    if owner != device:
        lives = "is not device memory" if owner is None else f"lives on device {owner}"
        raise DeviceMismatch(f"{where} {lives}; the kernels were loaded on device {device}")


def _check_workspace(name: str, selection: Selection, workspace: Any, driver: Driver, device: int) -> int:
    need = selection.workspace_bytes
    if workspace is None:
        raise WorkspaceTooSmall(f"{name}: this plan needs a workspace of {need} bytes; none was given")
    ref = tensor_ref(f"{name}: workspace", workspace)
    if ref.nbytes < need:
        raise WorkspaceTooSmall(f"{name}: the workspace has {ref.nbytes} bytes; this plan needs {need}")
    if ref.address % WORKSPACE_ALIGN:
        raise Misaligned(f"{name}: workspace starts at {ref.address:#x}; it must be aligned to {WORKSPACE_ALIGN} bytes")
    _check_device(f"{name}: workspace", ref, driver, device)
    return ref.address


def _check_overlap(name: str, spans: Mapping[str, tuple[int, int]], written: set[str]) -> None:
    ordered = sorted((start, end, key) for key, (start, end) in spans.items() if end > start)
    for i, (_, end, key) in enumerate(ordered):
        for start, _, other in ordered[i + 1 :]:
            if start >= end:
                break
            if key in written or other in written:
                raise Overlap(f"{name}: {key} and {other} share memory, and one of them is written")


def _prepare_step(
    step: Launch | Memset,
    symbols: Mapping[str, int],
    buffers: Mapping[str, int],
    functions: Mapping[str, tuple[Kernel, int]],
    driver: Driver,
) -> Callable[[int], Callable[[], None]] | None:
    """What prepares the step for a stream, or None where there is nothing to do at these dims."""
    if isinstance(step, Memset):
        count = evaluate(step.bytes, symbols)
        address = buffers[step.buffer]
        return (lambda stream: driver.memset_launcher(address, step.byte, count, stream)) if count else None
    grid = tuple(evaluate(extent, symbols) for extent in step.grid)
    if 0 in grid:
        return None
    kernel, function = functions[step.kernel]
    config = LaunchConfig(grid, kernel.block, kernel.cluster, kernel.dynamic_smem, kernel.pdl, kernel.cooperative)
    params = Params(
        [_argument(arg, kind, symbols, buffers, driver) for arg, kind in zip(step.args, kernel.params, strict=True)]
    )
    return lambda stream: driver.launcher(function, config, params.address, stream)


class Params:
    """The array of pointers to arguments that a launch takes; packed offsets differ between architectures."""

    def __init__(self, values: list[Any]):
        self._values = values
        self._array = (ctypes.c_void_p * max(len(values), 1))(*(ctypes.addressof(value) for value in values))
        self.address = ctypes.addressof(self._array)


def _argument(arg: Arg, kind: str, symbols: Mapping[str, int], buffers: Mapping[str, int], driver: Driver) -> Any:
    if arg.pointer is not None:
        return ctypes.c_uint64(buffers[arg.pointer])
    if arg.value is not None:
        return _SCALARS[kind](evaluate(arg.value, symbols))
    map = arg.tensor_map
    return driver.encode_tensor_map(
        data_type=map.data_type,
        address=buffers[map.tensor],
        dims=[evaluate(dim, symbols) for dim in map.dims],
        strides=[evaluate(stride, symbols) for stride in map.strides],
        box=map.box,
        element_strides=map.element_strides,
        interleave=map.interleave,
        swizzle=map.swizzle,
        l2_promotion=map.l2_promotion,
        oob_fill=map.oob_fill,
    )
