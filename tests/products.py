"""A bundle of products made by hand: each operator is a gemm with one kernel, which has the operator's name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import bundles

from kgen.build.publish import publish
from kgen.compiler.ops.contract import Operator
from kgen.compiler.ops.gemm import A, B, Gemm, Out
from kgen.runtime.format import canonical
from kgen.runtime.format import manifest as m

N = K = 64
PARAMS = ("pointer", "pointer", "pointer", "int32")  # a [m, 64], b [64, 64] with k contiguous, out [m, 64]; m
BLOCK = (N, 2, 1)  # a thread for each column and half of k; a block for each row
ROWS = (1, 70)


def contract(name: str, rows: tuple[int, int] = ROWS) -> Gemm:
    """A float16 product with workloads at 17 and at 33 rows."""
    return Gemm(
        name=name,
        dims={"m": rows, "n": (N, N), "k": (K, K)},
        workloads={"decode": {"m": 17}, "prefill": {"m": 33}} if rows[1] >= 33 else {},
        a=A(dtype="float16"),
        b=B(dtype="float16", major="k"),
        out=Out(dtype="float16"),
    )


def operator(contract: Operator, program: m.Program, config: dict[str, Any], target: str = "sm_90a") -> m.Operator:
    """The manifest's operator of a contract with one variant."""
    return m.Operator(
        contract.name,
        contract.family(),
        contract.abi,
        contract.dims,
        contract.attrs(),
        contract.tensors(),
        (m.Variant(target, 1, config, program),),
        contract.workloads,
    )


def write(
    path: Path,
    contracts: Iterable[Operator],
    cubin: bytes = b"\x7fELF code",
    ptx: bytes = b".version 9.0 // code",
    target: str = "sm_90a",
    zeroed: Iterable[str] = (),
    **changes: m.Operator,
) -> Path:
    """Publish a bundle of `contracts` at `path`; `changes` are operators that take the place of those so named.

    Args:
        cubin, ptx: code with a kernel for each contract, of its name.
        zeroed: the contracts whose output is zeroed before the launch.
    """
    files = {
        (sha := canonical.sha256(data)): m.Blob(sha, kind, len(data)) for kind, data in (("cubin", cubin), ("ptx", ptx))
    }
    kernels, operators = {}, {}
    for made in contracts:
        kernel = bundles.kernel(made.name, PARAMS, *files, target=target, block=BLOCK)
        args = (*(m.Arg(pointer=name) for name in ("a", "b", "out")), m.Arg(value="m"))
        zero = (m.Memset("out", 0, ["*", "m", 2 * N]),) if made.name in zeroed else ()
        program = m.Program((*zero, m.Launch(kernel.id, ("m", 1, 1), args)), (), 0)
        kernels[kernel.id] = kernel
        operators[made.name] = operator(made, program, {"form": "rows", "threads": 128}, target)
    manifest = m.Manifest(
        name="products",
        version="1.0.0",
        targets=(target,),
        min_driver=13000,
        generator={"kgen": "test"},
        blobs=files,
        kernels=kernels,
        operators=operators | changes,
        evidence={},
    )
    contents = {blob.path: data for blob, data in zip(files.values(), (cubin, ptx), strict=True)}
    publish(bundles.files_of(manifest, contents), path)
    return path
