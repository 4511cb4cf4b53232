"""torch's own operators: for products, cuBLAS as torch's heuristics choose it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from kgen.build.peers import Peer
from kgen.compiler.ops.contract import Operator
from kgen.compiler.ops.gemm import Gemm

if TYPE_CHECKING:
    import torch


def peers(op: Operator, dims: Mapping[str, int], tensors: Mapping[str, torch.Tensor]) -> Iterator[Peer]:
    """``torch.matmul`` into a given output."""
    if not isinstance(op, Gemm):
        return
    import torch

    a, b = tensors["a"], tensors["b"]
    right = b.T if op.b.major == "k" else b
    out = torch.empty_like(tensors["out"])
    yield Peer("cublas", lambda: torch.matmul(a, right, out=out), lambda: {"out": out})
