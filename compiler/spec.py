"""The spec language: a YAML file that names a bundle, its targets and its operators.

`load` and `schema` go by the same models: the ones here, and the fields of the families.
"""

from __future__ import annotations

import functools
import re
import typing
from dataclasses import MISSING, dataclass, field, fields, make_dataclass, replace
from os import PathLike
from typing import Annotated, Any, Literal, Union, get_args

from pydantic import Field, TypeAdapter

from kgen.compiler import ops
from kgen.compiler.matrix import PLACEHOLDER, expand
from kgen.compiler.ops.contract import STRICT, Operator
from kgen.compiler.source import Broken, Node, Problem, Report, Steps, read
from kgen.compiler.validate import check, valid
from kgen.runtime.errors import SpecError

__all__ = ["TARGETS", "Problem", "Spec", "SpecError", "load", "schema"]

TARGETS = ("sm_90a",)
MAX_DIM = 2**31 - 1  # kernels take dims as int32


def _text(pattern: str, description: str) -> Any:
    return Annotated[str, Field(pattern=pattern, description=description)]


# Messages list a description as what is allowed.
Bundle = _text("^[a-z0-9][a-z0-9_-]*$", "lowercase letters, digits, _ and -")
Version = _text(r"^[0-9]+\.[0-9]+\.[0-9]+$", "three numbers, such as 1.0.0")
Name = _text("^[A-Za-z_][A-Za-z0-9_.-]*$", "letters, digits, _, . and -, the first a letter or _")
Range = _text(r"^[1-9][0-9]{0,9}\.\.[1-9][0-9]{0,9}$", "a range such as 1..8192")
Size = Annotated[int, Field(ge=1, le=MAX_DIM, description=f"an integer from 1 to {MAX_DIM}")]
Workloads = dict[str, dict[str, Size]]
Matrix = dict[str, Annotated[list[Any], Field(min_length=1, description="a list of at least one value")]]
Ops = Annotated[list[Any], Field(min_length=1, description="a list of operators")]


@dataclass(frozen=True, kw_only=True)
class Document:
    """A kgen spec: a bundle and the operators in it."""

    kgen: Annotated[Literal[1], Field(description="version of the spec language")]
    bundle: Bundle
    version: Version
    targets: Annotated[list[Literal[TARGETS]], Field(min_length=1, description=f"a list of {', '.join(TARGETS)}")]
    ops: Ops
    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class Spec:
    """What a spec file says.

    Attributes:
        name, version: of the bundle.
        operators: their contracts, in the order of the file, each matrix expanded.
        path: the file, as `load` was given it.
    """

    name: str
    version: str
    targets: tuple[str, ...]
    operators: tuple[Operator, ...]
    path: str


def load(path: str | PathLike[str]) -> Spec:
    """Read and validate a spec file.

    Raises:
        SpecError: its `problems` are all that the file has.
    """
    report = Report(str(path))
    root = read(report)
    if not isinstance(root.value, dict):
        raise report.fatal(root.mark, f"{root} is no spec: a spec is a mapping that starts with kgen: 1")
    document = check(Document, root, (), report)
    operators: list[Operator] = []
    lines: dict[str, int] = {}
    entries = root.find(["ops"]).value
    for i, entry in enumerate(entries if isinstance(entries, list) else ()):
        operators += _operators(entry, ("ops", i), lines, report)
    targets = root.find(["targets"])
    listed = targets.plain() if isinstance(targets.value, list) else []
    for i, target in enumerate(listed):
        if target in TARGETS and listed.index(target) < i:
            report.add(("targets", i), targets.find([i]).mark, f"{target!r} is there twice: drop one")
    if report.problems:
        raise report.error()
    return Spec(document.bundle, document.version, tuple(listed), tuple(operators), report.file)


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a spec file. Any value of an entry may also be a ``${placeholder}``."""
    entries = Union[tuple(_entry(ops.family(op), op) for op in ops.names())]  # noqa: UP007
    items = Annotated[list[Annotated[entries, Field(discriminator="op")]], *get_args(Ops)[1:]]
    full = TypeAdapter(_model("Spec", Document.__doc__, [("ops", items)], Document)).json_schema()
    defs = {name: _templated(part)["anyOf"][0] for name, part in full.pop("$defs").items()}
    defs["Placeholder"] = {"type": "string", "pattern": PLACEHOLDER, "description": "a value of the entry's matrix"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **full, "$defs": defs}


def _templated(part: dict[str, Any]) -> dict[str, Any]:
    """A part of the schema, or a placeholder."""
    part = dict(part)
    for key in ("items", "additionalProperties"):
        if isinstance(part.get(key), dict):
            part[key] = _templated(part[key])
    if "prefixItems" in part:
        part["prefixItems"] = [_templated(item) for item in part["prefixItems"]]
    fixed = ("op", "matrix")
    if "properties" in part:
        part["properties"] = {k: v if k in fixed else _templated(v) for k, v in part["properties"].items()}
    return {"anyOf": [part, {"$ref": "#/$defs/Placeholder"}]}


@functools.cache
def _entry(cls: type[Operator], op: str) -> type:
    """The model of a family's entry in `ops`."""
    hints = typing.get_type_hints(cls, include_extras=True)
    dims = [(dim, Annotated[Size | Range, Field(description=what)]) for dim, what in cls.DIMS.items()]
    keys: list[Any] = [
        ("name", Name),
        ("op", Literal[op]),
        ("dims", _model(f"{cls.__name__}Dims", f"Sizes; may be a range: {', '.join(cls.RANGES) or 'none'}.", dims)),
        ("workloads", Workloads, field(default_factory=dict)),
        ("matrix", Matrix, field(default_factory=dict)),
    ]
    for own in fields(cls):
        if own.name in cls.own_fields():
            given = {k: v for k in ("default", "default_factory") if (v := getattr(own, k)) is not MISSING}
            keys.append((own.name, hints[own.name], field(**given)))
    return _model(f"{cls.__name__}Entry", cls.__doc__, keys)


def _model(name: str, doc: str | None, keys: list[Any], *bases: type) -> type:
    namespace = {"__doc__": doc, "__pydantic_config__": STRICT}
    return make_dataclass(name, keys, bases=bases, kw_only=True, frozen=True, namespace=namespace)


def _operators(entry: Node, path: Steps, lines: dict[str, int], report: Report) -> list[Operator]:
    """The operators of an entry; `lines` says where names were first used."""
    if check(dict[str, Any], entry, path, report) is None:
        return []
    matrix = entry.value.get("matrix")
    if matrix and check(Matrix, matrix, (*path, "matrix"), report) is None:
        return []
    body = replace(entry, value={key: item for key, item in entry.value.items() if key != "matrix"})
    operators, reports = [], []
    for name, node, inner in expand(body, matrix.value if matrix else {}, path, report):
        operators.append(_operator(node, path, lines, inner))
        reports.append((name, inner))
    report.merge(reports)
    return [operator for operator in operators if operator]


def _operator(node: Node, path: Steps, lines: dict[str, int], report: Report) -> Operator | None:
    name = node.value.get("name")
    if name and isinstance(name.value, str) and not isinstance(name.value, Broken):
        if name.value in lines:
            message = f"{name} is also the name of the operator at line {lines[name.value]}: rename one"
            report.add((*path, "name"), name.mark, message)
        lines.setdefault(name.value, name.mark[0])
    if "op" not in node.value:
        report.add((*path, "op"), node.mark, "missing", ops.names())
        return None
    op = check(Literal[tuple(ops.names())], node.value["op"], (*path, "op"), report)
    if op is None:
        return None
    cls = ops.family(op)
    entry = check(_entry(cls, op), node, path, report)
    dims = _dims(cls, node, path, report)
    _check_workloads(cls.DIMS.keys() - dims.keys(), dims, node, path, report)
    if entry is None or report.problems:
        return None
    own = {key: getattr(entry, key) for key in cls.own_fields()}
    operator = cls(name=entry.name, dims=dims, workloads=entry.workloads, **own)
    for steps, sentence in operator.problems():
        report.add(path + steps, node.find(steps).mark, sentence)
    return operator


def _dims(cls: type[Operator], node: Node, path: Steps, report: Report) -> dict[str, tuple[int, int]]:
    """Least and most of each dim that is right; missing ones and wrong forms are the entry model's to report."""
    right = {}
    for dim, item in _items(node, "dims").items():
        if dim not in cls.DIMS or not valid(Size | Range, item):
            continue
        least, _, most = str(item.value).partition("..")
        bounds = int(least), int(most or least)
        at = (*path, "dims", dim)
        if bounds[0] > bounds[1]:
            report.add(at, item.mark, f"{item} is an empty range", (f"{most}..{least}",))
        elif bounds[1] > MAX_DIM:
            report.add(at, item.mark, f"{item} is not allowed", (f"up to {MAX_DIM}",))
        elif bounds[0] < bounds[1] and dim not in cls.RANGES:
            only = f"only {', '.join(cls.RANGES)} may be a range" if cls.RANGES else "no dim may be a range"
            report.add(at, item.mark, f"{item} is not allowed: {only}", ("an integer",))
        else:
            right[dim] = bounds
    return {dim: right[dim] for dim in cls.DIMS if dim in right}


def _check_workloads(
    wrong: set[str], dims: dict[str, tuple[int, int]], node: Node, path: Steps, report: Report
) -> None:
    """A workload gives a value to each range dim and to nothing else; nothing is said about dims that are wrong."""
    ranges = {dim: bounds for dim, bounds in dims.items() if bounds[0] < bounds[1]}
    for name, sizes in _items(node, "workloads").items():
        at = (*path, "workloads", name)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.=-]*", name):
            report.add(at, sizes.key_mark, f"{name!r} is not allowed", ("letters, digits, _, ., = and -",))
        if not isinstance(sizes.value, dict):
            continue
        for dim, (least, most) in ranges.items():
            size = sizes.value.get(dim)
            if size is None:
                report.add((*at, dim), sizes.mark, "missing", (f"{least}..{most}",))
            elif valid(Size, size) and not least <= size.value <= most:
                report.add((*at, dim), size.mark, f"{size} is outside of dims.{dim}", (f"{least}..{most}",))
        for dim, size in sizes.value.items():
            if dim not in ranges and dim not in wrong:
                report.add((*at, dim), size.key_mark, "is no range dim here: leave it out", tuple(ranges), dim)


def _items(node: Node, key: str) -> dict[str, Node]:
    """The items of the mapping under `key`; none where there is no mapping."""
    item = node.value.get(key)
    return item.value if item and isinstance(item.value, dict) else {}
