"""SGLang's routing operators, from the sm_90 library of its kernel package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from _fetched import fetched

from kgen.build.peers import Peer
from kgen.compiler.ops.contract import Operator
from kgen.compiler.ops.moe_align import MoeAlign
from kgen.compiler.ops.moe_topk import MoeTopk

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]


def peers(op: Operator, dims: Mapping[str, int], tensors: Tensors) -> Iterator[Peer]:
    """Selection and alignment."""
    if isinstance(op, MoeTopk) and not op.grouped and float(op.scaling_factor) == 1:
        yield topk(operators(), op, tensors)
    elif isinstance(op, MoeTopk) and op.bias and op.renormalize and op.scoring == "sigmoid":
        yield gate(operators(), op, tensors)
    elif isinstance(op, MoeAlign):
        yield align(operators(), op, tensors)


def operators() -> Any:
    """``torch.ops.sgl_kernel``, with SGLang's operators in it."""
    library = fetched("sgl_kernel/sm90/common_ops.abi3.so")
    import torch

    torch.ops.load_library(library)
    return torch.ops.sgl_kernel


def topk(ops: Any, op: MoeTopk, tensors: Tensors) -> Peer:
    """Softmax or sigmoid, and the best."""
    logits, bias = tensors["logits"], tensors.get("bias")
    weights, ids = (tensors[name].new_empty(tensors[name].shape) for name in ("topk_weights", "topk_ids"))
    outputs = {"topk_weights": weights, "topk_ids": ids}
    if op.scoring == "softmax":
        return Peer(
            "sglang", lambda: ops.topk_softmax(weights, ids, logits, op.renormalize, 0.0, bias), lambda: outputs
        )
    return Peer("sglang", lambda: ops.topk_sigmoid(weights, ids, logits, op.renormalize, bias), lambda: outputs)


def gate(ops: Any, op: MoeTopk, tensors: Tensors) -> Peer:
    """The fused gates of DeepSeek-V3 (in groups) and of Kimi K2 (without)."""
    logits, bias, count = tensors["logits"], tensors["bias"].to(tensors["logits"].dtype), op.static("topk")
    factor, found = float(op.scaling_factor), {}

    def call() -> None:
        if op.grouped:
            groups = op.groups
            results = ops.moe_fused_gate(logits, bias, groups.n_group, groups.topk_group, count, 0, factor, True)
        else:
            results = ops.kimi_k2_moe_fused_gate(logits, bias, count, True, factor, True)
        found.update(topk_weights=results[0], topk_ids=results[1])

    return Peer("sglang", call, lambda: found, "its bias has the logits' dtype")


def align(ops: Any, op: MoeAlign, tensors: Tensors) -> Peer:
    """With the buffer filled."""
    names = ("sorted_token_ids", "expert_ids", "num_tokens_post_pad")
    sorted_ids, experts, length = (tensors[name].new_empty(tensors[name].shape) for name in names)
    ids, count, block = tensors["topk_ids"], op.static("experts"), op.static("block")
    sums = ids.new_empty(count + 2)
    return Peer(
        "sglang",
        # It counts one expert more than there are, for pairs that are elsewhere.
        lambda: ops.moe_align_block_size(ids, count + 1, block, sorted_ids, experts, length, sums, True),
        lambda: {"sorted_token_ids": sorted_ids, "expert_ids": experts, "num_tokens_post_pad": length},
        "an expert's pairs in any order",
    )
