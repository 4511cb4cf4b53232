"""Expressions, canonical JSON, architecture rules, the container."""

from __future__ import annotations

import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kgen.runtime.errors import FormatError, IntegrityError
from kgen.runtime.format import arch, canonical, container, expr
from kgen.runtime.format.arch import Target

numbers = st.integers(-(1 << 20), 1 << 20)


@given(a=numbers, b=numbers, c=numbers)
def test_expressions_are_python_integers(a, b, c):
    symbols = {"a": a, "b": b}
    value = lambda e: expr.evaluate(e, symbols)  # noqa: E731
    assert value(["+", "a", ["*", "b", c]]) == a + b * c
    assert value(["select", ["<", "a", "b"], "a", "b"]) == min(a, b) == value(["min", "a", "b"])
    if b:
        assert value(["ceildiv", "a", "b"]) == -(-a // b)
        assert value(["align", "a", "b"]) % b == 0
        assert value(["+", ["*", ["//", "a", "b"], "b"], ["%", "a", "b"]]) == a
    assert value(["and", [">=", "a", "b"], ["not", ["==", "a", "b"]]]) == (a > b)


@given(a=numbers, b=numbers)
def test_folding_keeps_the_value(a, b):
    for name in ("+", "*", "-", "min", "max"):
        assert expr.fold(name, a, b) == expr.evaluate([name, a, b], {})
        assert expr.evaluate(expr.fold(name, "x", b), {"x": a}) == expr.evaluate([name, a, b], {})
    assert expr.fold("+", 0, "m") == expr.fold("*", "m", 1) == expr.fold("ceildiv", "m", 1) == "m"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["pow", 2, 3], "is no operator"),
        (["+", 1], "does not take 1"),
        ("x", "unknown symbol"),
        (1.5, "is no integer"),
        (True, "is no integer"),
        ([], "is no operator"),
        (1 << 62, "62 bits"),
        (["+", *range(600)], "too large"),
    ],
)
def test_wrong_expressions(wrong, words):
    with pytest.raises(FormatError, match=words):
        expr.validate(wrong, {"m"})


def test_evaluation_is_total():
    for wrong in (["//", 1, "zero"], ["%", 1, "zero"], ["*", "big", "big"]):
        with pytest.raises(FormatError):
            expr.evaluate(wrong, {"zero": 0, "big": 1 << 40})
    deep: list = ["not", 1]
    for _ in range(100):
        deep = ["not", deep]
    with pytest.raises(FormatError, match="too large"):
        expr.validate(deep, ())


def test_show():
    assert expr.show(["*", ["ceildiv", "m", 128], ["+", "n", 1]]) == "ceildiv(m, 128) * (n + 1)"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(json_values)
def test_canonical_json_has_one_form(value):
    data = canonical.dumps(value)
    assert canonical.loads(data) == value
    assert canonical.dumps(canonical.loads(data)) == data


@pytest.mark.parametrize("text", [b'{"b":1,"a":2}', b"[1, 2]", b"1.5", b'{"a":1,"a":1}', b"[", b"NaN", '"é"'.encode()])
def test_other_json_is_refused(text):
    with pytest.raises(FormatError):
        canonical.loads(text)


@pytest.mark.parametrize(
    ("target", "device", "runs"),
    [
        ("sm_90a", (9, 0), True),
        ("sm_90a", (10, 0), False),
        ("sm_90", (9, 0), True),
        ("sm_100a", (10, 3), False),
        ("sm_100f", (10, 3), True),
        ("sm_100", (10, 3), True),
        ("sm_103", (10, 0), False),
        ("sm_120f", (12, 1), True),
        ("sm_80", (9, 0), False),
    ],
)
def test_what_runs_where(target, device, runs):
    assert Target.parse(target).runs_on(*device) is runs


def test_the_most_specific_target_wins():
    assert arch.best(["sm_90", "sm_90a", "sm_100f"], 9, 0) == "sm_90a"
    assert arch.best(["sm_100", "sm_100f"], 10, 3) == "sm_100f"
    assert arch.best(["sm_90a"], 10, 0) is None
    assert arch.best(["sm_90"], 10, 0, ptx=True) == "sm_90" and arch.best(["sm_90a"], 10, 0, ptx=True) is None


FILES = {"manifest.json": b"{}", "blobs/a.cubin": bytes(range(256)) * 3, "empty": b""}


@pytest.fixture
def packed(tmp_path):
    path = tmp_path / "t.kgen"
    path.write_bytes(b"".join(container.pack(FILES)))
    return path


def test_a_container_is_an_aligned_zip(packed):
    with zipfile.ZipFile(packed) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(name) for name in archive.namelist()} == FILES
    data = packed.read_bytes()
    assert data.index(FILES["blobs/a.cubin"]) % container.ALIGN == 0
    assert {name: bytes(content) for name, content in container.read(packed).items()} == FILES


def test_every_flipped_bit_of_a_container_is_noticed(packed):
    data = packed.read_bytes()
    for at in range(len(data)):
        packed.write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
        with pytest.raises((FormatError, IntegrityError)):
            container.read(packed)


def test_every_truncation_is_noticed(packed):
    data = packed.read_bytes()
    for size in range(0, len(data), 7):
        packed.write_bytes(data[:size])
        with pytest.raises(FormatError):
            container.read(packed)
    packed.write_bytes(data + b"x")
    with pytest.raises(FormatError):
        container.read(packed)


def test_a_repacked_archive_is_refused(packed):
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in FILES.items():
            archive.writestr(name, content)
    with pytest.raises(FormatError, match="laid out"):
        container.read(packed)
