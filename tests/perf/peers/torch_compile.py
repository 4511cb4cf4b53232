"""Inductor over an operator's arithmetic written in torch: what ``torch.compile`` alone gives a user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from kgen.build.peers import Peer
from kgen.compiler.ops.contract import Operator
from kgen.compiler.ops.dequantize import Dequantize
from kgen.compiler.ops.quantize import MOST, Quantize
from kgen.compiler.ops.scaling import tile

if TYPE_CHECKING:
    import torch


def peers(op: Operator, dims: Mapping[str, int], tensors: Mapping[str, torch.Tensor]) -> Iterator[Peer]:
    """The compiled `quantize` or `dequantize`."""
    if isinstance(op, Quantize) and op.q.dtype in MOST and not (op.q.given or op.before or op.power_of_two):
        yield compiled_quantize(op, tensors)
    if isinstance(op, Dequantize) and op.q.dtype in MOST:
        yield compiled_dequantize(op, tensors)


def compiled_quantize(op: Quantize, tensors: Mapping[str, torch.Tensor]) -> Peer:
    import torch

    x, smooth, dtype, shape = tensors["x"], tensors.get("smooth"), tensors["q"].dtype, tensors["scale"].shape
    shared, floor = tile(op.q.scale, *x.shape), float(op.q.amax_floor)
    torch.compiler.reset()  # shapes add up to dynamo's recompile limit otherwise
    compiled = torch.compile(quantize, fullgraph=True, dynamic=False)

    def outputs() -> dict[str, torch.Tensor]:
        q, scale = compiled(x, smooth, shared, dtype, floor)
        return {"q": q, "scale": scale.view(shape)}

    note = "inductor divides approximately: neighbouring codes near ties"
    return Peer("torch-compile", lambda: compiled(x, smooth, shared, dtype, floor), outputs, note)


def compiled_dequantize(op: Dequantize, tensors: Mapping[str, torch.Tensor]) -> Peer:
    import torch

    q, scale, dtype = tensors["q"], tensors["scale"], tensors["x"].dtype
    shared = tile(op.q.scale, *q.shape)
    torch.compiler.reset()
    compiled = torch.compile(dequantize, fullgraph=True, dynamic=False)
    return Peer(
        "torch-compile", lambda: compiled(q, scale, shared, dtype), lambda: {"x": compiled(q, scale, shared, dtype)}
    )


def quantize(
    x: torch.Tensor, smooth: torch.Tensor | None, shared: tuple[int, int], dtype: torch.dtype, floor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of x ``[rows, columns]``, and a scale for each tile of `shared` rows and columns."""
    import torch

    (rows, columns), (high, wide) = x.shape, shared
    down, across = -(-rows // high), -(-columns // wide)
    y = x.float() if smooth is None else x.float() / smooth
    if (down * high, across * wide) != (rows, columns):
        y = torch.nn.functional.pad(y, (0, across * wide - columns, 0, down * high - rows))
    tiles = y.view(down, high, across, wide)
    amax = tiles.abs().amax((1, 3), keepdim=True)
    limit = MOST[str(dtype).removeprefix("torch.")]
    # By a tensor: on a GPU torch divides by a number through its reciprocal, which is not the quotient.
    scale = amax.clamp(min=floor) / torch.full_like(amax, limit)
    if not floor:
        scale = torch.where(amax > 0, scale, 1.0)
    codes = tiles / scale
    if not dtype.is_floating_point:
        codes = codes.round().nan_to_num(nan=0.0)
    codes = codes.clamp(-limit, limit).view(down * high, across * wide)[:rows, :columns]
    return codes.to(dtype), scale.view(down, across)


def dequantize(q: torch.Tensor, scale: torch.Tensor, shared: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """x ``[rows, columns]`` of codes and the scale of each tile."""
    (rows, columns), (high, wide) = q.shape, shared
    if high == rows and wide == columns:
        return (q.float() * scale).to(dtype)
    if wide == columns and high == 1:
        return (q.float() * scale.view(-1, 1)).to(dtype)
    if columns % wide == 0 and rows % high == 0:
        tiles = q.float().view(rows // high, high, columns // wide, wide)
        return (tiles * scale.view(rows // high, 1, columns // wide, 1)).view(rows, columns).to(dtype)
    each = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
    return (q.float() * each).to(dtype)
