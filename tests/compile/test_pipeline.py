"""Real builds: tilelang, NVRTC and ptxas, no GPU."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("tilelang", reason="the compiler's dependencies are not installed: pip install 'kgen[compiler]'")

from kgen.build import workers
from kgen.build.cli import main
from kgen.build.records import Records
from kgen.build.toolchain import Code, Toolchain
from kgen.compiler.kernel import KernelSource
from kgen.compiler.ops.quantize import Quantize
from kgen.runtime import Bundle
from kgen.runtime.errors import BuildError
from kgen.runtime.format.manifest import PARAM_KINDS

SPEC = """\
kgen: 1
bundle: tiny
version: 0.1.0
targets: [sm_90a]
ops:
  - name: product
    op: gemm
    a: {dtype: bfloat16}
    b: {dtype: bfloat16, major: n}
    out: {dtype: bfloat16}
    dims: {m: 1..500, n: 136, k: 200}
  - name: fixed
    op: quantize
    x: {dtype: float16}
    q: {dtype: int8, scale: channel}
    dims: {m: 7, k: 99}
  - name: same
    op: quantize
    x: {dtype: float16}
    q: {dtype: int8, scale: channel}
    dims: {m: 7, k: 99}
"""


def kgen(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "spec.yaml").write_text(SPEC)
    subprocess.run(  # as users do: a process of its own
        [sys.executable, "-m", "kgen.build.cli", "build", folder / "spec.yaml", "-o", folder / "tiny.kgen",
         "--cache", folder / "cache", "--check"],
        check=True,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def bundle(folder) -> Bundle:
    return Bundle.open(folder / "tiny.kgen")


def test_what_is_in_the_bundle(bundle):
    manifest = bundle.manifest
    assert list(manifest.operators) == ["fixed", "product", "same"]
    assert len(manifest.kernels) == 2, "equal operators share their kernels"
    (variant,) = manifest.operators["product"].variants
    (launch,) = variant.program.steps
    assert launch.grid == (["min", ["ceildiv", "m", 128], "sm_count"], 1, 1)
    kernel = manifest.kernels[launch.kernel]
    assert kernel.params == ("tensor_map", "tensor_map", "tensor_map", "int32", "int32")
    assert (kernel.block, kernel.cluster, kernel.spills) == ((384, 1, 1), (1, 1, 1), 0)
    maps = {arg.tensor_map.tensor: arg.tensor_map for arg in launch.args if arg.tensor_map}
    assert maps["a"].dims == (200, "m") and maps["a"].strides == (400,)
    assert maps["b"].dims == (136, 200) and maps["out"].box == (64, 64)
    assert [arg.value for arg in launch.args if arg.value] == ["m", "sm_count"]
    (launch,) = manifest.operators["fixed"].variants[0].program.steps
    assert launch.grid == ("m", 1, 1)


def test_small_cubins_and_clean_ptx(bundle):
    for kernel in bundle.manifest.kernels.values():
        assert bundle.manifest.blobs[kernel.cubin].size < 40_000
        ptx = bytes(bundle.blob(kernel.ptx))
        assert b".target sm_90a" in ptx and b"\n.global" not in ptx


def test_the_code_agrees_with_the_manifest(bundle):
    """Parameter sizes as the cubin itself states them."""
    for kernel in bundle.manifest.kernels.values():
        sizes = parameter_sizes(bytes(bundle.blob(kernel.cubin)), kernel.entry)
        assert sizes == [PARAM_KINDS[kind] for kind in kernel.params]


def parameter_sizes(elf: bytes, entry: str) -> list[int]:
    """Sizes from the EIATTR_KPARAM_INFO (0x17) records of section ``.nv.info.<entry>``."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<3H", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * size) for i in range(count)]
    strings = headers[names][4]
    for name, _, _, _, offset, length, *_ in headers:
        if elf[strings + name :].split(b"\0", 1)[0].decode() == f".nv.info.{entry}":
            data, found, at = elf[offset : offset + length], {}, 0
            while at < len(data):
                form, attribute, value = struct.unpack_from("<BBH", data, at)
                at += 4
                if form == 4:  # EIFMT_SVAL: `value` bytes follow
                    if attribute == 0x17:
                        _, ordinal, _, flags = struct.unpack_from("<IHHI", data, at)
                        found[ordinal] = flags >> 18
                    at += value
            return [found[i] for i in sorted(found)]
    raise AssertionError(f"no .nv.info of {entry}")


def test_nothing_changed_is_quick_and_equal(folder, bundle):
    start = time.monotonic()
    out = kgen("build", folder / "spec.yaml", "-o", folder / "again.kgen", "--cache", folder / "cache", "--json")
    assert time.monotonic() - start < 3
    assert json.loads(out)[0]["id"] == bundle.id
    assert (folder / "again.kgen").read_bytes() == (folder / "tiny.kgen").read_bytes()


def test_parallel_builds_elsewhere_agree(folder, bundle, tmp_path):
    """Two builds at once, in another folder, with an empty cache that they share: the same bundle."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "spec.yaml").write_text(SPEC)
    command = [sys.executable, "-m", "kgen.build.cli", "build", "spec.yaml", "-o", "t.kgen", "--cache", "../cache"]
    processes = [subprocess.Popen(command, cwd=tmp_path / name) for name in ("a", "b")]
    assert [process.wait() for process in processes] == [0, 0]
    assert {Bundle.open(tmp_path / name / "t.kgen").id for name in ("a", "b")} == {bundle.id}


def test_inspect(folder, bundle):
    text = kgen("inspect", folder / "tiny.kgen")
    for words in ("tiny 0.1.0", bundle.id, "product  gemm@1", "when always", "registers", "gemm_bfloat16_nn"):
        assert words in text
    data = json.loads(kgen("inspect", folder / "tiny.kgen", "--json"))
    assert data["id"] == bundle.id and set(data["verified"].values()) == {False}
    entry = next(kernel.entry for kernel in bundle.manifest.kernels.values() if "gemm" in kernel.entry)
    assert "__global__" in kgen("inspect", folder / "tiny.kgen", entry, "--source")
    assert ".entry" in kgen("inspect", folder / "tiny.kgen", entry, "--ptx")
    assert "HGMMA" in kgen("inspect", folder / "tiny.kgen", entry, "--sass")
    assert "names 0 kernels" in kgen("inspect", folder / "tiny.kgen", "absent", "--ptx", code=2)


def test_explain_and_pack(folder, bundle):
    assert "grid [4, 1, 1]" in kgen("explain", folder / "tiny.kgen", "product", "m=500")
    assert "outside the declared 1..500" in kgen("explain", folder / "tiny.kgen", "product", "m=501", code=2)
    packed = json.loads(kgen("pack", folder / "tiny.kgen", folder / "lean", "--lean", "--json"))
    assert packed["id"] == bundle.id
    lean = Bundle.open(folder / "lean")
    assert lean.id == bundle.id and not (folder / "lean" / "evidence").exists()
    assert lean.evidence(f"sources/{next(iter(bundle.manifest.kernels))}.cu") is None


def test_other_commands(folder, tmp_path):
    assert "3 operators, no problems" in kgen("lint", folder / "spec.yaml")
    assert json.loads(kgen("schema"))["title"] == "Spec"
    assert "dtype: bfloat16 | float16" in kgen("ops", "gemm")
    (tmp_path / "bad.yaml").write_text(SPEC.replace("int8", "int7"))
    text = kgen("build", tmp_path / "bad.yaml", "-o", tmp_path / "bad.kgen", code=2)
    assert "bad.yaml:15:16: ops[1].q.dtype" in text and not (tmp_path / "bad.kgen").exists()
    (tmp_path / "bad.kgen").write_bytes(b"x" * 100)
    kgen("inspect", tmp_path / "bad.kgen", code=3)


def source(body: str, **changes) -> KernelSource:
    fields = {
        "source": f'extern "C" __global__ void __launch_bounds__(1024, 2) k(float* x) {{ {textwrap.dedent(body)} }}',
        "entry": "k",
        "params": ("pointer",),
        "block": (1024, 1, 1),
        "cluster": (1, 1, 1),
        "dynamic_smem": 0,
        "pdl": False,
        "cooperative": False,
    }
    return KernelSource(**fields | changes)


SPILLS = """
float v[64];
for (int i = 0; i < 64; ++i) v[i] = x[i * 1024 + threadIdx.x];
__syncthreads();
for (int i = 0; i < 64; ++i) x[i * 1024 + threadIdx.x] = v[i] * v[63 - i] + v[(i * 7) % 64];
"""


def compiled(kernel: KernelSource, front_end: str = "nvrtc") -> Code:
    """In a process of its own, as `build` does it: this one may have the fake driver in it."""
    ((_, result),) = workers.run(_compile, [(kernel, front_end)], 1)
    if isinstance(result, Exception):
        raise result
    return result


def _compile(request: tuple[KernelSource, str]) -> Code:
    kernel, front_end = request
    return Toolchain(front_end).compile(kernel, "sm_90a")


def test_spills_need_a_reason():
    with pytest.raises(BuildError, match="ptxas reports spills"):
        compiled(source(SPILLS))
    assert compiled(source(SPILLS, tolerates=("spills",))).report.spills > 0


def test_a_wrong_source_is_named_with_the_compilers_words():
    with pytest.raises(BuildError, match=r"k: NVRTC: kernel\.cu\(.*identifier \"y\" is undefined"):
        compiled(source("x[0] = y;"))


def test_front_ends_agree_on_their_report():
    kernel = source("x[threadIdx.x] += 1.f;")
    assert compiled(kernel, "nvrtc").report == compiled(kernel, "nvcc").report


def test_a_failing_program_names_its_operator(tmp_path, folder, monkeypatch):
    (tmp_path / "spec.yaml").write_text(SPEC.replace("k: 200", "k: 208"))
    from kgen.compiler.ops.gemm import Gemm

    config = {"form": "persistent", "tile_m": 64, "tile_n": 128, "tile_k": 64, "stages": 4, "raster": 8}
    monkeypatch.setattr(Gemm, "dispatch", lambda self: [(1, config)])
    text = kgen("build", tmp_path / "spec.yaml", "-o", tmp_path / "t.kgen", "--cache", folder / "cache", code=1)
    assert "product {'form': 'persistent', 'tile_m': 64" in text and "two consumer warpgroups" in text
    assert not (tmp_path / "t.kgen").exists()


ROWS = """\
kgen: 1
bundle: rows
version: 0.1.0
targets: [sm_90a]
ops:
  - name: rows
    op: quantize
    x: {dtype: float16}
    q: {dtype: int8, scale: channel}
    dims: {m: 1..700, k: 264}
  - name: alike
    op: quantize
    x: {dtype: float16}
    q: {dtype: int8, scale: channel}
    dims: {m: 1..700, k: 264}
"""
OFFERED = [{"form": "row", "threads": threads, "each": each} for threads, each in ((64, 8), (32, 8), (32, 16))]
BROKEN = {"form": "row", "threads": 64, "each": 0}


@pytest.fixture
def rows(tmp_path, monkeypatch) -> Path:
    """The spec, in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.yaml").write_text(ROWS)
    return tmp_path / "rows.yaml"


def test_candidates_are_tuned_and_their_picks_frozen(rows, folder):
    """A build of candidates, a record as `kgen tune` writes it, and the next build; then the record grows stale."""
    cache = ("--cache", folder / "cache")
    out = kgen("build", rows, "--candidates", *cache)
    assert "dist/rows-0.1.0-candidates.kgen  2 operators, 3 kernels" in out and "did not build" not in out
    operator = Bundle.open("dist/rows-0.1.0-candidates.kgen").manifest.operators["rows"]
    small, large = OFFERED[1], OFFERED[0]
    ids = [[launch.kernel for launch in v.program.launches] for v in operator.variants]
    assert [v.config for v in operator.variants] == OFFERED and [v.guard for v in operator.variants] == [1, 1, 1]

    contract = Quantize.from_manifest(operator)
    common = {"kind": "tune", "operator": "rows", "contract": contract.digest(), "sm_count": 132}
    entries = [
        {**common, "dims": {"m": 16}, "config": small, "kernels": ids[1], "until": {"m": 99}},
        {**common, "dims": {"m": 700}, "config": large, "kernels": ids[0], "until": {}},
    ]
    Records({}).merge("NVIDIA H200", entries).save("records")
    (result,) = json.loads(kgen("build", rows, *cache, "--check", "--json"))
    assert result["stale"] == result["dropped"] == []
    for operator in Bundle.open("dist/rows-0.1.0.kgen").manifest.operators.values():
        assert [(v.guard, v.config) for v in operator.variants] == [(["<=", "m", 99], small), (1, large)]
    untuned = kgen("build", rows, *cache, "--records", "nowhere", "-o", "untuned.kgen")
    assert "2 operators, 1 kernels" in untuned and "warning" not in untuned

    Records({}).merge("NVIDIA H200", [{**entries[0], "kernels": ["0" * 64]}, entries[1]]).save("records")
    again = kgen("build", rows, *cache)
    assert f"sha256:{result['id']}" not in again, "the stale entry is no evidence"
    for name in ("rows", "alike"):
        assert f"warning: {name} m=16: tuned on other code; run kgen tune again" in again
    (result,) = json.loads(kgen("build", rows, *cache, "--json"))
    assert result["stale"][0] == "rows m=16: tuned on other code; run kgen tune again" and len(result["stale"]) == 2


def test_candidates_that_do_not_build_are_dropped(rows, folder, monkeypatch):
    cache, offered = ("--cache", folder / "cache"), Quantize.candidates
    monkeypatch.setattr(Quantize, "candidates", lambda self: [*offered(self), (1, BROKEN)])
    out = kgen("build", rows, "--candidates", *cache)
    assert f"2 of 8 candidates did not build:\n  rows {BROKEN}: " in out
    assert f"\n  alike {BROKEN}: " in out and "Traceback" not in out
    operator = Bundle.open("dist/rows-0.1.0-candidates.kgen").manifest.operators["rows"]
    assert [v.config for v in operator.variants] == OFFERED

    monkeypatch.setattr(Quantize, "dispatch", lambda self: [(1, BROKEN)])
    text = kgen("build", rows, *cache, "-o", "t.kgen", code=1)
    assert f"rows {BROKEN}: " in text and not Path("t.kgen").exists()
    holes = [(["<=", "m", 9], OFFERED[0]), ([">", "m", 9], BROKEN)]
    monkeypatch.setattr(Quantize, "candidates", lambda self: holes)
    text = kgen("build", rows, "--candidates", *cache, "-o", "t.kgen", code=1)
    assert "rows: no variant covers m=10" in text and f"rows {BROKEN}: " in text
    monkeypatch.setattr(Quantize, "dispatch", lambda self: holes[:1])
    monkeypatch.setattr(Quantize, "candidates", lambda self: holes[:1])
    assert "no variant covers m=10" in kgen("build", rows, "--candidates", *cache, "-o", "t.kgen", code=1)


def test_the_models_word(folder):
    text = kgen("explain", folder / "tiny.kgen", "product", "m=500", "--model")
    assert re.search(r"model: variant 0  rank 1  \d+\.\d µs  bound \w+  waves 1  occupancy 1", text)
    data = json.loads(kgen("explain", folder / "tiny.kgen", "fixed", "--model", "--json"))
    assert [item["rank"] for item in data["model"]] == [1] and 0.6 < data["model"][0]["us"] < 9
    assert "model" not in json.loads(kgen("explain", folder / "tiny.kgen", "fixed", "--json"))
