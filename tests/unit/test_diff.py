"""``kgen diff``: what changed between two bundles, told by what it means."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import bundles
import pytest
from click.testing import CliRunner

from kgen.build.cli import main
from kgen.build.diff import Change, Diff, compare, diff
from kgen.build.publish import publish
from kgen.build.records import Records
from kgen.build.routes import Time, times
from kgen.runtime.bundle import Bundle
from kgen.runtime.format import canonical, container
from kgen.runtime.format import manifest as m

BASE, FILES = bundles.manifest_and_files()
SMALL, LARGE, PRODUCT = BASE.kernels.values()
CODE = b"\x7fELF other, longer code"
CUBIN = canonical.sha256(CODE)
REBUILT = bundles.kernel("rebuilt", PRODUCT.params, CUBIN, PRODUCT.ptx, cluster=(2, 1, 1), registers=40, spills=8)
DEVICE, OTHER = "NVIDIA H200", "NVIDIA H100"


def scale(**fields: Any) -> m.Manifest:
    """The base with `scale` changed."""
    return operators(scale=BASE.operators["scale"]._replace(**fields))


def operators(**changed: m.Operator) -> m.Manifest:
    return BASE._replace(operators=BASE.operators | changed)


def variants(*changes: dict[str, Any] | None) -> m.Manifest:
    """The base with the fields of `scale`'s variants changed, in order; None drops one."""
    old = BASE.operators["scale"].variants
    pairs = zip(old, changes, strict=True)
    return scale(variants=tuple(v._replace(**change) for v, change in pairs if change is not None))


def rebuilt() -> m.Manifest:
    """The base with `product`'s kernel compiled to other code."""
    operator = BASE.operators["product"]
    (variant,) = operator.variants
    (launch,) = variant.program.steps
    program = variant.program._replace(steps=(launch._replace(kernel=REBUILT.id),))
    return operators(product=operator._replace(variants=(variant._replace(program=program),)))._replace(
        kernels={kernel.id: kernel for kernel in (SMALL, LARGE, REBUILT)},
        blobs=BASE.blobs | {CUBIN: m.Blob(CUBIN, "cubin", len(CODE))},
    )


def write(path: Path, manifest: m.Manifest = BASE, records: Records | None = None) -> Path:
    files = FILES | ({f"blobs/{CUBIN}.cubin": CODE} if CUBIN in manifest.blobs else {})
    if records:
        files["evidence/records/records.json"] = data = records.dumps()
        known = m.Evidence(canonical.sha256(data), len(data))
        manifest = manifest._replace(evidence=manifest.evidence | {"records/records.json": known})
    publish(bundles.files_of(manifest, files), path)
    return path


@pytest.fixture
def against_base(tmp_path):
    """The difference from the base to a manifest."""

    def compare(manifest: m.Manifest, **options: Any) -> Diff:
        sides = (write(tmp_path / f"{side}.kgen", x) for side, x in (("a", BASE), ("b", manifest)))
        return diff(*map(Bundle.open, sides), **options)

    return compare


def test_compare():
    a = {"same": {"x": 1}, "gone": None, "deep": {"x": [1], "y": {"z": 1}}}
    assert compare(a, {"same": {"x": 1}, "deep": {"x": [2], "y": {"z": 1, "w": 3}}, "new": 0}) == [
        Change("removed", "gone"),
        Change("changed", "deep.x", [1], [2]),
        Change("added", "deep.y.w", b=3),
        Change("added", "new", b=0),
    ]


def test_the_same(against_base):
    found = against_base(BASE)
    assert found == Diff(True, [], [], [], [], [], [], [], {"operators": 2, "kernels": 3})


def test_header_and_toolchain(against_base):
    found = against_base(BASE._replace(version="1.1.0", min_driver=13010, generator={"nvrtc": "13.1"}))
    assert not found.identical and not found.operators
    assert found.header == [
        Change("changed", "version", "1.0.0", "1.1.0"),
        Change("changed", "min_driver", 13000, 13010),
    ]
    assert found.toolchain == [Change("removed", "kgen", a="test"), Change("added", "nvrtc", b="13.1")]


def test_operators_added_and_removed(against_base):
    operator = BASE.operators["scale"]
    kept = {"product": BASE.operators["product"], "other": operator._replace(name="other")}
    found = against_base(BASE._replace(operators=kept))
    assert [(o.kind, o.name) for o in found.operators] == [("added", "other"), ("removed", "scale")]
    assert Change("added", "op", b="scale") in found.operators[0].contract and not found.operators[0].variants
    assert found.same == {"operators": 1, "kernels": 3}


def test_contract(against_base):
    x, out = BASE.operators["scale"].tensors
    out = out._replace(dtype="float16", strides=(16, 1))
    found = against_base(
        scale(
            abi=2,
            dims={"m": (1, 2048), "k": (8, 8)},
            attrs={"x": {"dtype": "float32"}},
            tensors=(x._replace(align=8), out, bundles.tensor("y", "in", "int8", "m")),
            workloads={"decode": {"m": 4}, "prefill": {"m": 1024}},
        )
    )
    (operator,) = found.operators
    assert (operator.kind, operator.name, operator.variants) == ("changed", "scale", [])
    assert {(c.field, c.kind) for c in operator.contract} == {
        ("abi", "changed"),
        ("dims.m", "changed"),
        ("attrs.x", "added"),
        ("tensors.x.align", "changed"),
        ("tensors.out.dtype", "changed"),
        ("tensors.out.strides", "changed"),
        ("tensors.y", "added"),
        ("order", "changed"),
        ("workloads.decode.m", "changed"),
        ("workloads.prefill", "added"),
    }
    assert Change("changed", "dims.m", [1, 1024], [1, 2048]) in operator.contract


def only_variants(found: Diff) -> list[tuple]:
    (operator,) = found.operators
    assert operator.name == "scale" and not operator.contract
    return [(v.kind, v.a, v.b, [c.field for c in v.changes]) for v in operator.variants]


def test_variants_are_matched_by_config_then_by_guard(against_base):
    other = {"form": "other"}
    assert only_variants(against_base(variants({"guard": ["<=", "m", 4]}, {}))) == [("changed", 0, 0, ["guard"])]
    assert only_variants(against_base(variants({"config": other}, {}))) == [("changed", 0, 0, ["config.form"])]
    dropped = against_base(variants(None, {}))
    (small, *rest) = only_variants(dropped)
    assert small[:3] == ("removed", 0, None) and not rest
    (removed, added) = only_variants(against_base(variants({"config": other, "guard": ["<=", "m", 4]}, {})))
    assert removed[:3] == ("removed", 0, None) and added[:3] == ("added", None, 0)
    assert {"guard", "kernels"} < set(added[3])


def test_variants_in_another_order(against_base):
    small, large = BASE.operators["scale"].variants
    found = against_base(scale(variants=(large._replace(guard=[">", "m", 64]), small._replace(guard=1))))
    assert only_variants(found) == [("changed", 0, 1, ["guard", "index"]), ("changed", 1, 0, ["guard", "index"])]
    assert not found.routes  # the same code runs, whatever its number


def test_what_changed_in_a_program(against_base):
    program = BASE.operators["scale"].variants[0].program
    memset, launch = program.steps
    more = program._replace(workspace_bytes=["+", 512, ["align", ["*", "m", 4], 256]])
    grid = program._replace(steps=(memset, launch._replace(grid=("m", 2, 1))))
    args = program._replace(steps=(memset._replace(byte=1), launch))
    for changed, field in ((more, "workspace_bytes"), (grid, "grids"), (args, "steps")):
        assert only_variants(against_base(variants({"program": changed}, {}))) == [("changed", 0, 0, [field])]


def test_dispatch_of_workloads(against_base):
    (route,) = against_base(variants({"guard": ["<=", "m", 4]}, {})).routes
    assert (route.operator, route.workload, route.dims, route.target) == ("scale", "decode", {"m": 8}, "sm_90a")
    assert (route.a.variant, route.a.kernels, route.b.variant, route.b.kernels) == (0, [SMALL.id], 1, [LARGE.id])
    assert not against_base(variants({"guard": ["<=", "m", 32]}, {})).routes
    few = variants({"guard": ["or", ["<=", "sm_count", 100], ["<=", "m", 4]]}, {})
    assert against_base(few).routes and not against_base(few, sm_count=78).routes
    (refused,) = against_base(scale(dims={"m": (16, 1024), "k": (8, 8)}, workloads={})).routes
    assert refused.a and refused.b is None


def test_kernels(against_base):
    found = against_base(rebuilt())
    (kernel,) = found.kernels
    assert (kernel.kind, kernel.entry, kernel.a, kernel.b) == ("changed", "rebuilt", PRODUCT.id, REBUILT.id)
    told = {c.field: (c.a, c.b) for c in kernel.changes}
    assert told["registers"] == (32, 40) and told["spills"] == (0, 8) and told["cubin_bytes"] == (9, len(CODE))
    assert found.same == {"operators": 1, "kernels": 2}
    assert {c.field: c.b - c.a for c in found.size}["cubin"] == len(CODE)


def test_kernels_without_a_successor(against_base):
    found = against_base(rebuilt()._replace(operators={"scale": BASE.operators["scale"]}))
    assert [(k.kind, k.a, k.b) for k in found.kernels] == [("removed", PRODUCT.id, None), ("added", None, REBUILT.id)]
    facts = {c.field: c.b for c in found.kernels[1].changes}
    assert (facts["registers"], facts["smem"], facts["cubin_bytes"]) == (40, 0, len(CODE))


def test_a_kernel_whose_code_alone_changed(against_base):
    manifest = BASE._replace(kernels=BASE.kernels | {SMALL.id: SMALL._replace(registers=33)})
    (kernel,) = against_base(manifest).kernels
    assert (kernel.kind, kernel.a, kernel.b) == ("changed", SMALL.id, SMALL.id)
    assert kernel.changes == [Change("changed", "registers", 32, 33)]


def entry(kernel: m.Kernel, median: float, kind: str = "bench", **fields: Any) -> dict[str, Any]:
    known = {"operator": "scale", "dims": {"m": 8}, "kernels": [kernel.id], "kind": kind, "method": "cupti"}
    return known | {"sm_count": 132, "us": {"median": median}} | fields


def test_times():
    new = variants({"guard": ["<=", "m", 4]}, {})
    known = Time("scale", "decode", {"m": 8}, DEVICE, "bench", "cupti")

    def measured(*entries: dict[str, Any], **others: list) -> list[Time]:
        return times(BASE, new, [Records({DEVICE: list(entries)}), Records(others)])

    assert measured() == [Time("scale", "decode", {"m": 8})]
    a, b = entry(SMALL, 12.0), entry(LARGE, 10.0)
    both = replace(known, a_us=12.0, b_us=10.0, ratio=1.2)
    assert measured(a, b) == [both]
    assert measured(a) == [replace(known, a_us=12.0)] and measured(b) == [replace(known, b_us=10.0)]
    assert measured(a, b, entry(SMALL, 1.0, "tune"), entry(LARGE, 1.0, "tune")) == [both]
    tuned = [entry(SMALL, 9.0, "tune"), entry(LARGE, 6.0, "tune")]
    assert measured(a, *tuned) == [replace(known, kind="tune", a_us=9.0, b_us=6.0, ratio=1.5)]
    (apart,) = measured(a, b | {"method": "graph"})  # not measured alike
    assert apart.ratio is None
    assert {t.device: t.ratio for t in measured(a, b, **{OTHER: [a]})} == {DEVICE: 1.2, OTHER: None}
    for other in ({"operator": "product"}, {"dims": {"m": 9}}, {"kernels": [PRODUCT.id]}, {"us": {"kgen": 12.0}}):
        assert measured(a | other, b) == measured(b)
    assert times(BASE, BASE, [Records({DEVICE: [a]})]) == [replace(known, a_us=12.0, b_us=12.0, ratio=1.0)]


def run(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["diff", *map(str, args)])
    return result.exit_code, result.stdout, result.stderr


def test_identical(tmp_path):
    a, b, lean = write(tmp_path / "a.kgen"), write(tmp_path / "folder"), tmp_path / "lean.kgen"
    publish({k: bytes(v) for k, v in container.read(a).items() if not k.startswith("evidence/")}, lean)
    code, out, _ = run(a, b, "--exit-code")
    assert code == 0 and out.startswith("identical: handmade 1.0.0  sha256:") and out.count("\n") == 1
    code, out, _ = run(a, lean, "--exit-code")
    assert code == 0 and out.startswith("identical") and "-9" in out


def test_command(tmp_path):
    a, b = write(tmp_path / "a.kgen"), write(tmp_path / "b.kgen", rebuilt()._replace(version="2.0.0"))
    assert run(a, b)[0] == 0 and run(a, b, "--exit-code")[0] == 1
    lines = [" ".join(line.split()) for line in run(a, b)[1].splitlines()]
    assert {
        f"A handmade 1.0.0 {Bundle.open(a).id} {a}",
        "~ version 1.0.0 → 2.0.0",
        "operators: 1 changed, 1 the same",
        f"~ variant 0 (sm_90a) kernels {PRODUCT.id[:12]} → {REBUILT.id[:12]}",
        "kernels: 1 changed, 2 the same",
        f"~ {PRODUCT.id[:12]} → {REBUILT.id[:12]} rebuilt entry product → rebuilt, "
        "registers 32 → 40, spills 0 → 8, cubin_bytes 9 → 23",
        "~ cubin 9 → 32 +23",
    } <= set(lines)
    assert not any("recorded" in line for line in lines)


def test_every_kind_of_change_is_printed(tmp_path):
    x, out = BASE.operators["scale"].tensors
    small, _ = BASE.operators["scale"].variants
    program = small.program._replace(workspace_bytes=["*", "m", 1024])
    new = small._replace(guard=1, config={"form": "new"}, program=program)
    changed = BASE.operators["scale"]._replace(
        dims={"m": (1, 2048), "k": (8, 8)},
        tensors=(x._replace(shape=("m", ["*", 2, 8])), out),
        variants=(small._replace(guard=["<=", "m", 4]), new),
    )
    new = BASE._replace(operators={"scale": changed, "copy": changed._replace(name="copy")})
    _, out, _ = run(write(tmp_path / "a.kgen"), write(tmp_path / "b.kgen", new))
    for line in (
        "+ copy scale@1 k=8 m=1..2048",
        "- product product@1 m=1..4096",
        "~ contract dims.m 1..1024 → 1..2048",
        "~ contract tensors.x.shape [m, 8] → [m, 2 * 8]",
        "~ variant 0 (sm_90a) guard m <= 64 → m <= 4",
        "~ variant 1 (sm_90a) config.form large → new",
        "~ variant 1 (sm_90a) grids [ceildiv(m, 64), 1, 1] → [ceildiv(m, 1), 1, 1]",
        f"~ scale decode m=8 sm_90a variant 0 form=small ({SMALL.id[:12]}) → variant 1 form=new ({SMALL.id[:12]})",
    ):
        assert line in [" ".join(line.split()) for line in out.splitlines()], line


def test_recorded_times(tmp_path):
    """The bundles' own records count too: a folder keeps only the newest of a point."""
    a = write(tmp_path / "a.kgen", records=Records({DEVICE: [entry(SMALL, 12.0)]}))
    b = write(tmp_path / "b.kgen", variants({"guard": ["<=", "m", 4]}, {}))
    Records({DEVICE: [entry(LARGE, 10.0)]}).save(tmp_path / "records")
    _, out, _ = run(a, b, "--record", tmp_path / "records")
    assert " ".join(out.splitlines()[-1].split()) == f"scale decode m=8 12.00 µs → 10.00 µs 1.20× {DEVICE}, bench"
    (tmp_path / "records/nvidia_h200.json").unlink()
    _, out, _ = run(a, b, "--record", tmp_path / "records")
    assert "12.00 µs → not recorded" in out
    _, out, _ = run(b, b, "--record", tmp_path / "records")
    assert out.startswith("identical") and " ".join(out.splitlines()[-1].split()) == "scale decode m=8 not recorded"


def test_json(tmp_path):
    a, b = write(tmp_path / "a.kgen"), write(tmp_path / "b.kgen", rebuilt())
    code, out, _ = run("--json", a, b)
    value = json.loads(out)
    assert code == 0 and set(value) == {
        "a", "b", "identical", "header", "toolchain", "operators", "routes", "kernels", "evidence", "size", "same",
        "times",
    }  # fmt: skip
    assert set(value["a"]) == {"path", "id", "name", "version", "bytes"} and value["times"] is None
    assert set(value["operators"][0]) == {"kind", "name", "contract", "variants"}
    assert set(value["operators"][0]["variants"][0]) == {"kind", "target", "config", "a", "b", "changes"}
    assert set(value["kernels"][0]) == {"kind", "entry", "a", "b", "changes"}
    assert set(value["kernels"][0]["changes"][0]) == {"kind", "field", "a", "b"}
    (tmp_path / "records").mkdir()
    _, out, _ = run("--json", a, b, "--record", tmp_path / "records")
    (time,) = json.loads(out)["times"]
    assert time == {
        "operator": "scale", "workload": "decode", "dims": {"m": 8}, "device": None, "kind": None, "method": None,
        "a_us": None, "b_us": None, "ratio": None,
    }  # fmt: skip


def test_errors_name_the_file(tmp_path):
    good = write(tmp_path / "good.kgen")
    junk, malformed, records = tmp_path / "junk.kgen", tmp_path / "malformed", tmp_path / "records.json"
    junk.write_bytes(b"junk" * 100)
    publish(bundles.files_of(m.to_json(BASE) | {"name": 5}, FILES), malformed)
    records.write_text("{")
    for args, code, named in (
        ((good, tmp_path / "absent.kgen"), 2, "absent.kgen"),
        ((good, junk), 3, "junk.kgen"),
        ((malformed, good), 3, "malformed: manifest.name"),
        ((good, good, "--record", records), 1, "records.json"),
        ((good, good, "--record", tmp_path / "absent"), 2, "absent"),
        ((good,), 2, "'B'"),
    ):
        found, out, err = run(*args)
        assert found == code and named in err and not out, args
