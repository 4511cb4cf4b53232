"""Bundles made to harm: each must end in a FormatError or IntegrityError, before anything is loaded or executed."""

from __future__ import annotations

import copy
import json

import bundles
import pytest

from kgen.runtime import Bundle, errors
from kgen.runtime.format import canonical, parse
from kgen.runtime.format import manifest as m

OPERATOR = ("operators", "scale")
PROGRAM = (*OPERATOR, "variants", 0, "program")
KERNEL = ("kernels", canonical.sha256(b"scale_small"))
BLOB = next(iter(bundles.manifest_and_files()[0].blobs))
DEEP: list = ["not", 1]
for _ in range(400):
    DEEP = ["not", DEEP]

ATTACKS = {
    "a blob that is no hash": (("blobs", "../../etc/passwd"), {"kind": "cubin", "size": 1}),
    "a blob of another kind": (("blobs", BLOB, "kind"), "so"),
    "a blob of no size": (("blobs", BLOB, "size"), -1),
    "evidence outside of its folder": (("evidence", "../x/y.cu"), {"sha256": BLOB, "size": 1}),
    "a kernel without code": ((*KERNEL, "cubin"), "0" * 64),
    "a symbol with a quote": ((*KERNEL, "entry"), 'x"; rm -rf /'),
    "too many threads": ((*KERNEL, "block"), [2048, 1, 1]),
    "a negative shared memory": ((*KERNEL, "dynamic_smem"), -1),
    "an unknown parameter kind": ((*KERNEL, "params"), ["pickle"]),
    "fewer parameters than arguments": ((*KERNEL, "params"), ["pointer"]),
    "an unknown target": ((*KERNEL, "target"), "sm_90x"),
    "a program of an unknown kernel": ((*PROGRAM, "steps", 1, "kernel"), "1" * 64),
    "a pointer to nothing": ((*PROGRAM, "steps", 1, "args", 0, "pointer"), "secret"),
    "a memset of nothing": ((*PROGRAM, "steps", 0, "buffer"), "secret"),
    "an argument of two kinds": ((*PROGRAM, "steps", 1, "args", 4), {"value": 1, "pointer": "x"}),
    "an expression that is code": ((*PROGRAM, "workspace_bytes"), ["__import__", "os"]),
    "an expression over unknown symbols": ((*PROGRAM, "workspace_bytes"), "os"),
    "a deep expression": ((*PROGRAM, "workspace_bytes"), DEEP),
    "a wide expression": ((*PROGRAM, "workspace_bytes"), ["+", *[1] * 10_000]),
    "a huge number": ((*PROGRAM, "workspace_bytes"), 1 << 100),
    "a workspace named like a tensor": ((*PROGRAM, "workspace", 0, "name"), "x"),
    "a grid of two": ((*PROGRAM, "steps", 1, "grid"), [1, 1]),
    "dims in disorder": ((*OPERATOR, "dims", "m"), [5, 1]),
    "a tensor of an unknown type": ((*OPERATOR, "tensors", 0, "dtype"), "object"),
    "a tensor twice": ((*OPERATOR, "tensors", 1, "name"), "x"),
    "an odd alignment": ((*OPERATOR, "tensors", 0, "align"), 24),
    "a workload out of range": ((*OPERATOR, "workloads", "decode", "m"), 9999),
    "an unknown field": ((*OPERATOR, "exec"), "import os"),
    "a future format": (("format",), [2, 0]),
    "no format": (("format",), None),
    "a demand that this reader does not know": (("must_understand",), ["python-hooks"]),
    "targets that are no list": (("targets",), "sm_90a"),
}


def changed(path: tuple, value: object) -> dict:
    """The handmade manifest with one place changed."""
    whole = copy.deepcopy(m.to_json(bundles.manifest_and_files()[0]))
    place = whole
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return whole


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_manifest_is_refused(tmp_path, attack):
    path = bundles.write(tmp_path / "hostile.kgen", changed(*ATTACKS[attack]))
    with pytest.raises((errors.FormatError, errors.IntegrityError)) as error:
        Bundle.open(path)
    assert str(error.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[" * 100_000,
        b'{"format":[1,0]}',
        b'{"format":[1,0],"format":[1,0]}',
        b"\xff\xfe",
        json.dumps(m.to_json(bundles.manifest_and_files()[0]), indent=1).encode(),
        b" " * (parse.MAX_MANIFEST + 1),
    ],
    ids=range(8),
)
def test_bytes_that_are_no_manifest(data):
    with pytest.raises(errors.FormatError):
        parse.parse(data)


def test_every_field_of_the_manifest_is_checked():
    """Put a list where each scalar is, and a scalar where each list or object is: nothing passes unseen."""
    whole = m.to_json(bundles.manifest_and_files()[0])
    passed = []
    for path in _paths(whole, ()):
        place = whole
        for step in path:
            place = place[step]
        wrong = 3.5 if path[-1] == "generator" else [] if not isinstance(place, (list, dict)) else "x"
        try:
            parse.parse(canonical.dumps(changed(path, wrong)))
            passed.append(path)
        except (errors.FormatError, TypeError):
            pass
    # A variant's config and an operator's attrs are free-form: people and the compiler read them, the runtime does not.
    assert [path for path in passed if "config" not in path and "attrs" not in path] == []


def _paths(value: object, path: tuple):
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _paths(item, (*path, key))
