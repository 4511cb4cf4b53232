"""DeepGEMM, as vLLM's wheel carries it: it compiles its kernels with the toolkit's nvcc when first called."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from _fetched import fetched

from kgen.build.peers import Peer
from kgen.compiler.ops.contract import Operator
from kgen.compiler.ops.gemm import Gemm

if TYPE_CHECKING:
    import torch


def peers(op: Operator, dims: Mapping[str, int], tensors: Mapping[str, torch.Tensor]) -> Iterator[Peer]:
    """bfloat16 products."""
    if not isinstance(op, Gemm) or op.a.dtype != "bfloat16":
        return
    deep_gemm = load()
    gemm = deep_gemm.bf16_gemm_nt if op.b.major == "k" else deep_gemm.bf16_gemm_nn
    a, b, out = tensors["a"], tensors["b"], tensors["out"].new_empty(tensors["out"].shape)
    yield Peer("deepgemm", lambda: gemm(a, b, out), lambda: {"out": out})


def load() -> ModuleType:
    """The package ``deep_gemm``."""
    package = fetched("deep_gemm")
    os.environ.setdefault("CUDA_HOME", "/usr/local/cuda")
    os.environ.setdefault("DG_JIT_CACHE_DIR", str(Path(tempfile.gettempdir(), "deep_gemm")))
    sys.path.append(str(package.parent))
    import deep_gemm

    return deep_gemm
