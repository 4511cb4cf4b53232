"""``kgen report``: the published tables as data, which operators are theirs, and what counts as measured."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import bundles
import pytest
from click.testing import CliRunner

pytest.importorskip("ruamel.yaml", reason="the compiler's dependencies are not installed: pip install 'kgen[compiler]'")

from kgen.build import published
from kgen.build.cli import main
from kgen.build.publish import publish
from kgen.build.records import Records
from kgen.build.report import Row, report, totals
from kgen.build.report_html import render
from kgen.runtime.errors import SpecError
from kgen.runtime.format import manifest as m

TABLES = Path(__file__).parents[2] / "specs/records/published.yaml"
COUNTS = {
    ("BmmFp8NKFwd", "gemm-moe-quant"): 5,
    ("grouped_gemm_nt", "gemm-moe-quant"): 2,
    ("grouped_gemm_3wg_baselines", "gemm-moe-quant"): 12,
    ("BmmFwd", "gemm-moe-quant"): 16,
    ("grouped_gemm_nn", "gemm-moe-quant"): 1,
    ("BmmFp8KNFwd", "gemm-moe-quant"): 5,
    ("GemmW4A16Fwd", "gemm-moe-quant"): 6,
    ("grouped_gemm_tn", "gemm-moe-quant"): 1,
    ("GemmFwd", "gemm-moe-quant"): 14,
    ("GemmFp8Fwd", "gemm-moe-quant"): 15,
    ("MoeGateUpFwd", "gemm-moe-quant"): 2,
    ("MoeGroupedGemmNopadFwd", "gemm-moe-quant"): 4,
    ("MoePermuteAlignFwd", "gemm-moe-quant"): 12,
    ("MoeUnpermuteFwd", "gemm-moe-quant"): 8,
    ("MoePermuteNopadFwd", "gemm-moe-quant"): 20,
    ("FusedTopK", "gemm-moe-quant"): 8,
    ("FusedMoeFwd", "gemm-moe-quant"): 6,
    ("FusedMoEExpertsNopadPersistent3WGFwd", "gemm-moe-quant"): 6,
    ("SharedFusedMoE", "gemm-moe-quant"): 5,
    ("FP8LightningIndexerFwd", "gemm-moe-quant"): 1,
    ("FP8QuantFwd", "gemm-moe-quant"): 3,
    ("INT8QuantPerTensorFwd", "quant-dequant"): 8,
    ("INT8QuantPerChannelFwd", "quant-dequant"): 8,
    ("INT8QuantPerBlockFwd", "quant-dequant"): 8,
    ("SmoothQuantFwd", "quant-dequant"): 7,
    ("FP8QuantFwd", "quant-dequant"): 5,
    ("FP8QuantPerBlockFwd", "quant-dequant"): 7,
    ("INT4QuantPerGroupFwd", "quant-dequant"): 8,
    ("INT8DequantPerTensorFwd", "quant-dequant"): 7,
    ("INT8DequantPerChannelFwd", "quant-dequant"): 7,
    ("INT8DequantPerBlockFwd", "quant-dequant"): 6,
}
ROWS = published.load(TABLES)
ATTRS = {"x": {"dtype": "bfloat16"}, "q": {"dtype": "int8", "scale": "channel"}}
FIELDS = {
    "op", "workload", "dtype", "built", "verified", "time_ms", "peers", "best_peer", "ratio", "published_best_ms",
    "roofline_share", "page", "dims", "tileops_ms", "published_ratio", "operator", "p10_ms", "p90_ms", "floor_ms",
    "marks",
}  # fmt: skip


def quantize(attrs: dict | None = None, k: int = 4096, **workloads: int) -> tuple[m.Manifest, dict[str, bytes]]:
    """A bundle with one quantize operator, m in 1..65536 with a variant for m = 1, over the handmade bundle's code."""
    base, files = bundles.manifest_and_files()
    small, large, _ = base.kernels.values()

    def variant(kernel: m.Kernel, guard: object) -> m.Variant:
        args = (*(m.Arg(pointer=name) for name in ("x", "q", "x", "q")), m.Arg(value="m"), m.Arg(value=k))
        return m.Variant("sm_90a", guard, {}, m.Program((m.Launch(kernel.id, ("m", 1, 1), args),), (), 0))

    tensors = (bundles.tensor("x", "in", "bfloat16", "m", k), bundles.tensor("q", "out", "int8", "m", k))
    operator = m.Operator(
        "int8_rows", "quantize", 1, {"m": (1, 65536), "k": (k, k)}, attrs or ATTRS, tensors,
        (variant(small, ["<=", "m", 1]), variant(large, 1)),
        {name: {"m": rows} for name, rows in (workloads or {"any-name": 14336}).items()},
    )  # fmt: skip
    kernels = {kernel.id: kernel for kernel in (small, large)}
    return base._replace(kernels=kernels, operators={"int8_rows": operator}), files


def entry(manifest: m.Manifest, kind: str, rows: int = 14336, **fields: object) -> dict:
    """A record entry of the operator's kernel for `rows`."""
    small, large = manifest.kernels
    default = {"ok": True} if kind == "verify" else {"us": {"median": 40.0, "p10": 39.5, "p90": 41.25, "samples": 60}}
    known = {"kind": kind, "operator": "int8_rows", "dims": {"m": rows}, "kernels": [small if rows == 1 else large]}
    return known | default | fields


def peer(us: float, agrees: bool | None = True) -> dict:
    return {"us": {"median": us, "p10": us, "p90": us, "samples": 60}, "agrees": agrees, "note": ""}


def only(rows: list[Row]) -> Row:
    """The one row that is built."""
    (row,) = [row for row in rows if row.built]
    return row


def test_the_tables_hold_every_published_row():
    assert Counter((row.op, row.page) for row in ROWS) == COUNTS
    assert len(COUNTS) == 31 and sum(COUNTS.values()) == len(ROWS) == 223
    assert len({(row.op, row.workload, row.dtype) for row in ROWS}) == 223
    for row in ROWS:
        assert row.dims and all(type(size) is int and size > 0 for size in row.dims.values()), row
        assert row.tileops_ms > 0 and all(time > 0 for time in row.alternatives_ms.values()), row


def test_an_operator_made_from_a_row_is_that_rows_and_no_others():
    def operator_of(row: published.Published) -> m.Operator:
        attrs = copy.deepcopy(row.match)
        for path in row.dtype_fields:
            field, name = path.split(".")
            attrs.setdefault(field, {})[name] = row.dtype
        return m.Operator("any", row.family, 1, {d: (s, s) for d, s in row.dims.items()}, attrs, (), (), {})

    also = []
    for row in ROWS:
        found = [other for other in ROWS if list(published.points(other, operator_of(row)))]
        assert row in found
        also += [(row.op, row.workload, other.op, other.workload) for other in found if other != row]
    twice = {("kv-index-4k-d128-float32", "kv-index-4k")}
    twice |= {(f"kv-index-8k-d64-{dtype}", "kv-index-8k") for dtype in ("float16", "bfloat16")}
    # FP8QuantFwd is on both pages, and three of its rows are too.
    assert sorted(also) == sorted(
        ("FP8QuantFwd", one, "FP8QuantFwd", other) for a, b in twice for one, other in ((a, b), (b, a))
    )


def test_contains():
    attrs = {"q": {"scale": {"block": (128, 128), "major": "row"}}, "bias": None, "x": {"dtype": "float16"}}
    for wanted in ({}, {"q": {"scale": {"block": [128, 128]}}}, {"bias": None, "smooth": None}, {"x": {}}):
        assert published.contains(attrs, wanted), wanted
    for wanted in ({"smooth": {}}, {"bias": {}}, {"x": None}, {"q": {"scale": "channel"}}, {"x": {"dtype": {}}}):
        assert not published.contains(attrs, wanted), wanted


def test_a_rows_match_is_merged_over_its_tables(tmp_path):
    file = tmp_path / "published.yaml"
    row = "{workload: w, dtype: float16, %s dims: {m: 1}, tileops_ms: 1, alternatives_ms: {}}"
    head = "- {op: O, page: p, family: f, match: {q: {dtype: int4, scale: {group: 128}}}, dtype: x.dtype, rows: [%s]}"
    file.write_text(head % row % "match: {q: {scale: {group: 64}}},")
    (loaded,) = published.load(file)
    assert loaded.match == {"q": {"dtype": "int4", "scale": {"group": 64}}} and loaded.best_ms is None
    for wrong in ("- 5", "a: [", "- {op: O}", head % "{workload: w}", head % row % "unknown: 1,"):
        file.write_text(wrong)
        with pytest.raises(SpecError, match="published"):
            published.load(file)


def test_nothing_is_built_without_bundles_or_with_others():
    for manifests in ([], [bundles.manifest_and_files()[0]]):
        rows = report(ROWS, manifests, [])
        assert [(r.op, r.workload, r.dtype) for r in rows] == [(p.op, p.workload, p.dtype) for p in ROWS]
        assert not any(row.built or row.verified or row.operator for row in rows)
        assert totals(rows) == (223, 0, 0, 0, 0, 0, None)


def test_an_operator_is_built_for_exactly_its_row():
    manifest, _ = quantize()
    row = only(report(ROWS, [manifest], []))
    assert row[:5] == (
        "INT8QuantPerChannelFwd", "quant-dequant", "llama-8b-mlp-up", "bfloat16", {"m": 14336, "k": 4096},
    )  # fmt: skip
    assert row.operator == "handmade/int8_rows" and not row.verified and row.time_ms is None and row.ratio is None
    assert (row.tileops_ms, row.published_best_ms) == (0.0458, 0.0497)
    assert row.published_ratio == pytest.approx(0.0497 / 0.0458)


@pytest.mark.parametrize(
    ("attrs", "k", "rows"),
    [
        (ATTRS, 4096, 14335),  # not the row's m
        (ATTRS, 4099, 14336),  # not its k
        ({**ATTRS, "x": {"dtype": "float32"}}, 4096, 14336),
        ({**ATTRS, "q": {"dtype": "int8", "scale": {"group": 64}}}, 4096, 14336),
        ({**ATTRS, "smooth": {"dtype": "float32"}}, 4096, 14336),  # SmoothQuantFwd has no such row
    ],
)
def test_another_operator_is_not_the_rows(attrs, k, rows):
    manifest, _ = quantize(attrs, k, w=rows)
    assert not any(row.built for row in report(ROWS, [manifest], []))


def test_a_workload_for_each_of_two_rows():
    manifest, _ = quantize(k=4099, few=17, many=3000)  # 3000 rows of 4099 are published in float16 only
    assert only(report(ROWS, [manifest], [])).workload == "ragged-k-few-rows"


def test_verified_and_timed_by_the_selected_kernels_alone():
    manifest, _ = quantize()
    verified, bench = entry(manifest, "verify"), entry(manifest, "bench", sm_count=78)
    row = only(report(ROWS, [manifest], [verified, bench]))
    assert row.verified and (row.time_ms, row.p10_ms, row.p90_ms) == (0.04, 0.0395, 0.04125)
    small, large = manifest.kernels
    for change in ({"kernels": ["0" * 64]}, {"kernels": [small]}, {"kernels": [large, small]}, {"dims": {"m": 1}}):
        row = only(report(ROWS, [manifest], [verified | change, bench | change]))
        assert row.built and not row.verified and row.time_ms is None, change
    failed = verified | {"ok": False}
    assert not only(report(ROWS, [manifest], [failed])).verified
    renamed = {"operator": "its_older_name"}
    assert only(report(ROWS, [manifest], [verified | renamed])).verified
    assert not only(report(ROWS, [manifest], [verified | renamed, failed])).verified
    old = bench | {"us": {"kgen": 40.0, "cublas": 50.0}}  # a race without percentiles
    assert only(report(ROWS, [manifest], [old])).time_ms is None


def test_the_kernels_are_those_selected_on_the_entrys_device():
    manifest, _ = quantize()
    operator = manifest.operators["int8_rows"]
    few_sms = operator.variants[0]._replace(guard=["<=", "sm_count", 100])
    manifest = manifest._replace(operators={"int8_rows": operator._replace(variants=(few_sms, operator.variants[1]))})
    small, large = manifest.kernels
    for fields in ({"sm_count": 78, "kernels": [small]}, {"sm_count": 132, "kernels": [large]}, {"kernels": [large]}):
        assert only(report(ROWS, [manifest], [entry(manifest, "bench", **fields)])).time_ms == 0.04
    for fields in ({"sm_count": 78, "kernels": [large]}, {"sm_count": 132, "kernels": [small]}, {"kernels": [small]}):
        assert only(report(ROWS, [manifest], [entry(manifest, "bench", **fields)])).time_ms is None


def test_the_best_peer_computes_the_same():
    manifest, _ = quantize()
    peers = {"liar": peer(10.0, agrees=False), "vllm": peer(50.0), "unchecked": peer(44.0, agrees=None)}
    bench = entry(manifest, "bench", peers=peers, floor_us={"roofline": 30.0, "streaming": 38.0})
    row = only(report(ROWS, [manifest], [bench]))
    assert row.peers == {"liar": 0.01, "vllm": 0.05, "unchecked": 0.044} and row.marks == ["liar"]
    assert (row.best_peer, row.ratio) == ("unchecked", pytest.approx(1.1))
    assert row.floor_ms == 0.038 and row.roofline_share == pytest.approx(0.75)
    alone = only(report(ROWS, [manifest], [entry(manifest, "bench", peers={"liar": peer(10.0, agrees=False)})]))
    assert alone.time_ms and alone.best_peer is None and alone.ratio is None and alone.roofline_share is None


def test_of_two_operators_the_measured_one_is_shown():
    manifest, _ = quantize()
    operator = manifest.operators["int8_rows"]
    bare = operator._replace(name="bare", variants=(operator.variants[0]._replace(guard=1),))
    both = manifest._replace(operators={"bare": bare, "int8_rows": operator})
    assert only(report(ROWS, [both], [])).operator == "handmade/bare"
    row = only(report(ROWS, [both], [entry(manifest, "bench")]))
    assert row.operator == "handmade/int8_rows" and row.time_ms == 0.04


def test_totals():
    manifest, _ = quantize()
    (row,) = [row for row in report(ROWS, [manifest], [entry(manifest, "verify")]) if row.built]
    rows = [
        row._replace(time_ms=1.0, ratio=2.0),
        row._replace(time_ms=1.0, ratio=0.5),
        row._replace(time_ms=1.0, ratio=1.0, verified=False),
        row._replace(time_ms=1.0, ratio=8.0),
        row._replace(time_ms=1.0),
        row._replace(built=False, verified=False),
    ]
    assert totals(rows)[:6] == (6, 5, 4, 5, 4, 3)
    assert totals(rows).geomean == pytest.approx(8**0.25)


def test_the_page_is_self_contained_and_escapes():
    hostile = "</script><script>alert(1)</script><!-- @DATA@"
    rows = [row._replace(workload=hostile) for row in report(ROWS, [], [])]
    page = render(rows, totals(rows), hostile, [hostile])
    assert not re.search(r"https?:|src=|@import|url\(", page)
    assert page.count("<script") == page.count("</script>") == 2 and "<!--" not in page
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    data = json.loads(text)
    assert data["device"] == hostile and {row["workload"] for row in data["rows"]} == {hostile}
    assert data["totals"]["rows"] == len(data["rows"]) == 223 and set(data["rows"][0]) == FIELDS


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_the_page_in_a_browser(tmp_path):
    manifest, _ = quantize()
    entries = [entry(manifest, "verify"), entry(manifest, "bench", peers={"vllm": peer(50.0)})]
    rows = report(ROWS, [manifest], entries)
    page = tmp_path / "report.html"
    page.write_text(render(rows, totals(rows), "a <b>device</b>", ["handmade 1.0.0"]))
    chromium = ["chromium", "--headless=new", "--no-sandbox", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    dom = subprocess.run([*chromium, page.as_uri()], capture_output=True, text=True, timeout=120, check=True).stdout
    body = re.search(r'<table id="rows">.*?</table>', dom, re.DOTALL)[0]
    assert body.count("<tr") == 1 + 223 and body.count('<tr class="absent">') == 222
    assert body.count('aria-sort="none"') == body.count("<th ") > 0 and "1.25×" in body
    assert "a &lt;b&gt;device&lt;/b&gt; · handmade 1.0.0" in dom


def run(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["report", *map(str, args)])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def bundle(tmp_path, monkeypatch) -> Path:
    """A working folder with a bundle in dist, and its records and the published tables in specs/records."""
    monkeypatch.chdir(tmp_path)
    manifest, files = quantize()
    path = tmp_path / "dist/handmade.kgen"
    publish(bundles.files_of(manifest, files), path)
    peers = {"vllm": peer(50.0), "liar": peer(10.0, agrees=False)}
    entries = [entry(manifest, "verify"), entry(manifest, "bench", peers=peers)]
    Records({"NVIDIA H200": entries}).save("specs/records")
    shutil.copy(TABLES, "specs/records")
    return path


def test_command(bundle):
    code, out, err = run()
    assert code == 0 and "dist/handmade.kgen: handmade 1.0.0, 1 operators" in err
    assert out.count("not built") == 222
    (line,) = [line for line in out.splitlines() if " verified " in line and "rows:" not in line]
    assert " ".join(line.split()) == "llama-8b-mlp-up bfloat16 verified 0.04 vllm 0.05 1.25× 0.0458 0.0497"
    assert "223 rows: 1 built, 1 verified, 1 timed\n1 of 1 compared" in out and out.endswith("1.25×\n")
    code, out, _ = run("--op", "FP8QuantFwd")
    assert code == 0 and out.count("not built") == 8 and "8 rows: 0 built" in out


def test_json(bundle):
    code, out, _ = run("--json", bundle)
    rows = json.loads(out)
    assert code == 0 and [(r["op"], r["workload"], r["dtype"]) for r in rows] == [r[0:3:2] + r[6:7] for r in ROWS]
    assert all(set(row) == FIELDS for row in rows)
    (row,) = [row for row in rows if row["time_ms"] is not None]
    assert (row["ratio"], row["best_peer"], row["marks"]) == (1.25, "vllm", ["liar"])
    _, out, _ = run("--json", "--op", "GemmFwd")
    assert {row["op"] for row in json.loads(out)} == {"GemmFwd"} and len(json.loads(out)) == 14


def test_html_file(bundle):
    code, out, err = run("--html", "out/report.html")
    assert code == 0 and "wrote out/report.html" in err and out.startswith("223 rows")
    rows = report(ROWS, [quantize()[0]], Records.load("specs/records").devices["NVIDIA H200"])
    page = render(rows, totals(rows), "NVIDIA H200", ["handmade 1.0.0"])
    assert Path("out/report.html").read_text() == page


def test_devices(bundle):
    known = Records.load("specs/records")
    Records({**known.devices, "Another": []}).save("specs/records")
    code, _, err = run()
    assert code == 2 and "--device" in err and "NVIDIA H200" in err and "Another" in err
    assert "1 timed" in run("--device", "NVIDIA H200")[1] and "0 timed" in run("--device", "Another")[1]
    code, _, err = run("--device", "H100")
    assert code == 2 and "'H100'" in err and "Another" in err


def test_without_bundles_or_records(bundle):
    bundle.unlink()
    Path("specs/records/nvidia_h200.json").unlink()
    code, out, err = run()
    assert code == 0 and "no bundles" in err and "223 rows: 0 built, 0 verified, 0 timed" in out
    assert run("--device", "NVIDIA H200")[0] == 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["absent.kgen"], "absent.kgen"),
        (["--records", "absent"], "absent"),
        (["--published", "absent.yaml"], "absent.yaml"),
        (["--records", "dist"], "dist/published.yaml does not exist"),
        (["--op", "Gemm"], "GemmFwd"),
    ],
)
def test_wrong_usage(bundle, args, words):
    code, out, err = run(*args)
    assert code == 2 and words in err and not out
