"""vLLM's CUDA operators, from the one shared library of its wheel that holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from _fetched import fetched

from kgen.build.peers import Peer
from kgen.compiler.ops.contract import Operator
from kgen.compiler.ops.gemm import Gemm
from kgen.compiler.ops.quantize import Quantize
from kgen.compiler.ops.scaling import Block, Group

if TYPE_CHECKING:
    import torch

RECIPROCAL = "multiplies by 1/scale: neighbouring codes near ties"


def peers(op: Operator, dims: Mapping[str, int], tensors: Mapping[str, torch.Tensor]) -> Iterator[Peer]:
    """Quantizations of activations, and one small product."""
    if isinstance(op, Quantize):
        yield from quantizations(op, tensors)
    elif isinstance(op, Gemm) and (op.a.dtype, op.b.major) == ("bfloat16", "k") and is_fused_a(**dims):
        yield fused_a(operators(), tensors)


def quantizations(op: Quantize, tensors: Mapping[str, torch.Tensor]) -> Iterator[Peer]:
    if op.before:
        yield from fused(op, tensors)
        return
    inputs = [t.name for t in op.tensors() if t.role == "in"]
    wide = op.group
    if op.q.given:
        if op.q.dtype != "int4":
            yield given(operators(), op.q.dtype, tensors)
    elif (op.q.dtype, op.q.scale, inputs) == ("int8", "channel", ["x"]):
        yield int8_by_row(operators(), tensors)
    elif (op.q.dtype, op.q.scale, inputs) == ("int8", "channel", ["x", "smooth"]):
        yield int8_smooth(operators(), tensors)
    elif (op.q.dtype, op.q.scale, inputs) == ("int8", "tensor", ["x"]):
        yield int8_tensor(operators(), tensors)
    elif inputs == ["x"] and not isinstance(op.q.scale, Block) and not op.power_of_two and op.static("k") % wide == 0:
        if op.q.dtype == "int8":
            yield int8_groups(operators(), tensors, wide)
        elif op.q.dtype == "float8_e4m3fn":
            yield fp8_groups(operators(), tensors, wide, float(op.q.amax_floor))
            if op.q.scale == "channel":
                yield fp8_by_row(operators(), tensors)


def fused(op: Quantize, tensors: Mapping[str, torch.Tensor]) -> Iterator[Peer]:
    """Quantizations after silu-and-mul or rms_norm, in one kernel as vLLM's compiler passes put them."""
    ops, x, group = operators(), tensors["x"], isinstance(op.q.scale, Group)
    if op.power_of_two or (group and op.static("k") % op.group):
        return
    q, scale = own_outputs(tensors)
    columns, eps = group and op.q.scale.major == "column", float(op.eps)
    if op.before == "silu_and_mul":
        if op.q.given and op.q.dtype == "float8_e4m3fn":
            yield Peer(
                "vllm-cuda", lambda: ops.silu_and_mul_quant(q, x, tensors["scale"]), lambda: {"q": q}, RECIPROCAL
            )
        elif group:
            call = partial(ops.silu_and_mul_per_block_quant, q, x, scale, op.group, None, columns)
            yield Peer("vllm-cuda", call, lambda: {"q": q, "scale": scale}, RECIPROCAL)
    elif op.q.given:
        if op.q.dtype == "float8_e4m3fn":
            call = partial(ops.rms_norm_static_fp8_quant, q, x, tensors["weight"], tensors["scale"], eps)
            yield Peer("vllm-cuda", call, lambda: {"q": q}, RECIPROCAL)
    elif group:
        arguments = (q, x, tensors["weight"], scale, eps, None, None, op.group, columns)
        call = partial(ops.rms_norm_per_block_quant, *arguments)
        yield Peer("vllm-cuda", call, lambda: {"q": q, "scale": scale}, RECIPROCAL)
    else:
        arguments = (q, x, tensors["weight"], scale.view(-1, 1), eps, None, None)
        call = partial(ops.rms_norm_dynamic_per_token_quant, *arguments)
        yield Peer("vllm-cuda", call, lambda: {"q": q, "scale": scale}, RECIPROCAL)


def operators() -> Any:
    """``torch.ops._C``, with vLLM's operators in it."""
    library = fetched("vllm/_C_stable_libtorch.abi3.so")
    import torch

    torch.ops.load_library(library)
    return torch.ops._C


def own_outputs(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Room for the peer's ``q`` and ``scale``: kgen's own are not to be written."""
    return [tensors[name].new_empty_strided(tensors[name].shape, tensors[name].stride()) for name in ("q", "scale")]


def given(ops: Any, dtype: str, tensors: Mapping[str, torch.Tensor]) -> Peer:
    """With a scale that was measured before."""
    x, scale, (q, _) = tensors["x"], tensors["scale"], own_outputs(tensors)
    if dtype == "int8":
        return Peer("vllm-cuda", lambda: ops.static_scaled_int8_quant(q, x, scale, None), lambda: {"q": q}, RECIPROCAL)
    return Peer("vllm-cuda", lambda: ops.static_scaled_fp8_quant(q, x, scale, None), lambda: {"q": q}, RECIPROCAL)


def int8_by_row(ops: Any, tensors: Mapping[str, torch.Tensor]) -> Peer:
    """A scale a row, as its W8A8 layers quantize activations."""
    x, (q, scale) = tensors["x"], own_outputs(tensors)
    note = "multiplies by 127/amax: neighbouring codes near ties; rows of zeros get scale 0"
    return Peer(
        "vllm-cuda",
        lambda: ops.dynamic_scaled_int8_quant(q, x, scale.view(-1, 1), None),
        lambda: {"q": q, "scale": scale},
        note,
    )


def int8_smooth(ops: Any, tensors: Mapping[str, torch.Tensor]) -> Peer:
    """A division in torch, then by row."""
    import torch

    x, smooth, (q, scale) = tensors["x"], tensors["smooth"], own_outputs(tensors)
    y = torch.empty_like(x, dtype=torch.float32)

    def call() -> None:
        torch.div(x, smooth, out=y)
        ops.dynamic_scaled_int8_quant(q, y, scale.view(-1, 1), None)

    return Peer("vllm-cuda", call, lambda: {"q": q, "scale": scale}, "multiplies by 127/amax")


def int8_tensor(ops: Any, tensors: Mapping[str, torch.Tensor]) -> Peer:
    """vLLM measures no scale of a tensor: torch does, then its kernel for a given scale."""
    import torch

    x, (q, scale) = tensors["x"], own_outputs(tensors)
    one = scale.new_ones(())

    def call() -> None:
        low, high = torch.aminmax(x)
        amax = torch.maximum(-low, high).float()
        torch.where(amax > 0, amax / 127, one, out=scale[0])
        ops.static_scaled_int8_quant(q, x, scale, None)

    return Peer("vllm-cuda", call, lambda: {"q": q, "scale": scale}, "multiplies by 1/scale; amax and scale by torch")


def int8_groups(ops: Any, tensors: Mapping[str, torch.Tensor], wide: int) -> Peer:
    """A scale for each `wide` columns of a row."""
    x, (q, scale) = tensors["x"], own_outputs(tensors)
    note = "truncates instead of rounding; amax is at least 1e-10"
    return Peer(
        "vllm-cuda",
        lambda: ops.per_token_group_quant_int8(x, q, scale, wide, 1e-10, -127.0, 127.0),
        lambda: {"q": q, "scale": scale},
        note,
    )


def fp8_groups(ops: Any, tensors: Mapping[str, torch.Tensor], wide: int, floor: float) -> Peer:
    """A scale for each `wide` columns of a row, as its block-scaled fp8 layers quantize activations."""
    x, (q, scale) = tensors["x"], own_outputs(tensors)
    return Peer(
        "vllm-cuda",
        lambda: ops.per_token_group_fp8_quant(
            x, q, scale.view(x.shape[0], -1), wide, floor or 1e-10, -448.0, 448.0, False, False, False
        ),
        lambda: {"q": q, "scale": scale},
        "multiplies by 448/amax",
    )


def fp8_by_row(ops: Any, tensors: Mapping[str, torch.Tensor]) -> Peer:
    """A scale a row, as its W8A8 layers quantize activations."""
    x, (q, scale) = tensors["x"], own_outputs(tensors)
    return Peer(
        "vllm-fp8-row",
        lambda: ops.dynamic_per_token_scaled_fp8_quant(q, x, scale.view(-1, 1), None),
        lambda: {"q": q, "scale": scale},
        "its scales have another floor",
    )


def is_fused_a(m: int, n: int, k: int) -> bool:
    """Whether the product of those dims was compiled."""
    return m <= 16 and (n, k) == (2112, 7168)


def fused_a(ops: Any, tensors: Mapping[str, torch.Tensor]) -> Peer:
    """The product of a few tokens that DeepSeek-V3's attention starts with."""
    a, b, out = tensors["a"], tensors["b"], tensors["out"].new_empty(tensors["out"].shape)
    return Peer("vllm-fused-a", lambda: ops.dsv3_fused_a_gemm(out, a, b.T), lambda: {"out": out})
