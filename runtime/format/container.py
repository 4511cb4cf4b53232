"""A bundle's files: a directory, or the same in one ``.kgen`` file.

The file is a zip archive whose entries are stored, dated 1980-01-01 and start at multiples of 64 bytes, so that it can
be memory-mapped and used in place; any zip tool reads it. One list of (name, bytes) has exactly one layout: the reader
rebuilds every header from the directory and compares, so that nothing can hide between, behind or under the entries.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from kgen.runtime.errors import FormatError, IntegrityError

ALIGN = 64
MANIFEST = "manifest.json"
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_DATE = 0x21  # 1980-01-01 in MS-DOS form
_PADDING_ID = 0xD935  # the extra field that Android's zipalign introduced for this


class Entry(NamedTuple):
    """One stored file."""

    name: str
    size: int
    crc: int


def _headers(entries: list[Entry]) -> tuple[list[tuple[int, bytes]], list[int], int]:
    """Every byte of the archive that is not content: [(position, bytes)], where each content starts, the total size."""
    headers: list[tuple[int, bytes]] = []
    starts: list[int] = []
    central = b""
    at = 0
    for entry in entries:
        name = entry.name.encode()
        bare = at + _LOCAL.size + len(name) + 4
        pad = -bare % ALIGN
        extra = struct.pack("<HH", _PADDING_ID, pad) + bytes(pad)
        common = (20, 0x800, 0, 0, _DATE, entry.crc, entry.size, entry.size, len(name), len(extra))
        headers.append((at, _LOCAL.pack(b"PK\3\4", *common) + name + extra))
        central += _CENTRAL.pack(b"PK\1\2", 20, *common, 0, 0, 0, 0, at) + name + extra
        starts.append(bare + pad)
        at = bare + pad + entry.size
    count = len(entries)
    end = _END.pack(b"PK\5\6", 0, 0, count, count, len(central), at, 0)
    headers.append((at, central + end))
    return headers, starts, at + len(central) + len(end)


def pack(files: dict[str, bytes]) -> Iterator[bytes]:
    """The archive's bytes, piece by piece; the manifest first, then by name."""
    names = sorted(files, key=lambda name: (name != MANIFEST, name))
    headers, _, total = _headers([Entry(name, len(files[name]), zlib.crc32(files[name])) for name in names])
    if total >= 1 << 32 or len(names) >= 1 << 16:
        raise FormatError(
            f"a .kgen file holds less than 4 GiB in 65,535 entries; this is {total} bytes in {len(names)}"
        )
    for (_, header), name in zip(headers, names, strict=False):
        yield header
        yield files[name]
    yield headers[-1][1]


def read(path: str | os.PathLike[str]) -> dict[str, memoryview]:
    """Every file of the bundle at `path`, by its name.

    Raises:
        FormatError: not a bundle, or not laid out as `pack` does.
        IntegrityError: an entry's content does not match its checksum.
        OSError: the file or directory cannot be read.
    """
    return _read_directory(os.fspath(path)) if os.path.isdir(path) else _read_file(os.fspath(path))


def _read_directory(root: str) -> dict[str, memoryview]:
    if not os.path.isfile(os.path.join(root, MANIFEST)):  # before reading what may be anybody's files
        raise FormatError(f"{root}: no {MANIFEST}: this is not a kgen bundle")
    files = {}
    for folder, _, names in os.walk(root):
        for name in names:
            full = os.path.join(folder, name)
            with open(full, "rb") as file:
                files[os.path.relpath(full, root).replace(os.sep, "/")] = memoryview(file.read())
    return files


def _read_file(path: str) -> dict[str, memoryview]:
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size < _END.size:
            raise FormatError(f"{path}: too short to be a kgen bundle")
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    entries = _directory(path, data)
    headers, starts, total = _headers(entries)
    if total != len(data) or any(data[at : at + len(header)] != header for at, header in headers):
        raise FormatError(f"{path}: the archive is not laid out as kgen writes it: it was changed or repacked")
    files = {}
    for entry, start in zip(entries, starts, strict=True):
        content = data[start : start + entry.size]
        if zlib.crc32(content) != entry.crc:
            raise IntegrityError(
                f"{path}: {entry.name} is damaged: its checksum does not match; fetch the bundle again"
            )
        files[entry.name] = content
    if next(iter(files), None) != MANIFEST or len(files) != len(entries):
        raise FormatError(f"{path}: {MANIFEST} must come first and no name twice")
    return files


def _directory(path: str, data: memoryview) -> list[Entry]:
    magic, disk, disk2, here, count, size, at, comment = _END.unpack(data[-_END.size :])
    if magic != b"PK\5\6" or (disk, disk2, comment, here) != (0, 0, 0, count) or at + size + _END.size != len(data):
        raise FormatError(f"{path}: not a kgen bundle, or cut short: no archive directory at its end")
    entries = []
    end = at + size
    while at < end:
        if at + _CENTRAL.size > end:
            raise FormatError(f"{path}: the archive directory is cut short")
        fields = _CENTRAL.unpack(data[at : at + _CENTRAL.size])
        crc, stored, name_size, extra_size = fields[7], fields[9], fields[10], fields[11]
        at += _CENTRAL.size
        name = bytes(data[at : at + name_size]).decode("utf-8", "replace")
        entries.append(Entry(name, stored, crc))
        at += name_size + extra_size
    return entries
