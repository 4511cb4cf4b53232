"""The spec language: what is accepted, and what a wrong spec is told."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kgen.compiler.spec import Spec, load, schema
from kgen.runtime.errors import SpecError

GOOD = """\
kgen: 1
bundle: demo
version: 1.0.0
targets: [sm_90a]
ops:
  - name: down
    op: gemm
    a: {dtype: bfloat16}
    b: {dtype: bfloat16, major: k}
    out: {dtype: bfloat16}
    dims: {m: 1..8192, n: 7168, k: 2048}
    workloads:
      decode-T=128: {m: 128}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "spec.yaml"
    path.write_text(textwrap.dedent(text))
    return path


def problems(folder: Path, text: str):
    with pytest.raises(SpecError) as error:
        load(write(folder, text))
    return error.value.problems


def test_a_good_spec(tmp_path):
    spec = load(write(tmp_path, GOOD))
    assert (spec.name, spec.version, spec.targets) == ("demo", "1.0.0", ("sm_90a",))
    (gemm,) = spec.operators
    assert gemm.dims == {"m": (1, 8192), "n": (7168, 7168), "k": (2048, 2048)}
    assert (gemm.b.major, gemm.workloads) == ("k", {"decode-T=128": {"m": 128}})


@pytest.mark.parametrize(
    ("old", "new", "line", "column", "field", "words"),
    [
        ("kgen: 1", "kgen: 2", 1, 7, "kgen", "allowed: 1"),
        ("bundle: demo", "bundel: demo", 2, 1, "bundel", "did you mean 'bundle'?"),
        ("version: 1.0.0", "version: 1.0", 3, 10, "version", "three numbers, such as 1.0.0"),
        ("sm_90a", "sm_100", 4, 11, "targets[0]", "allowed: sm_90a"),
        ("op: gemm", "op: gem", 7, 9, "ops[0].op", "did you mean 'gemm'?"),
        ("op: gemm", "opp: gemm", 6, 5, "ops[0].op", "missing"),
        ("a: {dtype: bfloat16}", "a: {dtype: bf16}", 8, 16, "ops[0].a.dtype", "did you mean 'bfloat16'?"),
        ("a: {dtype: bfloat16}", "a: {dtype: 16}", 8, 16, "ops[0].a.dtype", "allowed: bfloat16, float16"),
        ("a: {dtype: bfloat16}", "a: {dtypes: bfloat16}", 8, 9, "ops[0].a.dtypes", "did you mean 'dtype'?"),
        ("major: k", "major: m", 9, 33, "ops[0].b.major", "allowed: k, n"),
        ("    out: {dtype: bfloat16}\n", "", 6, 5, "ops[0].out", "missing"),
        ("out: {dtype: bfloat16}", "out: {dtype: float16}", 10, 18, "ops[0].out.dtype", "must equal a.dtype"),
        ("m: 1..8192", "m: 8192..1", 11, 15, "ops[0].dims.m", "allowed: 1..8192"),
        ("m: 1..8192", "m: 0", 11, 15, "ops[0].dims.m", "an integer from 1"),
        ("m: 1..8192", "m: many", 11, 15, "ops[0].dims.m", "a range such as 1..8192"),
        ("n: 7168", "n: 1..7168", 11, 27, "ops[0].dims.n", "only m may be a range"),
        ("n: 7168", "n: 7169", 11, 27, "ops[0].dims.n", "not a multiple of 8"),
        ("k: 2048", "kk: 2048", 11, 33, "ops[0].dims.kk", "unknown key"),
        ("{m: 128}", "{m: 9000}", 13, 25, "ops[0].workloads.decode-T=128.m", "1..8192"),
        ("{m: 128}", "{}", 13, 21, "ops[0].workloads.decode-T=128.m", "missing"),
        ("{m: 128}", "{m: 1, n: 2}", 13, 28, "ops[0].workloads.decode-T=128.n", "no range dim"),
        ("dims: {m: 1..8192,", "dims: {m: 1..8192, m: 2,", 11, 24, "ops[0].dims.m", "duplicate key"),
        ("name: down", "name: do wn", 6, 11, "ops[0].name", "letters, digits"),
    ],
)
def test_wrong_specs(tmp_path, old, new, line, column, field, words):
    assert old in GOOD
    (problem, *others) = problems(tmp_path, GOOD.replace(old, new))
    assert others == []
    assert (problem.line, problem.column, problem.field) == (line, column, field)
    text = str(problem)
    assert words in text and text.startswith(f"{problem.file}:{line}:{column}: {field}: ") and "\n" not in text
    assert "pydantic" not in text and "http" not in text


def test_every_problem_is_reported_at_once(tmp_path):
    text = GOOD.replace("bfloat16}", "bf16}").replace("version: 1.0.0", "version: x").replace("k: 2048", "k: 2047")
    found = [problem.field for problem in problems(tmp_path, text)]
    assert found == ["version", "ops[0].a.dtype", "ops[0].out.dtype"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the file is empty"),
        ("- a\n- b\n", "a spec is a mapping"),
        ("kgen: [1\n", "not YAML"),
        ("kgen: !!python/object:os.system 1\n", "the tag"),
        ("kgen: 1\n---\nkgen: 1\n", "not YAML"),
    ],
)
def test_no_spec_at_all(tmp_path, text, words):
    assert any(words in str(problem) for problem in problems(tmp_path, text))


def test_unreadable_files(tmp_path):
    with pytest.raises(SpecError, match="cannot be read"):
        load(tmp_path / "absent.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"bundle: caf\xe9\n")
    with pytest.raises(SpecError, match=r"latin.yaml:1:12: byte 0xe9 is not UTF-8"):
        load(tmp_path / "latin.yaml")


MATRIX = """\
kgen: 1
bundle: demo
version: 1.0.0
targets: [sm_90a]
ops:
  - name: q_${dtype}_${shape.k}
    op: quantize
    matrix: {dtype: [float16, float32], shape: [{k: 4096}, {k: 4099}]}
    x: {dtype: "${dtype}"}
    q: {dtype: int8, scale: channel}
    dims: {m: 1..16, k: "${shape.k}"}
"""


def test_matrix(tmp_path):
    spec = load(write(tmp_path, MATRIX))
    assert [op.name for op in spec.operators] == [f"q_{d}_{k}" for d in ("float16", "float32") for k in (4096, 4099)]
    assert [op.static("k") for op in spec.operators] == [4096, 4099] * 2


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("float32]", "float8]", "(with dtype=float8, shape="),
        ("${shape.k}\n", "${shape.n}\n", "names nothing in matrix"),
        ("q_${dtype}_${shape.k}", "q_${dtype}", "is also the name of the operator at line 6"),
        ("[float16, float32]", "[]", "at least one value"),
    ],
)
def test_wrong_matrices(tmp_path, old, new, words):
    assert any(words in str(problem) for problem in problems(tmp_path, MATRIX.replace(old, new)))


def test_an_unused_axis(tmp_path):
    text = MATRIX.replace("matrix: {", "matrix: {unused: [1], ")
    assert any("matrix.unused: is never used" in str(problem) for problem in problems(tmp_path, text))


def test_schema_names_what_a_spec_may_say():
    value = schema()
    assert value["$schema"].endswith("2020-12/schema") and set(value["required"]) >= {"kgen", "bundle", "ops"}
    text = str(value)
    assert "bfloat16" in text and "channel" in text and "Placeholder" in text


def test_shipped_specs_load():
    folder = Path(__file__).parents[2] / "specs"
    for path in folder.glob("*.yaml"):
        assert load(path).operators


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_garbage_is_refused_and_nothing_else_escapes(tmp_path_factory, data):
    lines = MATRIX.splitlines()
    at = data.draw(st.integers(0, len(lines) - 1))
    junk = data.draw(st.text(st.sampled_from("${}[]:,-&*!|>'\"#%@ \tab1.\n"), max_size=12))
    column = data.draw(st.integers(0, len(lines[at])))
    lines[at] = lines[at][:column] + junk + lines[at][column + data.draw(st.integers(0, 3)) :]
    path = tmp_path_factory.mktemp("garbage") / "spec.yaml"
    path.write_text("\n".join(lines))
    try:
        assert isinstance(load(path), Spec)
    except SpecError as error:
        assert error.problems and all(str(problem) for problem in error.problems)
