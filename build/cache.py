"""A content-addressed cache of byte strings. Safe under parallel builds and kill -9; never needed to run anything.

An entry is a file ``<kind>/<key>``: the sha256 of its content in hex, a newline, the content. It is written under
another name, synced and renamed, so it is there whole or not at all; a damaged one counts as absent.
"""

from __future__ import annotations

import os
from pathlib import Path

from kgen.build.files import write_atomic
from kgen.runtime.format.canonical import sha256


def default_root() -> Path:
    """``$XDG_CACHE_HOME/kgen``, or ``~/.cache/kgen``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kgen"


class Cache:
    """Byte strings by kind and key under `root`."""

    def __init__(self, root: str | os.PathLike[str]):
        self.root = Path(root)

    def get(self, kind: str, key: str) -> bytes | None:
        """The content, or None where there is no undamaged entry."""
        try:
            data = (self.root / kind / key).read_bytes()
        except FileNotFoundError:
            return None
        digest, _, content = data.partition(b"\n")
        return content if digest.decode("ascii", "replace") == sha256(content) else None

    def put(self, kind: str, key: str, content: bytes) -> None:
        """Store `content`; equal keys hold equal contents, so the last writer may win."""
        write_atomic(self.root / kind / key, sha256(content).encode() + b"\n" + content)
