"""vLLM's Triton kernels: single modules of its wheel, with stand-ins for what they import of vLLM."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

from _fetched import fetched

from kgen.build.peers import Peer
from kgen.compiler.ops.contract import Operator
from kgen.compiler.ops.quantize import Quantize

if TYPE_CHECKING:
    import torch


def peers(op: Operator, dims: Mapping[str, int], tensors: Mapping[str, torch.Tensor]) -> Iterator[Peer]:
    """Quantization by row to int8."""
    inputs = [t.name for t in op.tensors() if t.role == "in"]
    if not isinstance(op, Quantize) or (op.q.dtype, op.q.scale, inputs) != ("int8", "channel", ["x"]):
        return
    quantize = load("vllm/model_executor/layers/quantization/utils/int8_utils.py").per_token_quant_int8
    x = tensors["x"]

    def outputs() -> dict[str, torch.Tensor]:
        q, scale = quantize(x)
        return {"q": q, "scale": scale.view(-1)}

    note = "multiplies by 127/amax, halves go away from 0: neighbouring codes near ties; amax is at least 1e-10"
    yield Peer("vllm-triton", lambda: quantize(x), outputs, note)


def load(path: str) -> ModuleType:
    """One module of vLLM's, which sees CUDA and Triton and nothing else of vLLM."""
    source = fetched(path)
    import triton
    import triton.language as tl

    platform = SimpleNamespace(is_rocm=lambda: False, is_xpu=lambda: False)
    stand_ins = {
        "vllm.platforms": SimpleNamespace(current_platform=platform),
        "vllm.triton_utils": SimpleNamespace(tl=tl, triton=triton),
    }
    spec = importlib.util.spec_from_file_location(f"kgen_peers_vllm_{source.stem}", source)
    module = importlib.util.module_from_spec(spec)
    sys.modules.update(stand_ins)
    try:
        spec.loader.exec_module(module)
    finally:
        for name in stand_ins:
            del sys.modules[name]
    return module
