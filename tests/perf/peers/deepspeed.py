"""DeepSpeed's asymmetric int4 quantizer, compiled from its source by the machine's nvcc."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from _fetched import fetched

from kgen.build.peers import Peer, Unavailable
from kgen.compiler.ops.contract import Operator
from kgen.compiler.ops.quantize import Quantize

if TYPE_CHECKING:
    import torch

ENTRY = """
extern "C" void quantize_int4(int8_t* q, float* params, const __half* x, int groups, int wide, cudaStream_t stream) {
    launch_quant(q, params, x, groups, wide, 4, quantize::Type::Asymmetric, stream);
}
"""


def peers(op: Operator, dims: Mapping[str, int], tensors: Mapping[str, torch.Tensor]) -> Iterator[Peer]:
    """int4 quantization of float16."""
    if not isinstance(op, Quantize) or (op.q.dtype, op.x.dtype) != ("int4", "float16"):
        return
    import torch

    library, x = build(), tensors["x"]
    q, scale = torch.empty_like(tensors["q"]), torch.empty_like(tensors["scale"])
    groups = x.numel() // op.group

    def call() -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (q, scale, x)]
        library.quantize_int4(*pointers, groups, op.group, stream)

    yield Peer("deepspeed", call, lambda: {"q": q, "scale": scale}, "takes hi and lo from half-precision arithmetic")


@cache
def build() -> ctypes.CDLL:
    """Its ``quantize.cu`` as a library.

    Raises:
        Unavailable: nvcc is missing or fails.
    """
    source = fetched("deepspeed-0.19.8/csrc/quantization/quantize.cu")
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        raise Unavailable("nvcc is neither on the path nor in /usr/local/cuda/bin")
    folder = Path(tempfile.mkdtemp(prefix="kgen-deepspeed-"))
    (folder / "entry.cu").write_text(f'#include "{source}"\n{ENTRY}')
    flags = ["-O3", "-std=c++20", "--use_fast_math", "-DBF16_AVAILABLE"]  # of its own builder
    flags += ["-arch=sm_90a", "-shared", "-Xcompiler", "-fPIC"]
    command = [nvcc, *flags, f"-I{source.parents[1] / 'includes'}"]
    done = subprocess.run(
        [*command, str(folder / "entry.cu"), "-o", str(folder / "entry.so")], capture_output=True, text=True
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise Unavailable(f"nvcc: {errors[0] if errors else done.stderr.strip()}")
    return ctypes.CDLL(str(folder / "entry.so"))
