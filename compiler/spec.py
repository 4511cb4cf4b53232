"""The spec language: a YAML file that names a bundle, its targets and its operators.

`load` and `schema` go by the same models: the ones here, and the fields of the families. pydantic validates; the
messages are kgen's own, for pydantic knows neither the place in the file nor which branch of a union was meant.
"""

from __future__ import annotations

import functools
import json
import re
import typing
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass, replace
from difflib import SequenceMatcher
from os import PathLike
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from kgen.compiler import ops
from kgen.compiler.ops.contract import STRICT, Operator
from kgen.compiler.source import PLACEHOLDER, Broken, Node, Problem, Report, Steps, expand, nearest, read
from kgen.runtime.errors import SpecError
from pydantic import Field, TypeAdapter, ValidationError

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
    document = _check(Document, root, (), report)
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
    if _check(dict[str, Any], entry, path, report) is None:
        return []
    matrix = entry.value.get("matrix")
    if matrix and _check(Matrix, matrix, (*path, "matrix"), report) is None:
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
    op = _check(Literal[tuple(ops.names())], node.value["op"], (*path, "op"), report)
    if op is None:
        return None
    cls = ops.family(op)
    entry = _check(_entry(cls, op), node, path, report)
    dims = _dims(cls, node, path, report)
    _check_workloads(cls.DIMS.keys() - dims.keys(), dims, node, path, report)
    if entry is None or report.problems:
        return None
    own = {key: getattr(entry, key) for key in cls.own_fields()}
    operator = cls(name=entry.name, dims=dims, workloads=entry.workloads, **own)
    for place, sentence in operator.problems():
        steps = tuple(place.split("."))
        report.add(path + steps, node.find(steps).mark, sentence)
    return operator


def _dims(cls: type[Operator], node: Node, path: Steps, report: Report) -> dict[str, tuple[int, int]]:
    """Least and most of each dim that is right; missing ones and wrong forms are the entry model's to report."""
    right = {}
    for dim, item in _items(node, "dims").items():
        if dim not in cls.DIMS or not _valid(Size | Range, item):
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
            elif _valid(Size, size) and not least <= size.value <= most:
                report.add((*at, dim), size.mark, f"{size} is outside of dims.{dim}", (f"{least}..{most}",))
        for dim, size in sizes.value.items():
            if dim not in ranges and dim not in wrong:
                report.add((*at, dim), size.key_mark, "is no range dim here: leave it out", tuple(ranges), dim)


def _items(node: Node, key: str) -> dict[str, Node]:
    """The items of the mapping under `key`; none where there is no mapping."""
    item = node.value.get(key)
    return item.value if item and isinstance(item.value, dict) else {}


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)


def _parse(hint: Any, node: Node) -> Any:
    return _adapter(hint).validate_json(json.dumps(node.plain()), strict=True)  # JSON: a list may be a tuple


def _valid(hint: Any, node: Node) -> bool:
    try:
        _parse(hint, node)
    except ValidationError:
        return False
    return True


def _check(hint: Any, node: Node, path: Steps, report: Report) -> Any:
    """The value that `node` is by `hint`; None where it is wrong, and what is wrong is in the report."""
    try:
        return _parse(hint, node)
    except ValidationError:
        _explain(hint, node, path, report)
        return None


def _explain(hint: Any, node: Node, path: Steps, report: Report) -> bool:
    """Whether `node` is wrong. Its parts are asked first: it is reported itself only if they are right."""
    if isinstance(node.value, Broken):
        return True
    if _valid(hint, node):
        return False
    meant = _meant(hint, node.value)
    args, parts, wrong = get_args(meant), {}, False
    if isinstance(node.value, dict) and is_dataclass(meant):
        hints = typing.get_type_hints(meant, include_extras=True)
        parts = {key: hints[key] for key in node.value if key in hints}
        wrong = _explain_keys(meant, hints, node, path, report)
    elif isinstance(node.value, dict) and get_origin(meant) is dict:
        parts = dict.fromkeys(node.value, args[1])
    elif isinstance(node.value, list) and get_origin(meant) in (list, tuple):
        fixed = get_origin(meant) is tuple and args[-1] is not ...
        parts = dict(enumerate(args[: len(node.value)] if fixed else args[:1] * len(node.value)))
    for step, part in parts.items():
        wrong |= _explain(part, node.value[step], (*path, step), report)
    if not wrong:
        report.add(path, node.mark, f"{node} is not allowed", _forms(hint), node.value)
    return True


def _explain_keys(model: type, hints: dict[str, Any], node: Node, path: Steps, report: Report) -> bool:
    keys = [f.name for f in fields(model)]
    unknown = [key for key in node.value if key not in keys]
    misspelled = {nearest(key, keys) for key in unknown}
    missing = [key for key in _required(model) if key not in node.value and key not in misspelled]
    for key in unknown:
        report.add((*path, key), node.value[key].key_mark, "unknown key", keys, key)
    for key in missing:
        report.add((*path, key), node.mark, "missing", _forms(hints[key]))
    return bool(unknown or missing)


def _required(model: type) -> list[str]:
    return [f.name for f in fields(model) if f.default is MISSING and f.default_factory is MISSING]


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _branches(hint: Any) -> list[Any]:
    """What a union may be, but for None: a key is left out rather than null."""
    union = get_origin(_bare(hint)) in (Union, UnionType)
    return [branch for branch in get_args(_bare(hint)) if branch is not NoneType] if union else [hint]


def _meant(hint: Any, value: Any) -> Any:
    """The branch of a union that `value` looks most like: of mappings, the one with the most similar keys."""

    def likeness(branch: Any) -> tuple[bool, float]:
        if isinstance(value, dict) and is_dataclass(branch):
            names = [f.name for f in fields(branch)]
            return True, sum(max((SequenceMatcher(None, k, n).ratio() for n in names), default=0.0) for k in value)
        return get_origin(branch) in ((list, tuple) if isinstance(value, list) else ()), 0.0

    return max(map(_bare, _branches(hint)), key=likeness)


def _forms(hint: Any) -> list[str]:
    """What `hint` allows, in words."""
    branches = _branches(hint)
    if len(branches) > 1:
        return [form for branch in branches for form in _forms(branch)]
    bare, args = _bare(branches[0]), get_args(_bare(branches[0]))
    if get_origin(bare) is Literal:
        return [value if isinstance(value, str) else json.dumps(value) for value in args]
    if is_dataclass(bare):
        return ["{" + ", ".join(f"{key}: …" for key in _required(bare)) + "}"]
    if descriptions := [meta.description for meta in getattr(branches[0], "__metadata__", ()) if meta.description]:
        return descriptions[:1]
    if get_origin(bare) is tuple:
        return ["[" + ", ".join("…" if arg is ... else " or ".join(_forms(arg)) for arg in args) + "]"]
    words = {
        int: "an integer",
        float: "a number",
        str: "text",
        bool: "true or false",
        list: "a list",
        dict: "a mapping",
    }
    return [words.get(get_origin(bare) or bare, "another type")]
