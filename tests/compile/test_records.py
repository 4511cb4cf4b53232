"""The records under specs/records are about kernels that the shipped specs still build with their picks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("tilelang", reason="the compiler's dependencies are not installed: pip install 'kgen[compiler]'")

from kgen.build.cache import Cache
from kgen.build.pipeline import build
from kgen.build.records import Records
from kgen.compiler.spec import load

SPECS = Path(__file__).parents[2] / "specs"


def test_no_record_is_stale(tmp_path):
    records = Records.load(SPECS / "records")
    assert records, "there are no records at all"
    built = [build(load(path), Cache(tmp_path), jobs=os.cpu_count(), records=records) for path in SPECS.glob("*.yaml")]
    kernels = {id for bundle in built for id in bundle.manifest.kernels}
    entries = [entry for found in records.devices.values() for entry in found]
    stale = {(e["operator"], tuple(e["dims"].items())) for e in entries if not set(e["kernels"]) <= kernels}
    assert not stale, "kernels changed since: measure them again, or drop the entries"
    assert not [sentence for bundle in built for sentence in bundle.stale]
    for bundle in built:
        about = records.of(bundle.manifest.kernels).devices
        carried = bundle.files.get("evidence/records/records.json")
        assert (json.loads(carried) if carried else {}) == about
