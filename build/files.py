"""Writing files and directories so that a reader sees all of them or nothing."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path


def write_atomic(path: str | os.PathLike[str], content: bytes | Iterable[bytes]) -> None:
    """Write a file: temporary name beside it, fsync, rename."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    _sync(path.parent)


def write_directory_atomic(path: str | os.PathLike[str], files: dict[str, bytes]) -> None:
    """Write a directory of files: temporary name beside it, fsync, rename; an older one at `path` is replaced."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        for name, content in files.items():
            write_atomic(temporary / name, content)
        os.chmod(temporary, 0o755)
        if path.exists():
            # A directory cannot be renamed over a full one: the old one steps aside first.
            aside = temporary.with_name(temporary.name + ".old")
            os.rename(path, aside)
            os.rename(temporary, path)
            shutil.rmtree(aside)
        else:
            os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync(path.parent)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
