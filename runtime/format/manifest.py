"""The manifest: what a bundle holds, as typed data. The JSON has the shape of these classes, field by field."""

from __future__ import annotations

from typing import Any, NamedTuple

from kgen.runtime.format.expr import Expr

FORMAT = (1, 0)
PARAM_KINDS = {"tensor_map": 128, "pointer": 8, "int32": 4, "int64": 8, "float32": 4}  # bytes
ROLES = ("in", "out", "inout")
WORKSPACE_KINDS = ("scratch", "locks")
DEVICE_SYMBOLS = ("sm_count",)
WORKSPACE_ALIGN = 256  # bytes; what cudaMalloc gives, and enough for TMA and vector access


class Blob(NamedTuple):
    """A content-addressed file: ``blobs/<sha256>.<kind>`` of `size` bytes; kind is cubin or ptx."""

    sha256: str
    kind: str
    size: int

    @property
    def path(self) -> str:
        return f"blobs/{self.sha256}.{self.kind}"


class Kernel(NamedTuple):
    """One ``__global__`` function, compiled for `target`. `id` is the sha256 of its source, flags and toolkit.

    Attributes:
        entry: the symbol in the code.
        params: kinds (`PARAM_KINDS`) in the function's order.
        block, cluster: threads a block; blocks a cluster (1, 1, 1 without).
        dynamic_smem, static_smem: bytes of shared memory a block.
        registers, stack, spills: a thread's registers; bytes of local memory; bytes of spill stores and loads.
        pdl: launched with programmatic stream serialization.
        cooperative: launched so that all its blocks are on the device at once.
        cubin, ptx: sha256 of the code.
    """

    id: str
    entry: str
    params: tuple[str, ...]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_smem: int
    static_smem: int
    registers: int
    stack: int
    spills: int
    pdl: bool
    cooperative: bool
    target: str
    cubin: str
    ptx: str


class Tensor(NamedTuple):
    """A tensor argument. `shape` and `strides` (in elements) are expressions over dims; `align` is in bytes."""

    name: str
    role: str
    dtype: str
    shape: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    align: int


class TensorMap(NamedTuple):
    """The arguments of ``cuTensorMapEncodeTiled``; innermost dimension first, `strides` in bytes without the innermost.

    `data_type`, `interleave`, `swizzle`, `l2_promotion` and `oob_fill` are the CUtensorMap enumerators' values.
    """

    tensor: str
    data_type: int
    dims: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: int
    swizzle: int
    l2_promotion: int
    oob_fill: int


class Arg(NamedTuple):
    """A kernel argument: exactly one of a buffer's address, a tensor map, an integer expression."""

    pointer: str | None = None
    tensor_map: TensorMap | None = None
    value: Expr | None = None


class Launch(NamedTuple):
    """Launch `kernel` (an id) on `grid` blocks with `args` in the order of its params."""

    kernel: str
    grid: tuple[Expr, Expr, Expr]
    args: tuple[Arg, ...]


class Memset(NamedTuple):
    """Fill the first `bytes` bytes of `buffer` with `byte`."""

    buffer: str
    byte: int
    bytes: Expr


class Workspace(NamedTuple):
    """A part of the workspace: ``scratch``, or ``locks``, zero on entry and left zero (bind zeroes them once)."""

    name: str
    kind: str
    offset: Expr
    bytes: Expr


class Program(NamedTuple):
    """What a call does: `steps` in order, over the tensors and `workspace`, which takes `workspace_bytes` in all."""

    steps: tuple[Launch | Memset, ...]
    workspace: tuple[Workspace, ...]
    workspace_bytes: Expr

    @property
    def launches(self) -> tuple[Launch, ...]:
        """The steps that launch a kernel."""
        return tuple(step for step in self.steps if isinstance(step, Launch))


class Variant(NamedTuple):
    """`program` runs where `guard` (over dims and sm_count) is true and no earlier variant's of the same target is."""

    target: str
    guard: Expr
    config: dict[str, Any]
    program: Program


class Operator(NamedTuple):
    """An operator instance.

    Attributes:
        name, op, abi: the instance, its family, the version of the family's call interface.
        dims: name -> (least, most); equal for a static dim.
        attrs: the family's own fields as the spec gave them.
        workloads: name -> values of the range dims.
    """

    name: str
    op: str
    abi: int
    dims: dict[str, tuple[int, int]]
    attrs: dict[str, Any]
    tensors: tuple[Tensor, ...]
    variants: tuple[Variant, ...]
    workloads: dict[str, dict[str, int]]

    @property
    def range_dims(self) -> tuple[str, ...]:
        """The dims a call chooses."""
        return tuple(name for name, (least, most) in self.dims.items() if least != most)


class Evidence(NamedTuple):
    """A file that people and tools read and the runtime does not: ``evidence/<name>``, of `size` bytes."""

    sha256: str
    size: int


class Manifest(NamedTuple):
    """A bundle's table of contents. Its canonical bytes' sha256 is the bundle's id.

    Attributes:
        min_driver: the oldest CUDA driver that loads the code, as ``cuDriverGetVersion`` counts: 13000 is 13.0.
    """

    name: str
    version: str
    targets: tuple[str, ...]
    min_driver: int
    generator: dict[str, str]
    blobs: dict[str, Blob]
    kernels: dict[str, Kernel]
    operators: dict[str, Operator]
    evidence: dict[str, Evidence]


def to_json(manifest: Manifest) -> dict[str, Any]:
    """The JSON value of `manifest`; `canonical.dumps` of it are the manifest's bytes."""
    return {
        "format": list(FORMAT),
        "must_understand": [],
        "name": manifest.name,
        "version": manifest.version,
        "targets": list(manifest.targets),
        "min_driver": manifest.min_driver,
        "generator": dict(manifest.generator),
        "blobs": {sha: {"kind": b.kind, "size": b.size} for sha, b in manifest.blobs.items()},
        "kernels": {id: _drop(_plain(k), "id") for id, k in manifest.kernels.items()},
        "operators": {name: _drop(_plain(o), "name") for name, o in manifest.operators.items()},
        "evidence": _plain(manifest.evidence),
    }


def program_to_json(program: Program) -> dict[str, Any]:
    """The JSON value of `program`."""
    return _plain(program)


def _plain(value: Any) -> Any:
    """Named tuples to dicts, other tuples to lists; of an `Arg`, only the field that is set."""
    if isinstance(value, Arg):
        return {key: _plain(item) for key, item in value._asdict().items() if item is not None}
    if hasattr(value, "_fields"):
        return {key: _plain(item) for key, item in value._asdict().items()}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _drop(value: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: item for name, item in value.items() if name != key}
