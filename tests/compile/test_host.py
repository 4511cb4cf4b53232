"""The driver of tests/host: instructions, what it does with right kernels and finds in wrong ones. Needs g++."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Iterable
from pathlib import Path

import host
import numpy as np
import products
import pytest
from host import HostDriver

from kgen.build import arena
from kgen.build.verify import Case, Point, points, verify
from kgen.runtime import Bundle
from kgen.runtime.bind import Params
from kgen.runtime.drivers import LaunchConfig
from kgen.runtime.errors import DriverError

pytestmark = pytest.mark.skipif(not host.compiler(), reason="needs g++")

HEADER = ".version 9.0\n.target sm_90a\n.address_size 64\n"
NAN = float("nan")


def f32(value: float) -> str:
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


def bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


class Device:
    """A driver with PTX loaded; `run` launches an entry on copies of arrays and returns them."""

    def __init__(self, ptx: str, folder: Path, guard: int = 64, **options):
        self.driver = HostDriver(None, folder, guard=guard, **options)
        self.guard = guard
        self.library = self.driver.load_library(ptx.encode())

    def run(self, entry: str, *arguments, grid=1, block=1, smem=0, cluster=1, cooperative=False) -> list[np.ndarray]:
        driver, guard = self.driver, self.guard
        arrays = [argument for argument in arguments if isinstance(argument, np.ndarray)]
        addresses = [driver.allocate(array.nbytes + 2 * guard) + guard for array in arrays]
        for address, array in zip(addresses, arrays, strict=True):
            driver.copy_to_device(address, array)
        pointers = iter(addresses)
        values = [
            ctypes.c_uint64(next(pointers)) if isinstance(argument, np.ndarray) else ctypes.c_int32(argument)
            for argument in arguments
        ]
        params = Params(values)
        config = LaunchConfig((grid, 1, 1), (block, 1, 1), (cluster, 1, 1), smem, False, cooperative)
        function = driver.function(driver.kernel(self.library, entry))
        try:
            driver.launcher(function, config, params.address, 0)()
        finally:
            results = [np.empty_like(array) for array in arrays]
            for address, array in zip(addresses, results, strict=True):
                driver.copy_to_host(array, address)
                driver.free(address - guard)
        return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("host")


# An instruction with its result: d is 16, 32 or 64 bits, p a predicate.
INSTRUCTIONS = [
    ("add.s32 d, 0x7fffffff, 1", 0x80000000),
    ("add.sat.s32 d, 0x7fffffff, 1", 0x7FFFFFFF),
    ("add.cc.u32 d, 0xffffffff, 1; addc.u32 d, 5, 6", 12),
    ("sub.cc.u32 d, 0, 1; subc.u32 d, 5, 1", 3),
    ("mul.hi.s32 d, -2, 3", 0xFFFFFFFF),
    ("mul.hi.u32 d, -2, 3", 2),
    ("mul.wide.s32 D, -2, 3", 2**64 - 6),
    ("mul.hi.u64 D, 0xffffffffffffffff, 16", 15),
    ("mad.lo.s32 d, -2, 3, 7", 1),
    ("mad.wide.u32 D, 0xffffffff, 2, 3", 0x200000001),
    ("div.s32 d, -7, 2", 0xFFFFFFFD),
    ("rem.s32 d, -7, 2", 0xFFFFFFFF),
    ("div.u32 d, -7, 2", 0x7FFFFFFC),
    ("min.s32 d, -1, 1", 0xFFFFFFFF),
    ("min.u32 d, -1, 1", 1),
    ("abs.s32 d, -5", 5),
    ("sad.s32 d, -5, 3, 10", 18),
    ("shl.b32 d, 1, 32", 0),
    ("shr.s32 d, -8, 40", 0xFFFFFFFF),
    ("shr.u32 d, -8, 32", 0),
    ("shr.s16 h, 0x8000, 3", 0xF000),
    ("bfe.s32 d, 0x80, 4, 4", 0xFFFFFFF8),
    ("bfe.u32 d, 0x80, 4, 4", 8),
    ("bfe.s32 d, 0x80000000, 28, 8", 0xFFFFFFF8),
    ("bfi.b32 d, 0xf, 0, 8, 4", 0xF00),
    ("bfind.u32 d, 0x100", 8),
    ("bfind.s32 d, -1", 0xFFFFFFFF),
    ("bfind.shiftamt.u32 d, 0x100", 23),
    ("brev.b32 d, 1", 0x80000000),
    ("clz.b64 d, 1", 63),
    ("popc.b32 d, 0xf0f", 8),
    ("fns.b32 d, 0xa0, 0, 2", 7),
    ("bmsk.clamp.b32 d, 4, 8", 0xFF0),
    ("szext.wrap.s32 d, 0x88, 8", 0xFFFFFF88),
    ("prmt.b32 d, 0x33221100, 0x77665544, 0x7250", 0x77225500),
    ("prmt.b32 d, 0x80, 0, 0x8888", 0xFFFFFFFF),
    ("prmt.b32.f4e d, 0x33221100, 0x77665544, 1", 0x44332211),
    ("lop3.b32 d, 0xff00, 0xf0f0, 0xcccc, 0xe8", 0xFCC0),
    ("shf.l.wrap.b32 d, 0x80000000, 1, 33", 3),
    ("shf.r.clamp.b32 d, 1, 3, 40", 3),
    ("dp4a.s32.s32 d, 0xff01ff01, 0x02020202, 5", 5),
    ("mov.b32 {h, g}, 0x12345678; mov.b32 d, {g, h}", 0x56781234),
    ("mov.b64 D, {5, 6}", 0x600000005),
    ("{ .reg .b32 d; mov.b32 d, 4; mov.b32 e, d; } mov.b32 d, e", 4),
    ("mov.u32 d, 7; mov.pred p, 0; @p mov.u32 d, 8; @!p add.u32 d, d, 1; mov.u32 d, d", 8),
    # Floats
    (f"add.f32 d, {f32(1)}, {f32(2**-25)}", bits(1)),
    (f"add.rp.f32 d, {f32(1)}, {f32(2**-40)}", bits(1 + 2**-23)),
    (f"fma.rm.f32 d, {f32(1)}, {f32(1)}, {f32(-(2**-40))}", bits(1 - 2**-24)),
    (f"fma.rn.f32 d, {f32(1 + 2**-12)}, {f32(1 + 2**-12)}, {f32(-1)}", bits(2**-11 + 2**-24)),
    (f"div.rz.f32 d, {f32(2)}, {f32(3)}", 0x3F2AAAAA),
    (f"div.rn.f32 d, {f32(2)}, {f32(3)}", 0x3F2AAAAB),
    (f"sqrt.rp.f32 d, {f32(2)}", 0x3FB504F4),
    (f"mul.f32 d, {f32(2**-100)}, {f32(2**-40)}", 1 << 9),
    (f"mul.ftz.f32 d, {f32(-(2**-100))}, {f32(2**-40)}", 0x80000000),
    (f"add.sat.f32 d, {f32(1)}, {f32(1)}", bits(1)),
    (f"min.f32 d, {f32(NAN)}, {f32(2)}", bits(2)),
    (f"min.NaN.f32 d, {f32(NAN)}, {f32(2)}", 0x7FFFFFFF),
    (f"max.f32 d, 0f80000000, {f32(0)}", 0),
    (f"min.f32 d, {f32(0)}, 0f80000000", 0x80000000),
    (f"sub.f32 d, {f32(float('inf'))}, {f32(float('inf'))}", 0x7FFFFFFF),
    (f"ex2.approx.ftz.f32 d, {f32(3)}", bits(8)),
    (f"copysign.f32 d, {f32(-1)}, {f32(2)}", bits(-2)),
    ("mov.b32 d, 0x3c003c00; mov.b32 e, 0x40003c00; fma.rn.f16x2 d, d, e, d", 0x42004000),
    ("mov.b16 h, 0x3f80; mov.b16 g, 0x0080; fma.rn.bf16 h, h, h, g", 0x3F80),
    ("mov.b16 h, 0x3f80; mov.b16 g, 0x3b80; fma.rn.bf16 h, h, h, g", 0x3F80),
    ("mov.b16 h, 0x3f80; mov.b16 g, 0x3b81; fma.rn.bf16 h, h, h, g", 0x3F81),
    ("mov.b32 d, 0x3f803f80; mov.b32 e, 0x3f804000; add.rn.bf16x2 d, d, e", 0x40004040),
    ("mov.b32 d, 0x7e003c00; mov.b32 e, 0x4000c000; max.f16x2 d, d, e", 0x40003C00),
    # Comparisons
    (f"setp.lt.f32 p, {f32(NAN)}, {f32(1)}", 0),
    (f"setp.ltu.f32 p, {f32(NAN)}, {f32(1)}", 1),
    (f"setp.ne.f32 p, {f32(NAN)}, {f32(1)}", 0),
    (f"setp.neu.f32 p, {f32(NAN)}, {f32(1)}", 1),
    (f"setp.nan.f32 p, {f32(NAN)}, {f32(1)}", 1),
    ("setp.lo.u32 p, 1, -1", 1),
    ("setp.lt.s32 p, 1, -1", 0),
    ("setp.eq.s32 p|q, 1, 1; not.pred q, q; setp.eq.and.s32 p, 1, 1, q", 1),
    ("setp.eq.s32 p|q, 1, 1; setp.eq.or.s32 p, 1, 2, !q", 1),
    (f"set.gt.u32.f32 d, {f32(2)}, {f32(1)}", 0xFFFFFFFF),
    ("setp.eq.s32 p, 1, 2; selp.b32 d, 5, 6, p", 6),
    ("slct.b32.s32 d, 5, 6, -1", 6),
    # Conversions
    (f"cvt.rni.s32.f32 d, {f32(2.5)}", 2),
    (f"cvt.rzi.s32.f32 d, {f32(-2.5)}", 0xFFFFFFFE),
    (f"cvt.rni.s32.f32 d, {f32(1e20)}", 0x7FFFFFFF),
    (f"cvt.rni.u32.f32 d, {f32(-3)}", 0),
    (f"cvt.rni.s32.f32 d, {f32(NAN)}", 0),
    (f"cvt.rpi.f32.f32 d, {f32(1.25)}", bits(2)),
    ("cvt.rn.f32.s32 d, 0x1000001", bits(2.0**24)),
    ("cvt.rz.f32.u64 d, 0x1ffffffffffffff", bits(2.0**57 - 2.0**33)),
    ("mov.u16 h, 0x80; cvt.s32.s8 d, h", 0xFFFFFF80),
    ("cvt.sat.u8.s32 d, 300", 255),
    ("mov.u16 h, 0xff; cvt.s16.s8 h, h", 0xFFFF),
    (f"cvt.sat.f32.f32 d, {f32(NAN)}", 0),
    (f"cvt.rn.f16x2.f32 d, {f32(1)}, {f32(-2)}", 0x3C00C000),
    (f"cvt.rn.bf16x2.f32 d, {f32(1)}, {f32(-2)}", 0x3F80C000),
    (f"cvt.rz.bf16.f32 h, {f32(1 + 2**-7 - 2**-20)}", 0x3F80),
    (f"cvt.rn.relu.bf16.f32 h, {f32(-1)}", 0),
    (f"cvt.rn.satfinite.e4m3x2.f32 h, {f32(500)}, {f32(-float('inf'))}", 0x7EFE),
    (f"cvt.rn.satfinite.e4m3x2.f32 h, {f32(NAN)}, {f32(0.0625)}", 0x7F18),
    (f"cvt.rn.satfinite.e5m2x2.f32 h, {f32(1e6)}, {f32(1)}", 0x7B3C),
    ("mov.u16 h, 0x7e38; cvt.rn.f16x2.e4m3x2 d, h", 0x5F003C00),
    (f"cvt.f64.f32 D, {f32(1.5)}", 0x3FF8000000000000),
]


@pytest.fixture(scope="module")
def results(folder):
    lines = [HEADER, ".visible .entry every(.param .u64 out)\n{\n.reg .b64 base;\nld.param.u64 base, [out];"]
    for i, (text, _) in enumerate(INSTRUCTIONS):
        target = re.search(r"\b[pdDh]\b", text.split(";")[-1])[0]
        lines.append("{ .reg .pred p, q; .reg .b16 h, g; .reg .b32 d, e; .reg .b64 D;")
        lines.append(f"{text};")
        lines.append({"p": "selp.u64 D, 1, 0, p;", "d": "cvt.u64.u32 D, d;", "h": "cvt.u64.u16 D, h;", "D": ""}[target])
        lines.append(f"st.global.u64 [base+{8 * i}], D; }}")
    lines.append("ret;\n}\n")
    out = np.zeros(len(INSTRUCTIONS), np.uint64)
    return Device("\n".join(lines), folder).run("every", out)[0]


@pytest.mark.parametrize("index", range(len(INSTRUCTIONS)), ids=[text for text, _ in INSTRUCTIONS])
def test_an_instruction(results, index):
    assert hex(results[index]) == hex(INSTRUCTIONS[index][1])


@pytest.mark.parametrize(
    ("instruction", "dtype"),
    [
        ("cvt.rn.f16.f32 h, f", "float16"),
        ("cvt.rn.bf16.f32 h, f", "bfloat16"),
        ("cvt.rn.satfinite.e4m3x2.f32 h, 0f00000000, f", "float8_e4m3fn"),
        ("cvt.rn.satfinite.e5m2x2.f32 h, 0f00000000, f", "float8_e5m2"),
    ],
)
def test_rounding_to_a_narrow_float(folder, instruction, dtype):
    """Against ml_dtypes: every value of the format, the ties between them and their neighbours."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    narrow = np.dtype(getattr(ml_dtypes, dtype, dtype))
    codes = np.arange(1 << 8 * narrow.itemsize).astype(f"u{narrow.itemsize}").view(narrow)
    values = np.unique(codes.astype(np.float32)[np.isfinite(codes.astype(np.float32))])
    values = values[values != 0]
    ties = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    x = np.concatenate([values, ties, np.nextafter(ties, np.float32(9e9)), np.nextafter(ties, np.float32(-9e9))])
    x = np.resize(x, -(-x.size // 128) * 128)
    ptx = f"""{HEADER}.visible .entry convert(.param .u64 x, .param .u64 y)
    {{ .reg .b64 a, b; .reg .b32 i, n, c; .reg .f32 f; .reg .b16 h;
    ld.param.u64 a, [x]; ld.param.u64 b, [y];
    mov.u32 i, %tid.x; mov.u32 c, %ctaid.x; mov.u32 n, %ntid.x; mad.lo.u32 i, c, n, i;
    mad.wide.u32 a, i, 4, a; mad.wide.u32 b, i, 2, b;
    ld.global.f32 f, [a]; {instruction}; st.global.u16 [b], h; ret; }}"""
    _, got = Device(ptx, folder).run("convert", x, np.zeros(x.size, np.uint16), grid=x.size // 128, block=128)
    with np.errstate(over="ignore"):
        want = x.astype(narrow).view(f"u{narrow.itemsize}")
    assert np.array_equal(got.astype(want.dtype), want)


def test_an_unknown_instruction_is_named(folder):
    ptx = f"{HEADER}.visible .entry e() {{ wgmma.fence.sync.aligned; ret; }}"
    with pytest.raises(host.Unsupported, match=r"^e: wgmma\.fence\.sync\.aligned$"):
        host.translate(ptx)
    with pytest.raises(host.Unsupported, match=r"mul\.surprising\.f32"):
        host.translate(f"{HEADER}.visible .entry e() {{ .reg .f32 a; mul.surprising.f32 a, a, a; ret; }}")


# Kernels in CUDA.


@pytest.fixture(scope="module")
def compile_cuda():
    pytest.importorskip(
        "tilelang", reason="the compiler's dependencies are not installed: pip install 'kgen[compiler]'"
    )
    from kgen.build.toolchain import Toolchain
    from kgen.compiler.kernel import KernelSource

    def compile(source: Path):
        kernel = KernelSource(source.read_text(), "kernel", (), (1, 1, 1), (1, 1, 1), 0, False, tolerates=("spills",))
        return Toolchain().compile(kernel, "sm_90a")

    return compile


@pytest.fixture(scope="module")
def ptx(compile_cuda):
    return compile_cuda(Path(__file__).with_name("host.cu")).ptx.decode()


@pytest.fixture
def device(ptx, folder):
    return Device(ptx, folder)


def numbers(n: int, scale: int = 1) -> np.ndarray:
    return np.random.default_rng(n).integers(-1000, 1000, n * scale).astype(np.int32)


def test_a_sort_and_a_scan_of_cub(device):
    keys = numbers(512)
    _, out = device.run("sorted", keys, np.zeros(3 * 512, np.int32), 512, block=128)
    ordered, places, ranks = out.reshape(3, 512)
    assert np.array_equal(ordered, np.sort(keys)[::-1]) and np.array_equal(keys[places], ordered)
    striped = ordered.reshape(4, 128).T.reshape(-1) & 1
    assert np.array_equal(ranks, np.cumsum(striped) - striped)


def test_collectives_of_warps(device):
    x = numbers(192)
    _, out = device.run("warps", x, np.zeros(5 * 192, np.int32), 192, grid=2, block=96)
    sums, matches, most, shuffled, all = out.reshape(5, 192)
    warps = x.reshape(-1, 32)
    assert np.array_equal(sums, np.cumsum(warps, axis=1).ravel())
    rest = np.fmod(warps, 3)
    same = (rest[:, :, None] == rest[:, None, :]) @ (1 << np.arange(32, dtype=np.uint64)).astype(object)
    assert [int(m) % 2**32 for m in matches] == [int(m) for m in same.ravel()]
    assert np.array_equal(most, np.repeat(warps.max(axis=1) + (warps & 1).sum(axis=1), 32))
    halves = x.reshape(-1, 16)
    assert np.array_equal(shuffled, np.repeat(halves[:, 3] + (halves == x[0]).any(axis=1), 16))
    assert not all.any()


def test_a_cluster_reads_each_others_shared_memory(device):
    x = numbers(128)
    _, out = device.run("neighbours", x, np.zeros_like(x), 128, grid=4, block=32, cluster=2)
    assert np.array_equal(out, x.reshape(2, 2, 32)[:, ::-1].ravel())


def test_a_grid_waits_for_itself_where_it_is_cooperative(device):
    x = numbers(128)
    _, out = device.run("across_the_grid", x, np.zeros(130, np.int32), 128, grid=4, block=32, cooperative=True)
    assert np.array_equal(out[:128], x) and out[128:].tolist() == [4, x.sum()]
    with pytest.raises(DriverError, match=r"across_the_grid: block .* spins at .*none of the \d+ threads left"):
        device.run("across_the_grid", x, np.zeros(130, np.int32), 128, grid=4, block=32)


@pytest.mark.parametrize(
    ("entry", "launch", "words"),
    [
        ("reads_past_the_end", {}, r"thread \(63, 0, 0\) reads 4 bytes at byte 256 of a buffer of 256"),
        ("writes_before_the_start", {}, r"thread \(0, 0, 0\) writes 4 bytes at byte -4 of a buffer of 256"),
        (
            "past_shared",
            {"smem": 256},
            r"thread \(63, 0, 0\) writes 4 bytes at byte 256 of the block's 256 bytes of shared",
        ),
        ("misaligned", {}, r"reads 16 bytes at 0x\w+, which is misaligned"),
        ("trap", {}, r"trap: block \(0, 0, 0\), thread \(5, 0, 0\) traps"),
        ("not_all_arrive", {}, r"waits at bar.sync, and none of the 64 threads left can go on"),
        ("lane_missing", {}, r"waits at (shfl.sync.idx|bar.sync), and none"),
        (
            "no_cluster_barrier",
            {"block": 32, "grid": 2, "cluster": 2},
            r"reads shared memory of block 0 of .* has exited",
        ),
    ],
)
def test_a_wrong_kernel_is_an_error(device, entry, launch, words):
    x = numbers(64)
    with pytest.raises(DriverError, match=words):
        device.run(entry, x, np.zeros_like(x), 64, **{"block": 64, **launch})
    device.run("neighbours", x, np.zeros_like(x), 64, grid=2, block=32, cluster=2)  # the device goes on


def test_a_missing_barrier_gives_other_results(device):
    x = numbers(64)
    found = [device.run("no_barrier", x, np.zeros_like(x), 64, block=64, smem=256)[1] for _ in range(4)]
    assert any(not np.array_equal(out, found[0]) for out in found[1:])


# With kgen verify.


def cases(bundle: Bundle, folder: Path, todo: Iterable[Point]) -> list[Case]:
    driver = HostDriver(bundle, folder, guard=arena.GUARD)
    with bundle.load(driver=driver, lazy=True) as kernels, np.errstate(all="ignore"):
        return list(verify(kernels, todo, 1))


WRONG = Path(__file__).parents[1] / "device" / "wrong.cu"


@pytest.fixture(scope="module")
def wrong(compile_cuda, folder):
    code = compile_cuda(WRONG)
    names = ("right", "off_by_one_row", "wrong_scale", "unwritten_tail", "race", "fault")
    contracts = map(products.contract, names)
    return Bundle.open(products.write(folder / "wrong.kgen", contracts, code.cubin, code.ptx, zeroed=("race",)))


@pytest.mark.parametrize(
    ("name", "passes", "words"),
    [
        ("right", set(), None),
        ("off_by_one_row", {1}, r"half ulps of the row's magnitude \S+ exceeds 4, worst at \[\d+, \d+\]: got"),
        ("wrong_scale", set(), r"relative Frobenius error of sampled rows 0\.0[23]\d* exceeds 0\.002"),
        ("unwritten_tail", {64}, r"elements are never written, the first at \[\d+, 0\]"),
        ("race", set(), r"exceeds|differ from run to run"),
        (
            "fault",
            set(),
            r"fault: block \(\d+, 0, 0\), thread \(\d+, [01], 0\) writes 4 bytes at 0x8, where nothing is",
        ),
    ],
)
def test_verify_catches_a_wrong_kernel(wrong, folder, name, passes, words):
    todo = [point for point in points(products.contract(name)) if point.kind == "normal"]
    found = {case.point.dims["m"]: case for case in cases(wrong, folder, todo)}
    assert {m for m, case in found.items() if case.status == "ok"} == (passes if words else found.keys())
    for m in found.keys() - passes:
        assert not words or re.search(words, " ".join(found[m].failures)), found[m].failures
