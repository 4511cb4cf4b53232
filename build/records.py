"""What was measured on a device: one JSON file a device under ``specs/records``, sorted so that diffs stay small.

An entry is about a contract (by its digest) at a point: ``contract``, ``dims`` and ``kind`` (verify, bench or tune) are
its key, and a newer entry replaces an older one. ``operator`` is a label. ``kernels`` are the ids of what ran: when one
changes, its entries are stale, and no bundle takes them along. Entries from before there were digests have no
``contract``; operator and kernels stand for it until the point is measured again.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kgen.build.files import write_atomic
from kgen.runtime.errors import BuildError

Entry = dict[str, Any]


@dataclass(frozen=True)
class Records:
    """Entries by device name."""

    devices: dict[str, list[Entry]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path) -> Records:
        """Every ``*.json`` of the folder `path`, or the file `path`; none where there is nothing.

        Raises:
            BuildError: a file is not JSON; the message names it.
        """
        path = Path(path)
        files = [path] if path.is_file() else sorted(path.glob("*.json"))
        found = [_read(file) for file in files]
        return cls({value["device"]: value["entries"] for value in found if "entries" in value})

    def __bool__(self) -> bool:
        return any(self.devices.values())

    def of(self, kernels: Collection[str]) -> Records:
        """The entries about `kernels` alone."""
        kept = {device: [e for e in entries if set(e["kernels"]) <= set(kernels)] for device, entries in self._items()}
        return Records({device: entries for device, entries in kept.items() if entries})

    def merge(self, device: str, entries: Iterable[Entry]) -> Records:
        """With `entries` added: a new one replaces an older one of the same contract, dims and kind."""
        entries = list(entries)
        rewritten = {_place(entry) for entry in entries if "contract" in entry}
        older = [e for e in self.devices.get(device, ()) if "contract" in e or _place(e) not in rewritten]
        merged = {_key(entry): entry for entry in (*older, *entries)}
        return Records({**self.devices, device: sorted(merged.values(), key=lambda e: (_place(e), _key(e)))})

    def dumps(self) -> bytes:
        """All devices in one JSON value."""
        return json.dumps(self.devices, indent=1, sort_keys=True).encode() + b"\n"

    def save(self, path: str | Path) -> None:
        """Write one file a device into the folder `path`; where that is a ``.json``, the file of the only device.

        Raises:
            BuildError: entries of several devices do not go into one file.
        """
        path = Path(path)
        if path.suffix == ".json" and len(self.devices) > 1:
            raise BuildError(f"{path} would hold entries of {' and '.join(sorted(self.devices))}: name a folder")
        for device, entries in self._items():
            name = "".join(c if c.isalnum() else "_" for c in device.lower())
            text = json.dumps({"device": device, "entries": entries}, indent=1, sort_keys=True)
            file = path if path.suffix == ".json" else path / f"{name}.json"
            write_atomic(file, text.encode() + b"\n")

    def _items(self) -> Iterable[tuple[str, list[Entry]]]:
        return sorted(self.devices.items())


def _read(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise BuildError(f"{file}: not a file of records: {error}") from None


def _key(entry: Entry) -> str:
    about = [entry["contract"]] if "contract" in entry else [entry["operator"], entry["kernels"]]
    return json.dumps([about, entry["dims"], entry["kind"]], sort_keys=True)


def _place(entry: Entry) -> tuple:
    return entry["operator"], tuple(sorted(entry["dims"].items())), entry["kind"]
