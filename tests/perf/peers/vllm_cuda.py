"""vLLM's CUDA operators, from the one shared library of its wheel that holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from _fetched import fetched

from kgen.build.peers import Peer
from kgen.compiler.ops.contract import Operator
from kgen.compiler.ops.gemm import Gemm
from kgen.compiler.ops.quantize import Quantize

if TYPE_CHECKING:
    import torch


def peers(op: Operator, dims: Mapping[str, int], tensors: Mapping[str, torch.Tensor]) -> Iterator[Peer]:
    """Quantization by row to int8, and one small product."""
    inputs = [t.name for t in op.tensors() if t.role == "in"]
    if isinstance(op, Quantize) and (op.q.dtype, op.q.scale, inputs) == ("int8", "channel", ["x"]):
        yield int8_by_row(operators(), tensors)
    elif isinstance(op, Gemm) and (op.a.dtype, op.b.major) == ("bfloat16", "k") and is_fused_a(**dims):
        yield fused_a(operators(), tensors)


def operators() -> Any:
    """``torch.ops._C``, with vLLM's operators in it."""
    library = fetched("vllm/_C_stable_libtorch.abi3.so")
    import torch

    torch.ops.load_library(library)
    return torch.ops._C


def int8_by_row(ops: Any, tensors: Mapping[str, torch.Tensor]) -> Peer:
    """A scale a row, as its W8A8 layers quantize activations."""
    x, q, scale = tensors["x"], tensors["q"], tensors["scale"]
    q, scale = q.new_empty(q.shape), scale.new_empty(scale.shape)
    note = "multiplies by 127/amax: neighbouring codes near ties; rows of zeros get scale 0"
    return Peer(
        "vllm-cuda",
        lambda: ops.dynamic_scaled_int8_quant(q, x, scale.view(-1, 1), None),
        lambda: {"q": q, "scale": scale},
        note,
    )


def is_fused_a(m: int, n: int, k: int) -> bool:
    """Whether the product of those dims was compiled."""
    return m <= 16 and (n, k) == (2112, 7168)


def fused_a(ops: Any, tensors: Mapping[str, torch.Tensor]) -> Peer:
    """The product of a few tokens that DeepSeek-V3's attention starts with."""
    a, b, out = tensors["a"], tensors["b"], tensors["out"].new_empty(tensors["out"].shape)
    return Peer("vllm-fused-a", lambda: ops.dsv3_fused_a_gemm(out, a, b.T), lambda: {"out": out})
