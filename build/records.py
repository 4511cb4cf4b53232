"""What was measured on a device: one JSON file a device under ``specs/records``, sorted so that diffs stay small.

An entry is keyed by the kernels it is about (their ids): when a kernel changes, its entries are stale and no build
takes them. Fields: ``kind`` (verify or bench), ``operator``, ``dims``, ``kernels``, ``date``, and what was measured.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kgen.build.files import write_atomic

Entry = dict[str, Any]


@dataclass(frozen=True)
class Records:
    """Entries by device name."""

    devices: dict[str, list[Entry]] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: str | Path) -> Records:
        """Every ``*.json`` under `folder`; none where it does not exist."""
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
        return cls({value["device"]: value["entries"] for value in found if "entries" in value})

    def __bool__(self) -> bool:
        return any(self.devices.values())

    def of(self, kernels: Collection[str]) -> Records:
        """The entries about `kernels` alone."""
        kept = {device: [e for e in entries if set(e["kernels"]) <= set(kernels)] for device, entries in self._items()}
        return Records({device: entries for device, entries in kept.items() if entries})

    def merge(self, device: str, entries: Iterable[Entry]) -> Records:
        """With `entries` added: a new one replaces an older one of the same kind, operator, kernels and dims."""
        merged = {_key(entry): entry for entry in (*self.devices.get(device, ()), *entries)}
        return Records({**self.devices, device: [merged[key] for key in sorted(merged)]})

    def dumps(self) -> bytes:
        """All devices in one JSON value."""
        return json.dumps(self.devices, indent=1, sort_keys=True).encode() + b"\n"

    def save(self, folder: str | Path) -> None:
        """Write one file a device."""
        for device, entries in self._items():
            name = "".join(c if c.isalnum() else "_" for c in device.lower())
            text = json.dumps({"device": device, "entries": entries}, indent=1, sort_keys=True)
            write_atomic(Path(folder) / f"{name}.json", text.encode() + b"\n")

    def _items(self) -> Iterable[tuple[str, list[Entry]]]:
        return sorted(self.devices.items())


def _key(entry: Entry) -> str:
    return json.dumps([entry["operator"], entry["dims"], entry["kind"], entry["kernels"]], sort_keys=True)
