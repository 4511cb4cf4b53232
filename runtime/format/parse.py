"""Reading a manifest: accepts exactly the format, and names the JSON path of whatever is not of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from kgen.runtime.errors import FormatError
from kgen.runtime.format import canonical, expr
from kgen.runtime.format.arch import Target
from kgen.runtime.format.dtypes import DTYPES
from kgen.runtime.format.expr import Expr
from kgen.runtime.format.manifest import (
    DEVICE_SYMBOLS,
    FORMAT,
    PARAM_KINDS,
    ROLES,
    WORKSPACE_KINDS,
    Arg,
    Blob,
    Evidence,
    Kernel,
    Launch,
    Manifest,
    Memset,
    Operator,
    Program,
    Tensor,
    TensorMap,
    Variant,
    Workspace,
)

UNDERSTOOD: frozenset[str] = frozenset()  # must_understand words that this reader knows
MAX_MANIFEST = 16 << 20

_SHA = r"[0-9a-f]{64}"
_NAME = r"[A-Za-z_][A-Za-z0-9_.\-]{0,127}"
_LABEL = r"[A-Za-z0-9_][A-Za-z0-9_.=+\-]{0,127}"  # as the published tables name their rows
_EVIDENCE = r"[A-Za-z0-9_]+/[A-Za-z0-9_]+\.[a-z0-9]+"
_SYMBOL = r"[a-z_][a-z0-9_]{0,63}"
_ENTRY = r"[A-Za-z_][A-Za-z0-9_]{0,255}"
_VERSION = r"\d+\.\d+\.\d+([.\-+][0-9A-Za-z.\-+]+)?"


def program_from_json(value: Any, symbols: Iterable[str]) -> Program:
    """A program read back from `program_to_json`, without a manifest around it.

    Raises:
        FormatError: `value` is no program over `symbols`.
    """
    return _program(_At(value, None, "program"), set(symbols), None, None)


def parse(data: bytes) -> Manifest:
    """Read a manifest.

    Raises:
        FormatError: anything but a well-formed manifest of a known format; the message names the JSON path.
    """
    if len(data) > MAX_MANIFEST:
        raise FormatError(f"the manifest has {len(data)} bytes; at most {MAX_MANIFEST} are allowed")
    value = canonical.loads(data)
    if not isinstance(value, dict) or not isinstance(value.get("format"), list) or len(value["format"]) != 2:
        raise FormatError("the manifest has no format version: this is not a kgen bundle")
    major, minor = value["format"]
    if major != FORMAT[0] or isinstance(minor, bool) or not isinstance(minor, int):
        raise FormatError(f"bundle format {value['format']} is not {FORMAT[0]}.x: use a kgen that reads it")
    root = _At(value, None, "manifest")
    top = root.fields(
        "format",
        "must_understand",
        "name",
        "version",
        "targets",
        "min_driver",
        "generator",
        "blobs",
        "kernels",
        "operators",
        "evidence",
    )
    for word in top["must_understand"].items():
        if word.value not in UNDERSTOOD:
            raise FormatError(
                f"the bundle needs {word.value!r}, which this version of kgen does not know: upgrade kgen"
            )
    targets = tuple(_target(item) for item in top["targets"].items())
    blobs = {sha: _blob(sha, at) for sha, at in top["blobs"].mapping(_SHA)}
    kernels = {id: _kernel(id, at, blobs) for id, at in top["kernels"].mapping(_SHA)}
    return Manifest(
        name=top["name"].text(_NAME),
        version=top["version"].text(_VERSION),
        targets=targets,
        min_driver=top["min_driver"].integer(0, 1 << 20),
        generator={key: at.text() for key, at in top["generator"].mapping(_NAME)},
        blobs=blobs,
        kernels=kernels,
        operators={name: _operator(name, at, kernels) for name, at in top["operators"].mapping(_NAME)},
        evidence={name: _evidence(at) for name, at in top["evidence"].mapping(_EVIDENCE)},
    )


class _At:
    """A JSON value and where it stands, for errors that name the path."""

    __slots__ = ("key", "parent", "value")

    def __init__(self, value: Any, parent: _At | None, key: str | int):
        self.value, self.parent, self.key = value, parent, key

    @property
    def path(self) -> str:
        if self.parent is None:
            return str(self.key)
        return f"{self.parent.path}[{self.key}]" if isinstance(self.key, int) else f"{self.parent.path}.{self.key}"

    def wrong(self, wanted: str) -> FormatError:
        return FormatError(f"{self.path}: expected {wanted}, found {str(self.value)[:80]!r}")

    def fields(self, *names: str) -> dict[str, _At]:
        if not isinstance(self.value, dict) or set(self.value) != set(names):
            found = sorted(self.value) if isinstance(self.value, dict) else type(self.value).__name__
            raise FormatError(f"{self.path}: expected an object with exactly {sorted(names)}, found {found}")
        return {name: _At(self.value[name], self, name) for name in names}

    def mapping(self, key: str) -> list[tuple[str, _At]]:
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        for name in self.value:
            if not re.fullmatch(key, name):
                raise FormatError(f"{self.path}: {name[:80]!r} is not a valid key here")
        return [(name, _At(item, self, name)) for name, item in self.value.items()]

    def items(self) -> list[_At]:
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        return [_At(item, self, i) for i, item in enumerate(self.value)]

    def text(self, pattern: str | None = None) -> str:
        if not isinstance(self.value, str) or (pattern and not re.fullmatch(pattern, self.value)):
            raise self.wrong(f"text like {pattern}" if pattern else "text")
        return self.value

    def choice(self, allowed: Iterable[str]) -> str:
        if self.value not in allowed:
            raise self.wrong(f"one of {', '.join(allowed)}")
        return self.value

    def integer(self, least: int, most: int) -> int:
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not least <= self.value <= most:
            raise self.wrong(f"an integer in {least}..{most}")
        return self.value

    def boolean(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return self.value

    def integers(self, least: int, most: int, count: int | None = None) -> tuple[int, ...]:
        items = self.items()
        if count is not None and len(items) != count:
            raise self.wrong(f"{count} integers")
        return tuple(item.integer(least, most) for item in items)

    def expr(self, symbols: set[str]) -> Expr:
        try:
            return expr.validate(self.value, symbols)
        except FormatError as error:
            raise FormatError(f"{self.path}: {error}") from None

    def exprs(self, symbols: set[str], count: int | None = None) -> tuple[Expr, ...]:
        items = self.items()
        if count is not None and len(items) != count:
            raise self.wrong(f"{count} expressions")
        return tuple(item.expr(symbols) for item in items)


def _blob(sha: str, at: _At) -> Blob:
    fields = at.fields("kind", "size")
    return Blob(sha, fields["kind"].choice(("cubin", "ptx")), fields["size"].integer(1, 1 << 31))


def _target(at: _At) -> str:
    target = at.text()
    Target.parse(target)
    return target


def _evidence(at: _At) -> Evidence:
    fields = at.fields("sha256", "size")
    return Evidence(fields["sha256"].text(_SHA), fields["size"].integer(0, 1 << 31))


def _kernel(id: str, at: _At, blobs: dict[str, Blob]) -> Kernel:
    f = at.fields(
        "entry", "params", "block", "cluster", "dynamic_smem", "static_smem",
        "registers", "stack", "spills", "pdl", "cooperative", "target", "cubin", "ptx",
    )  # fmt: skip

    def code(kind: str) -> str:
        sha = f[kind].text(_SHA)
        if sha not in blobs or blobs[sha].kind != kind:
            raise FormatError(f"{f[kind].path}: no {kind} blob {sha} in this manifest")
        return sha

    return Kernel(
        id=id,
        entry=f["entry"].text(_ENTRY),
        params=tuple(item.choice(PARAM_KINDS) for item in f["params"].items()),
        block=f["block"].integers(1, 1024, 3),
        cluster=f["cluster"].integers(1, 16, 3),
        dynamic_smem=f["dynamic_smem"].integer(0, 1 << 20),
        static_smem=f["static_smem"].integer(0, 1 << 20),
        registers=f["registers"].integer(0, 255),
        stack=f["stack"].integer(0, 1 << 20),
        spills=f["spills"].integer(0, 1 << 20),
        pdl=f["pdl"].boolean(),
        cooperative=f["cooperative"].boolean(),
        target=_target(f["target"]),
        cubin=code("cubin"),
        ptx=code("ptx"),
    )


def _operator(name: str, at: _At, kernels: dict[str, Kernel]) -> Operator:
    f = at.fields("op", "abi", "dims", "attrs", "tensors", "variants", "workloads")
    dims = {}
    for dim, item in f["dims"].mapping(_SYMBOL):
        least, most = item.integers(0, 1 << 40, 2)
        if least > most:
            raise item.wrong("[least, most] in order")
        dims[dim] = (least, most)
    symbols = set(dims)
    tensors = tuple(_tensor(item, symbols) for item in f["tensors"].items())
    names = {tensor.name for tensor in tensors}
    if len(names) != len(tensors):
        raise FormatError(f"{at.path}: two tensors have the same name")
    workloads = {}
    ranges = {dim for dim, (least, most) in dims.items() if least != most}
    for workload, item in f["workloads"].mapping(_LABEL):
        workloads[workload] = {dim: v.integer(*dims[dim]) for dim, v in item.fields(*ranges).items()}
    if not isinstance(f["attrs"].value, dict):
        raise f["attrs"].wrong("an object")
    return Operator(
        name=name,
        op=f["op"].text(_NAME),
        abi=f["abi"].integer(1, 1 << 16),
        dims=dims,
        attrs=f["attrs"].value,
        tensors=tensors,
        variants=tuple(_variant(item, symbols | set(DEVICE_SYMBOLS), names, kernels) for item in f["variants"].items()),
        workloads=workloads,
    )


def _tensor(at: _At, symbols: set[str]) -> Tensor:
    f = at.fields("name", "role", "dtype", "shape", "strides", "align")
    shape = f["shape"].exprs(symbols)
    align = f["align"].integer(1, 1 << 16)
    if align & (align - 1):
        raise f["align"].wrong("a power of two")
    return Tensor(
        name=f["name"].text(_SYMBOL),
        role=f["role"].choice(ROLES),
        dtype=f["dtype"].choice(DTYPES),
        shape=shape,
        strides=f["strides"].exprs(symbols, len(shape)),
        align=align,
    )


def _variant(at: _At, symbols: set[str], tensors: set[str], kernels: dict[str, Kernel]) -> Variant:
    f = at.fields("target", "guard", "config", "program")
    if not isinstance(f["config"].value, dict):
        raise f["config"].wrong("an object")
    program = _program(f["program"], symbols, tensors, kernels)
    return Variant(_target(f["target"]), f["guard"].expr(symbols), f["config"].value, program)


def _program(at: _At, symbols: set[str], tensors: set[str] | None, kernels: dict[str, Kernel] | None) -> Program:
    f = at.fields("steps", "workspace", "workspace_bytes")
    workspace = tuple(_workspace(item, symbols) for item in f["workspace"].items())
    buffers = None if tensors is None else tensors | {part.name for part in workspace}
    if buffers is not None and len(buffers) != len(tensors) + len(workspace):
        raise FormatError(f"{at.path}: a workspace part's name is taken")
    steps = tuple(_step(item, symbols, buffers, kernels) for item in f["steps"].items())
    return Program(steps, workspace, f["workspace_bytes"].expr(symbols))


def _workspace(at: _At, symbols: set[str]) -> Workspace:
    f = at.fields("name", "kind", "offset", "bytes")
    return Workspace(
        f["name"].text(_SYMBOL), f["kind"].choice(WORKSPACE_KINDS), f["offset"].expr(symbols), f["bytes"].expr(symbols)
    )


def _step(at: _At, symbols: set[str], buffers: set[str] | None, kernels: dict[str, Kernel] | None) -> Launch | Memset:
    def buffer(at: _At) -> str:
        name = at.text(_SYMBOL)
        if buffers is not None and name not in buffers:
            raise at.wrong(f"one of the buffers {', '.join(sorted(buffers))}")
        return name

    if isinstance(at.value, dict) and "buffer" in at.value:
        f = at.fields("buffer", "byte", "bytes")
        return Memset(buffer(f["buffer"]), f["byte"].integer(0, 255), f["bytes"].expr(symbols))
    f = at.fields("kernel", "grid", "args")
    id = f["kernel"].text(_SHA)
    args = tuple(_arg(item, symbols, buffer) for item in f["args"].items())
    if kernels is not None:
        if id not in kernels:
            raise f["kernel"].wrong("the id of a kernel of this manifest")
        _match(args, kernels[id], f["args"])
    return Launch(id, f["grid"].exprs(symbols, 3), args)


def _arg(at: _At, symbols: set[str], buffer: Any) -> Arg:
    if not isinstance(at.value, dict) or len(at.value) != 1:
        raise at.wrong("one of {pointer}, {tensor_map}, {value}")
    kind = next(iter(at.value))
    if kind == "pointer":
        return Arg(pointer=buffer(at.fields("pointer")["pointer"]))
    if kind == "value":
        return Arg(value=at.fields("value")["value"].expr(symbols))
    f = at.fields("tensor_map")["tensor_map"].fields(
        "tensor", "data_type", "dims", "strides", "box", "element_strides",
        "interleave", "swizzle", "l2_promotion", "oob_fill",
    )  # fmt: skip
    dims = f["dims"].exprs(symbols)
    rank = len(dims)
    if not 1 <= rank <= 5:
        raise f["dims"].wrong("1 to 5 dimensions")
    return Arg(
        tensor_map=TensorMap(
            tensor=buffer(f["tensor"]),
            data_type=f["data_type"].integer(0, 15),
            dims=dims,
            strides=f["strides"].exprs(symbols, rank - 1),
            box=f["box"].integers(1, 256, rank),
            element_strides=f["element_strides"].integers(1, 8, rank),
            interleave=f["interleave"].integer(0, 2),
            swizzle=f["swizzle"].integer(0, 6),
            l2_promotion=f["l2_promotion"].integer(0, 3),
            oob_fill=f["oob_fill"].integer(0, 1),
        )
    )


def _match(args: tuple[Arg, ...], kernel: Kernel, at: _At) -> None:
    kinds = tuple("pointer" if a.pointer else "tensor_map" if a.tensor_map else "value" for a in args)
    wanted = tuple(kind if kind in ("pointer", "tensor_map") else "value" for kind in kernel.params)
    if kinds != wanted:
        raise FormatError(f"{at.path}: arguments {kinds} do not fit the parameters {kernel.params} of {kernel.entry}")
