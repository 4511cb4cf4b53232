"""Validating a spec's values against types, with messages in kgen's own words.

pydantic says whether a value is right. Where it is not, its parts are asked one by one down to the wrong one, so that
the message names its place in the file and, of a union, the branch that was meant.
"""

from __future__ import annotations

import functools
import json
import typing
from dataclasses import MISSING, fields, is_dataclass
from difflib import SequenceMatcher
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from kgen.compiler.source import Broken, Node, Report, Steps, nearest


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)


def _parse(hint: Any, node: Node) -> Any:
    return _adapter(hint).validate_json(json.dumps(node.plain()), strict=True)  # JSON: a list may be a tuple


def valid(hint: Any, node: Node) -> bool:
    try:
        _parse(hint, node)
    except ValidationError:
        return False
    return True


def check(hint: Any, node: Node, path: Steps, report: Report) -> Any:
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
    if valid(hint, node):
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
