"""A plain Triton product, autotuned: the form of Triton's tutorial, one program a tile of the output."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kgen.build.peers import Peer, Unavailable
from kgen.compiler.ops.contract import Operator
from kgen.compiler.ops.gemm import Gemm

if TYPE_CHECKING:
    import torch

# tile_m, tile_n, tile_k, stages, warps
CONFIGS = [
    (128, 256, 64, 3, 8),
    (128, 256, 64, 4, 8),
    (256, 128, 64, 3, 8),
    (128, 128, 64, 4, 8),
    (128, 128, 64, 5, 4),
    (128, 64, 64, 5, 4),
    (64, 128, 64, 5, 4),
    (64, 64, 128, 4, 4),
    (32, 64, 128, 5, 4),
    (16, 64, 128, 5, 4),
    (16, 32, 256, 4, 4),
]


def peers(op: Operator, dims: Mapping[str, int], tensors: Mapping[str, torch.Tensor]) -> Iterator[Peer]:
    """Products of 16-bit operands."""
    if not isinstance(op, Gemm):
        return
    matmul = kernel()
    m, n, k = (dims[dim] for dim in "mnk")
    a, b, out = tensors["a"], tensors["b"], tensors["out"].new_empty(tensors["out"].shape)
    step_n, step_k = (k, 1) if op.b.major == "k" else (1, n)

    def grid(config: Mapping[str, int]) -> tuple[int]:
        return (-(-m // config["TILE_M"]) * -(-n // config["TILE_N"]),)

    yield Peer("triton", lambda: matmul[grid](a, b, out, m, n, k, step_n, step_k), lambda: {"out": out})


@functools.cache
def kernel() -> Any:
    """The kernel, which tunes itself at its first call of each shape."""
    try:
        import triton
        import triton.language as tl
    except ImportError as error:
        raise Unavailable(f"{error}: pip install triton") from None

    configs = [
        triton.Config({"TILE_M": m, "TILE_N": n, "TILE_K": k}, num_stages=stages, num_warps=warps)
        for m, n, k, stages, warps in CONFIGS
    ]

    @triton.autotune(configs, key=["m", "n", "k", "step_k"])
    @triton.jit
    def matmul(
        a, b, out, m, n, k, step_n, step_k, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr
    ):  # fmt: skip
        # Eight row tiles at a time, so that they find their column tile of b in L2.
        down, across = tl.cdiv(m, TILE_M), tl.cdiv(n, TILE_N)
        band, within = tl.program_id(0) // (8 * across), tl.program_id(0) % (8 * across)
        high = tl.minimum(down - 8 * band, 8)
        rows = (8 * band + within % high) * TILE_M + tl.arange(0, TILE_M)
        columns = (within // high) * TILE_N + tl.arange(0, TILE_N)

        steps = tl.arange(0, TILE_K)
        a_at = a + (rows % m)[:, None] * k + steps[None, :]
        b_at = b + (columns % n)[None, :] * step_n + steps[:, None] * step_k
        total = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
        for start in range(0, k, TILE_K):
            left = tl.load(a_at, mask=steps[None, :] < k - start, other=0.0)
            right = tl.load(b_at, mask=steps[:, None] < k - start, other=0.0)
            total = tl.dot(left, right, total)
            a_at += TILE_K
            b_at += TILE_K * step_k
        inside = (rows < m)[:, None] & (columns < n)[None, :]
        tl.store(out + rows[:, None] * n + columns[None, :], total.to(out.dtype.element_ty), mask=inside)

    return matmul
