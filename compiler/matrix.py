"""Expanding an entry's ``matrix``: one entry for each combination of its axes' values."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from kgen.compiler.source import Broken, Node, Report, Steps

MAX_COMBINATIONS = 4096
PLACEHOLDER = r"\$\{([^{}]*)\}"


def expand(entry: Node, axes: Mapping[str, Node], path: Steps, report: Report) -> Iterator[tuple[str, Node, Report]]:
    """Every combination of a matrix: its name, the entry with the placeholders replaced, and a report of its own.

    Args:
        axes: axis -> a list of values. A placeholder is ``${axis}``, or ``${axis.key}`` for an axis of mappings.
    """
    size = math.prod(len(values.value) for values in axes.values())
    if size > MAX_COMBINATIONS:
        report.add((*path, "matrix"), entry.mark, f"expands to {size} entries; at most {MAX_COMBINATIONS}: split it")
        return
    used: set[str] = set()
    for values in itertools.product(*(values.value for values in axes.values())):
        name = ", ".join(f"{axis}={str(value).strip(chr(39))}" for axis, value in zip(axes, values, strict=True))
        inner = Report(report.file)
        yield name, _fill(entry, dict(zip(axes, values, strict=True)), path, inner, used), inner
    for axis in axes.keys() - used:
        report.add((*path, "matrix", axis), axes[axis].key_mark, f"is never used: write ${{{axis}}} or drop it")


def _fill(node: Node, chosen: Mapping[str, Node], path: Steps, report: Report, used: set[str]) -> Node:
    """`node` with its placeholders replaced. A string that is nothing else becomes the value, with its type."""

    def lookup(match: re.Match[str]) -> Node:
        axis, *keys = match[1].split(".")
        used.add(axis)
        found = chosen.get(axis)
        for key in keys:
            found = found.value.get(key) if found and isinstance(found.value, dict) else None
        if found is None:
            report.add(path, node.mark, f"{match[0]} names nothing in matrix", [f"${{{a}}}" for a in chosen], match[0])
        return found or Node(Broken(match[0]), node.mark)

    def text(found: Node) -> str:
        return found.value if isinstance(found.value, str) else json.dumps(found.plain())

    if isinstance(node.value, list):
        items = [_fill(item, chosen, (*path, i), report, used) for i, item in enumerate(node.value)]
        return replace(node, value=items)
    if isinstance(node.value, dict):
        mapping: dict[str, Node] = {}
        for key, item in node.value.items():
            new = text(_fill(Node(key, item.key_mark), chosen, (*path, key), report, used))
            if new in mapping:
                report.add((*path, new), item.key_mark, "duplicate key once the placeholders are replaced")
            mapping[new] = _fill(item, chosen, (*path, new), report, used)
        return replace(node, value=mapping)
    if not isinstance(node.value, str) or isinstance(node.value, Broken):
        return node
    if whole := re.fullmatch(PLACEHOLDER, node.value):
        return replace(node, value=lookup(whole).value)
    before = len(report.problems)
    filled = re.sub(PLACEHOLDER, lambda match: text(lookup(match)), node.value)
    return replace(node, value=filled if len(report.problems) == before else Broken(filled))
