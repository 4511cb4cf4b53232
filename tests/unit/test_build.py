"""The build's parts that need no compiler: cache, atomic files, workers, coverage, digests, PTX clean-up, records."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from kgen.build import workers
from kgen.build.cache import Cache
from kgen.build.coverage import check_coverage
from kgen.build.digest import source_digest
from kgen.build.files import write_atomic, write_directory_atomic
from kgen.build.publish import publish
from kgen.build.records import Records
from kgen.build.toolchain import Report, drop_unused_globals, parse_report
from kgen.runtime.errors import BuildError


def test_cache(tmp_path):
    cache = Cache(tmp_path / "cache")
    assert cache.get("programs", "a") is None
    cache.put("programs", "a", b"content\nwith lines")
    assert cache.get("programs", "a") == b"content\nwith lines" and cache.get("kernels", "a") is None
    path = tmp_path / "cache" / "programs" / "a"
    path.write_bytes(path.read_bytes()[:-1])
    assert cache.get("programs", "a") is None, "a damaged entry counts as absent"
    path.write_bytes(b"")
    assert cache.get("programs", "a") is None


def test_a_killed_writer_leaves_nothing_half_written(tmp_path):
    script = """
        import sys
        from kgen.build.cache import Cache
        cache = Cache(sys.argv[1])
        print("ready", flush=True)
        n = 0
        while True:
            cache.put("k", str(n % 5), bytes([n % 256]) * 100_000)
            n += 1
    """
    for delay in (0.05, 0.12):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
    contents = [Cache(tmp_path).get("k", str(n)) for n in range(5)]
    assert any(contents) and all(c is None or (len(c) == 100_000 and len(set(c)) == 1) for c in contents)


def test_atomic_files(tmp_path):
    write_atomic(tmp_path / "new" / "file", [b"a", b"b"])
    assert (tmp_path / "new" / "file").read_bytes() == b"ab"

    def breaks():
        yield b"half"
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_atomic(tmp_path / "new" / "file", breaks())
    assert (tmp_path / "new" / "file").read_bytes() == b"ab" and os.listdir(tmp_path / "new") == ["file"]
    write_directory_atomic(tmp_path / "d", {"x/y": b"1"})
    write_directory_atomic(tmp_path / "d", {"z": b"2"})
    assert os.listdir(tmp_path / "d") == ["z"] and sorted(os.listdir(tmp_path)) == ["d", "new"]


def test_publishing_replaces_no_stranger(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(BuildError, match="is not a bundle"):
        publish({"manifest.json": b"{}"}, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()


def _work(request):
    if request == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if request == "error":
        raise BuildError("said so")
    if request == "bug":
        print("on stdout", flush=True)
        raise ZeroDivisionError
    return request, os.getpid()


def test_workers_are_pristine_and_survive_crashes(monkeypatch):
    monkeypatch.setattr(workers, "PRELOAD", ())
    results = dict(workers.run(_work, ["a", "crash", "b", "error", "bug"], jobs=2))
    assert sorted(results) == [0, 1, 2, 3, 4]
    assert results[0][0] == "a" and results[2][0] == "b" and results[0][1] != results[2][1]
    assert "exit code -11" in str(results[1]) and str(results[3]) == "said so"
    assert "ZeroDivisionError" in str(results[4]) and "on stdout" in str(results[4])


DIMS = {"m": (1, 1000), "k": (8, 8)}


@pytest.mark.parametrize(
    "guards",
    [
        [1],
        [["<=", "m", 64], 1],
        [["<=", "m", 64], [">", "m", 64]],
        [["==", ["%", "m", 2], 0], ["!=", ["%", "m", 2], 0]],
        [["and", ["<=", "m", 64], [">=", "sm_count", 78]], 1],
    ],
)
def test_complete_guards(guards):
    check_coverage("op", DIMS, guards)


@pytest.mark.parametrize(
    ("guards", "words"),
    [
        ([["<=", "m", 64]], "no variant covers m=65"),
        ([["<", "m", 64], [">", "m", 64]], "no variant covers m=64, k=8"),
        ([["and", [">=", "m", 2], ["<=", "m", 1000]]], "no variant covers m=1,"),
        ([["==", ["%", "m", 2], 0], ["==", ["%", "m", 4], 1]], "no variant covers m=3"),
        ([["<=", "sm_count", 132]], "no variant covers m=1, k=8, sm_count=133"),
        ([1, ["<=", "m", 64]], "variant 1 .* can never run"),
        ([["<=", "m", 2000], 1], "variant 1 .* can never run"),
    ],
)
def test_holes_are_named(guards, words):
    with pytest.raises(BuildError, match=words):
        check_coverage("op", DIMS, guards)


def test_candidates_may_cover_one_another():
    check_coverage("op", DIMS, [1, 1, ["<=", "m", 64], [">", "m", 2000]], holes_only=True)
    with pytest.raises(BuildError, match="no variant covers m=65"):
        check_coverage("op", DIMS, [["<=", "m", 64], ["<=", "m", 32]], holes_only=True)
    with pytest.raises(BuildError, match="no variant covers m=1,"):
        check_coverage("op", DIMS, [], holes_only=True)


def test_a_domain_too_large_to_try():
    with pytest.raises(BuildError, match="the domain has"):
        check_coverage("op", {"m": (1, 1 << 12), "n": (1, 1 << 12)}, [["==", ["%", ["+", "m", "n"], 2], 0], 1])


def test_digests_follow_imports_of_kgen_alone():
    gemm, quantize = source_digest("kgen.compiler.kernels.gemm"), source_digest("kgen.compiler.kernels.quantize")
    assert gemm != quantize and len(gemm) == 64
    assert gemm == source_digest("kgen.compiler.kernels.gemm")


PTX = """\
.global .align 1 .u8 _ZN4cuda5valueE = 1;
.global .align 8 .b8 table[16] = {1, 2};
.global .align 4 .u32 used;
.global .align 4 .u32 never;
.visible .entry kernel() { ld.global.u32 %r1, [used]; }"""


def test_unused_globals_are_dropped():
    kept = drop_unused_globals(PTX)
    assert "used;" in kept and ".entry" in kept
    assert "valueE" not in kept and "never" not in kept and "table" not in kept


def test_the_report_of_ptxas():
    log = """ptxas info    : Function properties for k
        8 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
        ptxas info    : Used 168 registers, used 6 barriers, 1024 bytes smem"""
    assert parse_report(log) == Report(registers=168, stack=8, spills=32, static_smem=1024)


def entry(kernel: str, error: float, operator: str = "op") -> dict:
    return {"kind": "verify", "operator": operator, "dims": {"m": 1}, "kernels": [kernel], "ok": True, "error": error}


def test_records(tmp_path):
    first = Records({}).merge("NVIDIA H200", [entry("k1", 1.0), entry("k1", 1.0, "another")])
    first.save(tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.name == "nvidia_h200.json"
    again = Records.load(tmp_path).merge("NVIDIA H200", [entry("k1", 2.0), entry("k2", 3.0)])
    assert [e["error"] for e in again.devices["NVIDIA H200"]] == [1.0, 2.0, 3.0]
    assert again.of({"k2"}).devices == {"NVIDIA H200": [entry("k2", 3.0)]} and not again.of({"k3"})
    again.save(tmp_path)
    before = path.read_bytes()
    Records.load(tmp_path).save(tmp_path)
    assert path.read_bytes() == before


def point(m: int, kind: str, value: float, contract: str | None = "c1", **changes) -> dict:
    made = {"kind": kind, "operator": "op", "dims": {"m": m}, "kernels": ["k"], "value": value} | changes
    return made | ({"contract": contract} if contract else {})


def values(records: Records) -> list[float]:
    return [entry["value"] for entry in records.devices["NVIDIA H200"]]


def test_records_are_keyed_by_contract():
    """Neither the operator's name nor the kernels tell entries apart; sorted by operator, size and kind."""
    records = Records({}).merge(
        "NVIDIA H200",
        [point(1000, "tune", 5), point(64, "verify", 4), point(64, "bench", 2), point(64, "bench", 3, "c2")],
    )
    assert values(records) == [2, 3, 4, 5]
    assert values(records.merge("NVIDIA H200", [point(64, "bench", 9, kernels=["new"])])) == [9, 3, 4, 5]
    assert values(records.merge("NVIDIA H200", [point(64, "bench", 9, operator="a")])) == [9, 3, 4, 5]
    assert values(records.merge("NVIDIA H200", [point(63, "bench", 9)])) == [9, 2, 3, 4, 5]


def test_entries_without_a_contract_stay_until_measured_again():
    old = [point(64, "bench", 1, None), point(64, "bench", 2, None, kernels=["other"]), point(64, "verify", 3, None)]
    records = Records({}).merge("NVIDIA H200", old)
    assert values(records) == [1, 2, 3]
    assert values(records.merge("NVIDIA H200", [point(64, "bench", 9)])) == [9, 3]
    assert values(records.merge("NVIDIA H200", [point(65, "bench", 9), point(64, "bench", 8, operator="z")])) == [
        1, 2, 3, 9, 8,
    ]  # fmt: skip


def test_records_of_one_device_in_one_file(tmp_path):
    records = Records({}).merge("NVIDIA H200", [point(64, "bench", 1)])
    records.save(tmp_path / "a.json")
    assert Records.load(tmp_path / "a.json") == Records.load(tmp_path) == records
    assert not Records.load(tmp_path / "b.json") and not Records.load(tmp_path / "b")
    with pytest.raises(BuildError, match="entries of B and NVIDIA H200: name a folder"):
        records.merge("B", [point(64, "bench", 1)]).save(tmp_path / "a.json")
