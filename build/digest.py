"""Which source a family's kernels depend on, without importing it: the key under which lowered programs are cached."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

from kgen.runtime.format.canonical import dumps, sha256

_PREFIXES = ("kgen.compiler", "kgen.runtime.format")


def source_digest(module: str) -> str:
    """sha256 over `module`'s source and that of every kgen module it imports, directly or not."""
    seen: set[str] = set()
    pending = [module]
    while pending:
        name = pending.pop()
        if name not in seen and _path(name) is not None:
            seen.add(name)
            pending += _imports(name)
    return sha256(dumps({name: sha256(_path(name).read_bytes()) for name in seen}))


@cache
def _path(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    return Path(spec.origin) if spec and spec.origin else None


@cache
def _imports(module: str) -> tuple[str, ...]:
    names: list[str] = []
    for node in ast.walk(ast.parse(_path(module).read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from package import name`: the name may be a module of its own.
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return tuple(name for name in names if name.startswith(_PREFIXES))
