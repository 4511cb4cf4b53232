"""Inductor over an operator's arithmetic written in torch: what ``torch.compile`` alone gives a user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from kgen.build.peers import Peer
from kgen.compiler.ops.contract import Operator
from kgen.compiler.ops.quantize import Quantize
from kgen.compiler.ops.scaling import Block, Group, Scale

if TYPE_CHECKING:
    import torch

LIMITS = {"int8": 127.0, "float8_e4m3fn": 448.0}


def peers(op: Operator, dims: Mapping[str, int], tensors: Mapping[str, torch.Tensor]) -> Iterator[Peer]:
    """The compiled `quantize`."""
    if not isinstance(op, Quantize) or op.q.dtype not in LIMITS:
        return
    if [t.name for t in op.tensors() if t.role == "in"] != ["x"] or tensors["scale"].dtype != tensors[
        "x"
    ].float().dtype:
        return
    import torch

    x, dtype, shape = tensors["x"], tensors["q"].dtype, tensors["scale"].shape
    tile = tile_of(op.q.scale, *x.shape)
    torch.compiler.reset()  # shapes add up to dynamo's recompile limit otherwise
    compiled = torch.compile(quantize, fullgraph=True, dynamic=False)

    def outputs() -> dict[str, torch.Tensor]:
        q, scale = compiled(x, tile, dtype)
        return {"q": q, "scale": scale.view(shape)}

    note = "inductor divides approximately: neighbouring codes near ties"
    yield Peer("torch-compile", lambda: compiled(x, tile, dtype), outputs, note)


def tile_of(scale: Scale, rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    match scale:
        case Group():
            return 1, scale.group
        case Block():
            return scale.block
        case "channel":
            return 1, columns
        case _:
            return rows, columns


def quantize(x: torch.Tensor, tile: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of x ``[rows, columns]``, and a scale for each tile."""
    import torch

    (rows, columns), (high, wide) = x.shape, tile
    down, across = -(-rows // high), -(-columns // wide)
    padded = torch.nn.functional.pad(x.float(), (0, across * wide - columns, 0, down * high - rows))
    tiles = padded.view(down, high, across, wide)
    amax = tiles.abs().amax((1, 3), keepdim=True)
    limit = LIMITS[str(dtype).removeprefix("torch.")]
    # By a tensor: on a GPU torch divides by a number through its reciprocal, which is not the quotient.
    scale = torch.where(amax > 0, amax / torch.full_like(amax, limit), 1.0)
    codes = tiles / scale
    if not dtype.is_floating_point:
        codes = codes.round().nan_to_num(nan=0.0)
    codes = codes.clamp(-limit, limit).view(padded.shape)[:rows, :columns]
    return codes.to(dtype), scale.view(down, across)
