"""The spec language: what is accepted, and what a wrong spec is told."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kgen.compiler import ops
from kgen.compiler.ops.contract import STRICT
from kgen.compiler.ops.quantize import Quantize

pytest.importorskip("pydantic", reason="the compiler's dependencies are not installed: pip install 'kgen[compiler]'")

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
        ("a: {dtype: bfloat16}", "a: bfloat16", 8, 8, "ops[0].a", "allowed: {dtype: …}"),
        ("a: {dtype: bfloat16}", "a:", 8, 5, "ops[0].a", "null is not allowed"),
        ("n: 7168", "n: true", 11, 27, "ops[0].dims.n", "true is not allowed"),
        ("n: 7168", "n: 7168.0", 11, 27, "ops[0].dims.n", "7168.0 is not allowed"),
        ("m: 1..8192", "m: 1..9999999999", 11, 15, "ops[0].dims.m", "up to 2147483647"),
        ("m: 1..8192, ", "", 11, 11, "ops[0].dims.m", "missing"),
        ("m: 1..8192", "m: 5..5", 13, 22, "ops[0].workloads.decode-T=128.m", "leave it out"),
        ("decode-T=128", "de code", 13, 7, 'ops[0].workloads["de code"]', "letters, digits"),
        ("[sm_90a]", "[sm_90a, sm_90a]", 4, 19, "targets[1]", "drop one"),
        ("[sm_90a]", "[]", 4, 10, "targets", "a list of sm_90a"),
        ("out: {dtype: bfloat16}", "out: {dtype: ${d}}", 10, 19, "", "a placeholder needs quotes"),
        ("out: {dtype: bfloat16}", 'out: {dtype: "${d}"}', 10, 18, "ops[0].out.dtype", "names nothing in matrix"),
        ("out: {dtype: bfloat16}", "out: !out {dtype: bfloat16}", 10, 10, "ops[0].out", "plain data"),
    ],
)
def test_wrong_specs(tmp_path, old, new, line, column, field, words):
    assert old in GOOD
    (problem, *others) = problems(tmp_path, GOOD.replace(old, new))
    assert others == []
    assert (problem.line, problem.column, problem.field) == (line, column, field)
    text = str(problem)
    where = f"{problem.file}:{line}:{column}: {field}: " if field else f"{problem.file}:{line}:{column}: "
    assert words in text and text.startswith(where) and "\n" not in text
    assert "pydantic" not in text and "http" not in text
    assert json.loads(json.dumps(asdict(problem)))["column"] == column


def test_every_problem_is_reported_at_once(tmp_path):
    text = GOOD.replace("bfloat16}", "bf16}").replace("version: 1.0.0", "version: x").replace("k: 2048", "k: 2047")
    found = [problem.field for problem in problems(tmp_path, text)]
    assert found == ["version", "ops[0].a.dtype", "ops[0].out.dtype"]


@dataclass(frozen=True, kw_only=True)
class Group:
    group: int
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class Block:
    block: tuple[int, int]
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class Scaled(Quantize):
    scale: Literal["tensor", "channel"] | Group | Block
    bias: Literal["row"] | None = None
    __pydantic_config__ = STRICT


SCALED = """\
kgen: 1
bundle: demo
version: 1.0.0
targets: [sm_90a]
ops:
  - {name: q, op: quantize, x: {dtype: float32}, q: {dtype: int8, scale: channel}, dims: {m: 1, k: 8}, scale: SCALE}
"""


@pytest.fixture
def scaled(monkeypatch):
    monkeypatch.setattr(ops, "family", lambda name: Scaled)


@pytest.mark.parametrize(
    ("text", "scale"),
    [("channel", "channel"), ("{group: 128}", Group(group=128)), ("{block: [1, 128]}", Block(block=(1, 128)))],
)
def test_a_union(tmp_path, scaled, text, scale):
    (operator,) = load(write(tmp_path, SCALED.replace("SCALE", text))).operators
    assert (operator.scale, operator.bias) == (scale, None)


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("chanel", "", "allowed: tensor, channel, {group: …}, {block: …}; did you mean 'channel'?"),
        ("3", "", "3 is not allowed; allowed: tensor, channel, {group: …}, {block: …}"),
        ("[1, 128]", "", "[1, 128] is not allowed"),
        ("{}", ".group", "missing; allowed: an integer"),
        ('{group: "128"}', ".group", "'128' is not allowed; allowed: an integer"),
        ("{blok: [1, 128]}", ".blok", "unknown key; allowed: block; did you mean 'block'?"),
        ("{block: [1]}", ".block", "[1] is not allowed; allowed: [an integer, an integer]"),
        ("{block: [1, x]}", ".block[1]", "'x' is not allowed; allowed: an integer"),
        ("tensor, bias: col", None, "ops[0].bias: 'col' is not allowed; allowed: row"),
    ],
)
def test_a_wrong_union(tmp_path, scaled, text, field, words):
    (problem,) = problems(tmp_path, SCALED.replace("SCALE", text))
    assert field is None or problem.field == f"ops[0].scale{field}"
    assert words in str(problem)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the file is empty"),
        ("kgen: &a [*a]\n", "aliases expanded"),
        ("[" * 2000, "levels deep"),
        ('kgen: "\\ud800"\n', "cannot be read as str"),
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


def test_aliases(tmp_path):
    text = GOOD.replace("a: {dtype", "a: &operand {dtype").replace("out: {dtype: bfloat16}", "out: *operand")
    assert load(write(tmp_path, text)).operators[0].out.dtype == "bfloat16"


def test_names_are_unique(tmp_path):
    text = GOOD + GOOD.partition("ops:\n")[2]
    (problem,) = problems(tmp_path, text)
    assert (problem.line, problem.field) == (14, "ops[1].name") and "at line 6" in problem.message


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
    mapping = value["properties"]["ops"]["items"]["discriminator"]["mapping"]
    assert sorted(mapping) == ops.names()
    for op, reference in mapping.items():
        entry = value["$defs"][reference.rpartition("/")[2]]
        assert set(entry["properties"]) == {"name", "op", "dims", "workloads", "matrix", *ops.family(op).own_fields()}
        assert entry["additionalProperties"] is False and {"name", "op", "dims"} <= set(entry["required"])


def test_shipped_specs_load():
    folder = Path(__file__).parents[2] / "specs"
    for path in folder.glob("*.yaml"):
        assert load(path).operators


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=60))
def test_bytes_are_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("bytes") / "spec.yaml"
    path.write_bytes(data)
    with pytest.raises(SpecError):
        load(path)


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
        assert error.problems and all(len(str(problem).splitlines()) == 1 for problem in error.problems)
