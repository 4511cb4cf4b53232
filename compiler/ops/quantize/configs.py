"""What configs quantize offers, and the work that each of them is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kgen.compiler.ops.contract import Config, Dims, Work
from kgen.compiler.ops.numerics import itemsize
from kgen.compiler.ops.scaling import Block, Group

if TYPE_CHECKING:
    from kgen.compiler.ops.quantize import Quantize

# Of the tensor form: threads, bytes of x a thread holds in registers, bytes of shared memory for more of it.
RESIDENT = (
    (512, 128, 192 << 10),
    (512, 192, 192 << 10),
    (1024, 64, 192 << 10),
    (1024, 32, 208 << 10),
    (256, 32, 0),
    (128, 32, 0),
    (512, 32, 0),
)
SMEM = 220 << 10  # bytes that a block may stage


def offered(op: Quantize) -> list[Config]:
    """Every config that fits; the untuned choice first. None where no form takes the operator."""
    scale = op.q.scale
    if op.before:
        return _fused(op)
    if op.q.given:
        return [
            {"form": "flat", "threads": threads, "each": each, "unroll": unroll}
            for each in _eaches(op)
            for threads in (256, 128, 512)
            for unroll in (1, 2, 4)
        ]
    if scale == "tensor":
        return [
            {"form": "tensor", "threads": threads, "each": each, "held": held, "shelved": shelf // (threads * chunk)}
            for threads, held_bytes, shelf in RESIDENT
            for each in _eaches(op)
            for chunk in [each * itemsize(op.x.dtype)]
            if (held := held_bytes // chunk)
        ]
    if isinstance(scale, Block):
        return [
            {"form": "block", "threads": threads, "each": each}
            for each in [each for each in _eaches(op) if op.static("k") % each == 0] or [1]
            for threads in (256, 512, 1024)
            if 128 * 128 // threads * itemsize(op.x.dtype) <= 256
        ]
    if scale == "channel" or op.group == op.static("k"):
        return [*(_grouped(op) if op.static("k") <= 256 else []), *_rows(op)]
    return _grouped(op) or _staged(op)


def _eaches(op: Quantize) -> list[int]:
    """Elements of a chunk: whole 16-byte loads."""
    return [each for each in (16, 8, 4) if each >= 16 // itemsize(op.x.dtype)]


def _fused(op: Quantize) -> list[Config]:
    k, grouped = op.static("k"), isinstance(op.q.scale, Group) and op.group != op.static("k")
    return [
        {"form": "fused", "threads": threads, "each": each}
        for each in (8, 4, 16)
        if k % each == 0 and not (grouped and (op.group > 32 * each or op.group % each))
        for threads in (256, 128, 512, 1024)
        if -(-k // (threads * each)) * each <= 64 and (threads == 128 or threads * each // 2 < k)
    ]


def _grouped(op: Quantize) -> list[Config]:
    k, group = op.static("k"), op.group
    if op.smooth or group & (group - 1):
        return []
    return [
        {"form": "group", "threads": threads, "each": each, "unroll": unroll}
        for each in _eaches(op)
        if k % each == 0 and each <= group <= 32 * each
        for unroll in (1, 2, 4)
        for threads in (128, 256, 512)
    ]


def _staged(op: Quantize) -> list[Config]:
    size, vector = itemsize(op.x.dtype), 16 // itemsize(op.x.dtype)
    if op.q.dtype == "int4" or op.group % 32 or op.group > 4096:
        return []
    return [
        {"form": "staged", "threads": threads}
        for threads in (256, 128, 384, 576)
        if (op.static("k") + threads * vector) * (size + 1) <= SMEM
    ]


def _rows(op: Quantize) -> list[Config]:
    """Those first that give a thread about two chunks."""
    k = op.static("k")
    found = [
        {"form": "row", "threads": threads, "each": each}
        for threads in (128, 256, 512, 64, 1024, 32)
        for each in _eaches(op)
        if _row_fits(op, threads, each)
    ]
    return sorted(found, key=lambda config: abs(k / (config["threads"] * config["each"]) - 2))


def _row_fits(op: Quantize, threads: int, each: int) -> bool:
    k, size = op.static("k"), itemsize(op.x.dtype)
    if op.q.dtype == "int4" and k % (threads * each):
        return False
    turns = -(-k // (threads * each)) if k % each == 0 else -(-(k + each - 1) // (threads * each))
    held = turns * each * (4 if op.smooth else size)  # bytes of a thread
    return held <= 512 and (threads == 32 or (threads // 2) * each < k) and held * threads <= 160 << 10


def work(op: Quantize, config: Config, dims: Dims) -> Work:
    """The work of `config` at `dims`."""
    full, size = op.full_dims(dims), itemsize(op.x.dtype)
    m, k, threads, form = full["m"], full["k"], config["threads"], config["form"]
    share = threads * config.get("each", 8) * config.get("unroll", 1)
    if form == "block":
        blocks, elements = -(-m // 128) * -(-k // 128), 128 * 128
    elif form in ("row", "staged", "fused"):
        blocks, elements = m, k
    else:
        blocks, elements = -(-m * k // share), share
    persistent = form == "tensor"
    columns = 4 * k if op.smooth else size * k if op.before == "rms_norm" else 0  # bytes of smooth, of weight
    code, scale_bytes = (0.5, 8) if op.q.dtype == "int4" else (1, 4)
    return Work(
        blocks=blocks,
        threads=threads,
        smem={"staged": 3 * k, "tensor": config.get("shelved", 0) * share * size}.get(form, threads),
        read=elements * size * (op.x_columns // k) + columns + 4 * op.q.given,
        written=int(elements * code) + scale_bytes * -(-elements * -(-k // op.group) // k),
        flops=5 * elements,
        registers=64 if persistent else min(255, 32 + -(-elements // threads) * size // 2),
        persistent=persistent,
    )
