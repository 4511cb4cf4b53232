"""vLLM's routing operators, from the shared library of its wheel that holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from _fetched import fetched

from kgen.build.peers import Peer
from kgen.compiler.ops.contract import Operator
from kgen.compiler.ops.moe_align import MoeAlign
from kgen.compiler.ops.moe_permute import MoePermute
from kgen.compiler.ops.moe_topk import MoeTopk
from kgen.compiler.ops.moe_unpermute import MoeUnpermute

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]


def peers(op: Operator, dims: Mapping[str, int], tensors: Tensors) -> Iterator[Peer]:
    """Selection, alignment, and rows there and back."""
    if isinstance(op, MoeTopk) and (op.scoring == "sigmoid" or (not op.bias and float(op.scaling_factor) == 1)):
        if op.grouped:
            if op.bias and op.scoring == "sigmoid":
                yield grouped_topk(operators(), op, tensors)
        else:
            yield topk(operators(), op, tensors)
    elif isinstance(op, MoeAlign):
        yield align(operators(), op, tensors)
    elif isinstance(op, MoePermute) and not op.scales:
        yield permute(operators(), op, tensors)
    elif isinstance(op, MoeUnpermute) and not (op.shared_out or op.residual) and float(op.scaling_factor) == 1:
        yield unpermute(operators(), op, tensors)


def operators() -> Any:
    """``torch.ops._moe_C``, with vLLM's operators in it."""
    library = fetched("vllm/_moe_C_stable_libtorch.abi3.so")
    import torch

    torch.ops.load_library(library)
    return torch.ops._moe_C


def own(tensors: Tensors, *names: str) -> list[torch.Tensor]:
    """Room for the peer's outputs: kgen's own are not to be written."""
    return [tensors[name].new_empty(tensors[name].shape) for name in names]


def topk(ops: Any, op: MoeTopk, tensors: Tensors) -> Peer:
    """`fused_topk`, which takes the logits as they are."""
    logits, bias, (weights, ids) = tensors["logits"], tensors.get("bias"), own(tensors, "topk_weights", "topk_ids")
    places = ids.new_empty(ids.shape)
    if op.scoring == "softmax":
        arguments = (weights, ids, places, logits, op.renormalize, bias, None)
        call = ops.topk_softmax
    else:
        arguments = (weights, ids, places, logits, op.renormalize, bias, float(op.scaling_factor), None)
        call = ops.topk_sigmoid
    return Peer("vllm", lambda: call(*arguments), lambda: {"topk_weights": weights, "topk_ids": ids})


def grouped_topk(ops: Any, op: MoeTopk, tensors: Tensors) -> Peer:
    """DeepSeek-V3's, in one kernel."""
    found: dict[str, torch.Tensor] = {}

    def call() -> None:
        weights, ids = ops.grouped_topk(
            tensors["logits"], op.groups.n_group, op.groups.topk_group, op.static("topk"), op.renormalize,
            float(op.scaling_factor), tensors["bias"], 1,
        )  # fmt: skip
        found.update(topk_weights=weights, topk_ids=ids)

    return Peer("vllm", call, lambda: found)


def align(ops: Any, op: MoeAlign, tensors: Tensors) -> Peer:
    """It fills what is left of the buffer too."""
    sorted_ids, experts, length = own(tensors, "sorted_token_ids", "expert_ids", "num_tokens_post_pad")
    ids, experts_in_all, block = tensors["topk_ids"], op.static("experts"), op.static("block")
    return Peer(
        "vllm",
        lambda: ops.moe_align_block_size(ids, experts_in_all, block, sorted_ids, experts, length, None, None),
        lambda: {"sorted_token_ids": sorted_ids, "expert_ids": experts, "num_tokens_post_pad": length},
        "an expert's pairs in any order",
    )


def permute(ops: Any, op: MoePermute, tensors: Tensors) -> Peer:
    """Its radix sort and copy; the sizes of experts are not among what it computes."""
    import torch

    rows, offsets, index = own(tensors, "perm_h", "expert_first_token_offset", "fwd_idx")
    hidden, ids, topk = tensors["hidden_states"], tensors["topk_ids"], op.static("topk")
    pairs = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device).view(ids.shape)
    back = torch.empty_like(index)
    arguments = (
        hidden, ids, pairs, tensors.get("expert_map"), op.static("experts"), op.static("local_experts"), topk,
        rows, offsets, index.view(ids.shape), back,
    )  # fmt: skip

    def outputs() -> dict[str, torch.Tensor]:
        here = torch.where(index < offsets[-1].int(), index, -1)
        starts = offsets[:-1].int()
        return {
            "perm_h": rows,
            "true_offsets": starts,
            "true_sizes": offsets.diff().int(),
            "expert_first_token_offset": offsets,
            "fwd_idx": here,
        }

    return Peer("vllm", lambda: ops.moe_permute(*arguments), outputs, "writes the offsets, but not the sizes")


def unpermute(ops: Any, op: MoeUnpermute, tensors: Tensors) -> Peer:
    """The weighted sum of rows."""
    (out,) = own(tensors, "out")
    weights, index = tensors["topk_weights"], tensors["fwd_idx"].view(tensors["topk_weights"].shape)
    arguments = (tensors["mm2"], weights, index, None, op.static("topk"), out)
    return Peer("vllm", lambda: ops.moe_unpermute(*arguments), lambda: {"out": out})
