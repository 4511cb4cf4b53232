"""YAML with positions: what a spec file says, where it says it, and what is wrong with it.

Only plain data is read: mappings with text keys, lists, strings, numbers, booleans and null. Anchors and aliases work;
tags, merge keys and a second document do not.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.reader import ReaderError

from kgen.runtime.errors import SpecError

Steps = tuple[str | int, ...]
Mark = tuple[int, int]

MAX_DEPTH = 50
MAX_VALUES = 200_000


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a spec. As a string, one line.

    Attributes:
        line, column: from 1; None where there is no place, such as in a file that cannot be read.
        field: dotted path, such as ``ops[0].a.dtype``; empty for the file itself.
        allowed: what would do: values, keys or forms.
        suggestion: the one of `allowed` that was probably meant.
    """

    file: str
    line: int | None
    column: int | None
    field: str
    message: str
    allowed: tuple[str, ...] = ()
    suggestion: str | None = None

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}:{self.column}"
        text = ": ".join(filter(None, (place, self.field, self.message)))
        text += f"; allowed: {', '.join(self.allowed)}" if self.allowed else ""
        text += f"; did you mean {self.suggestion!r}?" if self.suggestion else ""
        return " ".join(text.splitlines())


class Broken(str):
    """The text of a scalar that is reported already, so that nothing more is said about it."""


@dataclass(frozen=True)
class Node:
    """A scalar, a list of nodes, or a mapping of text to nodes, and where it stands. As a string, what messages show.

    Attributes:
        mark: line and column of the value.
        key_mark: line and column of its key, where it is an item of a mapping.
    """

    value: Any
    mark: Mark
    key_mark: Mark | None = None

    def plain(self) -> Any:
        """The value without positions."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        return [item.plain() for item in self.value] if isinstance(self.value, list) else self.value

    def find(self, path: Iterable[str | int]) -> Node:
        """The node at `path`, or its nearest ancestor that exists."""
        node = self
        for step in path:
            items = node.value if isinstance(node.value, dict) else {}
            items = dict(enumerate(node.value)) if isinstance(node.value, list) else items
            if step not in items:
                break
            node = items[step]
        return node

    def __str__(self) -> str:
        value = self.plain()
        text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return text if len(text) <= 60 else f"{text[:57]}…"


class Report:
    """Collects the problems of one file."""

    def __init__(self, file: str):
        self.file = file
        self.problems: list[Problem] = []

    def add(self, path: Steps, mark: Mark | None, message: str, allowed: Collection[str] = (), wrote: Any = "") -> None:
        """Add a problem; where `wrote` is text, the nearest of `allowed` is suggested."""
        near = nearest(wrote, allowed)
        self.problems.append(Problem(self.file, *(mark or (None, None)), dotted(path), message, tuple(allowed), near))

    def merge(self, combinations: list[tuple[str, Report]]) -> None:
        """Add the problems of a matrix' combinations, each once, with the combination unless every one has it."""
        found: dict[Problem, list[str]] = {}
        for name, report in combinations:
            for problem in report.problems:
                found.setdefault(problem, []).append(name)
        for problem, (name, *others) in found.items():
            if name and (len(combinations) == 1 or len(others) + 1 < len(combinations)):
                more = f" and {len(others)} more" if others else ""
                problem = replace(problem, message=f"{problem.message} (with {name}{more})")
            self.problems.append(problem)

    def error(self) -> SpecError:
        """The exception to raise, its problems in the order of the file."""
        return SpecError(sorted(self.problems, key=lambda p: (p.line or 0, p.column or 0)))

    def fatal(self, mark: Mark | None, message: str) -> SpecError:
        """The exception to raise for a problem that ends the reading."""
        self.add((), mark, message)
        return self.error()


def dotted(path: Steps) -> str:
    """``ops[0].a.dtype``; keys that are no plain word are quoted."""
    word = re.compile(r"[\w.=-]+")
    steps = (f".{s}" if isinstance(s, str) and word.fullmatch(s) else f"[{json.dumps(s)}]" for s in path)
    return "".join(steps).removeprefix(".")


def nearest(wrote: Any, allowed: Iterable[str]) -> str | None:
    """The one of `allowed` that `wrote` may be a misspelling of."""
    lowered = {text.lower(): text for text in allowed}
    close = difflib.get_close_matches(wrote.lower(), lowered, 1) if isinstance(wrote, str) else []
    return lowered[close[0]] if close and lowered[close[0]] != wrote else None  # equal: 1 is allowed, "1" is not


def read(report: Report) -> Node:
    """The content of the report's file. Duplicate keys, tags and unreadable scalars go to the report.

    Raises:
        SpecError: there is no such file, or it is not one document of UTF-8 YAML.
    """
    text = _decode(report)
    loader = YAML(typ="safe", pure=True)  # libyaml, where installed, has other positions and messages
    loader.composer.warn_double_anchors = False
    try:
        root = loader.compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = ": ".join(filter(None, ("not YAML", error.context, error.problem)))
        if "flow" in message and "${" in text:
            message += '; within { } and [ ] a placeholder needs quotes: "${k}"'
        raise report.fatal((mark.line + 1, mark.column + 1), message) from None
    except ReaderError as error:
        raise report.fatal(_end(text[: error.position]), f"not YAML: character U+{error.character:04X}") from None
    except RecursionError:
        raise report.fatal(None, f"more than {MAX_DEPTH} levels deep") from None
    except Exception as error:  # ruamel lets OverflowError, ValueError and others escape
        raise report.fatal(None, f"not YAML: {error}") from None
    if root is None:
        raise report.fatal((1, 1), "the file is empty; a spec starts with kgen: 1")
    return _Reader(report).node(root, ())


def _decode(report: Report) -> str:
    try:
        data = Path(report.file).read_bytes()
    except (OSError, ValueError) as error:
        raise report.fatal(None, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        mark = _end(data[: error.start].decode())
        raise report.fatal(mark, f"byte 0x{data[error.start]:02x} is not UTF-8: save the file as UTF-8") from None


def _end(text: str) -> Mark:
    """The position after `text`."""
    lines = text.split("\n")
    return len(lines), len(lines[-1]) + 1


class _Reader:
    """Turns ruamel's nodes into ours."""

    scalars: Mapping[str, Callable[[str], Any]] = {
        **dict.fromkeys(("str", "timestamp", "merge", "value"), str),  # only the first is a type of YAML 1.2
        "null": lambda text: None,
        "bool": lambda text: {"true": True, "false": False}[text.lower()],
        "int": lambda text: _bounded(int(text.replace("_", ""), 0)),
        "float": lambda text: _bounded(float(text.replace("_", ""))),
    }

    def __init__(self, report: Report):
        self.report = report
        self.count = 0

    def node(self, raw: Any, path: Steps, key_mark: Mark | None = None) -> Node:
        empty = raw.start_mark.index == raw.end_mark.index  # ruamel puts it where the next token is
        mark = key_mark if key_mark and empty else _mark(raw)
        self.count += 1
        # An alias may hold itself, and aliases of aliases grow exponentially.
        if self.count > MAX_VALUES or len(path) > MAX_DEPTH:
            raise self.report.fatal(
                mark, f"more than {MAX_VALUES} values, or {MAX_DEPTH} levels, with aliases expanded"
            )
        value, kind = Broken(), str(raw.tag).removeprefix("tag:yaml.org,2002:")
        if (raw.id, kind) == ("mapping", "map"):
            value = self.mapping(raw, path)
        elif (raw.id, kind) == ("sequence", "seq"):
            value = [self.node(item, (*path, i)) for i, item in enumerate(raw.value)]
        elif raw.id != "scalar" or kind not in self.scalars:
            self.report.add(path, mark, f"the tag {raw.tag} is not allowed: a spec is plain data")
        else:
            try:
                value = self.scalars[kind](_text(raw))
            except (ValueError, KeyError, OverflowError):
                message = f"{raw.value[:40]!r} cannot be read as {kind}"
                self.report.add(path, mark, message, ("true", "false", "decimal numbers below 2**63", "quoted text"))
        return Node(value, mark, key_mark)

    def mapping(self, raw: Any, path: Steps) -> dict[str, Node]:
        items: dict[str, Node] = {}
        for raw_key, raw_item in raw.value:
            mark = _mark(raw_key)
            try:
                key = _text(raw_key)  # as written, so that 1 or yes are keys like others
            except ValueError:
                self.report.add(path, mark, "a key must be text")
                continue
            if key in items:
                line = items[key].key_mark[0]
                self.report.add((*path, key), mark, f"duplicate key: first used at line {line}; drop one")
            else:
                items[key] = self.node(raw_item, (*path, key), mark)
        return items


def _mark(raw: Any) -> Mark:
    return raw.start_mark.line + 1, raw.start_mark.column + 1


def _text(raw: Any) -> str:
    r"""The text of a scalar. ValueError: it is no scalar, or has half a character, such as "\ud800"."""
    if raw.id != "scalar":
        raise ValueError
    raw.value.encode()
    return raw.value


def _bounded(number: float) -> float:
    if not abs(number) < 1 << 63:
        raise OverflowError
    return number
