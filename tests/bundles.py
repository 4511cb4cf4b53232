"""A small bundle made by hand, for tests that need no compiler: two operators over code that only looks like ELF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kgen.build.publish import publish
from kgen.runtime.format import canonical
from kgen.runtime.format import manifest as m

TWO_D = {"box": (64, 64), "element_strides": (1, 1), "interleave": 0, "swizzle": 3, "l2_promotion": 2, "oob_fill": 0}


def kernel(name: str, params: tuple[str, ...], cubin: str, ptx: str, **changes: Any) -> m.Kernel:
    """A kernel whose id is the hash of its name."""
    fields: dict[str, Any] = {
        "id": canonical.sha256(name.encode()),
        "entry": name,
        "params": params,
        "block": (128, 1, 1),
        "cluster": (1, 1, 1),
        "dynamic_smem": 0,
        "static_smem": 0,
        "registers": 32,
        "stack": 0,
        "spills": 0,
        "pdl": False,
        "cooperative": False,
        "target": "sm_90a",
        "cubin": cubin,
        "ptx": ptx,
    }
    return m.Kernel(**fields | changes)


def tensor(name: str, role: str, dtype: str, *shape: Any, align: int = 16) -> m.Tensor:
    """A row-major tensor of at most two dims."""
    return m.Tensor(name, role, dtype, shape, (shape[1], 1) if len(shape) == 2 else (1,), align)


def manifest_and_files() -> tuple[m.Manifest, dict[str, bytes]]:
    """``scale``: memset, launch, workspace, another variant from m = 65 on. ``product``: tensor map and cluster."""
    cubin, ptx = b"\x7fELF code", b".version 9.0 // code"
    contents = ((cubin, "cubin"), (ptx, "ptx"))
    blobs = {(sha := canonical.sha256(data)): m.Blob(sha, kind, len(data)) for data, kind in contents}
    code = tuple(blobs)
    small = kernel("scale_small", ("pointer", "pointer", "pointer", "pointer", "int32", "int32"), *code)
    large = kernel("scale_large", small.params, *code, dynamic_smem=100_000, pdl=True, cooperative=True)
    product = kernel("product", ("tensor_map", "pointer", "int64"), *code, cluster=(2, 1, 1))

    def scale(k: m.Kernel, rows: int) -> m.Program:
        pointers = tuple(m.Arg(pointer=name) for name in ("x", "out", "partial", "arrived"))
        launch = m.Launch(k.id, (["ceildiv", "m", rows], 1, 1), (*pointers, m.Arg(value="m"), m.Arg(value="sm_count")))
        workspace = (
            m.Workspace("arrived", "locks", 0, 256),
            m.Workspace("partial", "scratch", 256, ["*", "m", 4]),
        )
        return m.Program(
            (m.Memset("partial", 0, ["*", "m", 4]), launch), workspace, ["+", 256, ["align", ["*", "m", 4], 256]]
        )

    a_map = m.TensorMap("a", 9, (64, "m"), (128,), **TWO_D)
    args = (m.Arg(tensor_map=a_map), m.Arg(pointer="out"), m.Arg(value=["*", "m", 2]))
    operators = {
        "scale": m.Operator(
            "scale", "scale", 1, {"m": (1, 1024), "k": (8, 8)}, {},
            (tensor("x", "in", "float32", "m", 8), tensor("out", "out", "float32", "m", 8)),
            (
                m.Variant("sm_90a", ["<=", "m", 64], {"form": "small"}, scale(small, 1)),
                m.Variant("sm_90a", 1, {"form": "large"}, scale(large, 64)),
            ),
            {"decode": {"m": 8}},
        ),
        "product": m.Operator(
            "product", "product", 1, {"m": (1, 4096)}, {},
            (tensor("a", "in", "bfloat16", "m", 64), tensor("out", "out", "bfloat16", "m", 64)),
            (m.Variant("sm_90a", 1, {}, m.Program((m.Launch(product.id, ("sm_count", 1, 1), args),), (), 0)),),
            {},
        ),
    }  # fmt: skip
    source = b"// source"
    built = m.Manifest(
        name="handmade",
        version="1.0.0",
        targets=("sm_90a",),
        min_driver=13000,
        generator={"kgen": "test"},
        blobs=blobs,
        kernels={k.id: k for k in (small, large, product)},
        operators=operators,
        evidence={"sources/scale.cu": m.Evidence(canonical.sha256(source), len(source))},
    )
    files = {blobs[canonical.sha256(data)].path: data for data in (cubin, ptx)}
    return built, files | {"evidence/sources/scale.cu": source}


def files_of(manifest: m.Manifest | dict[str, Any], files: dict[str, bytes]) -> dict[str, bytes]:
    """`files` with a manifest (as an object or as JSON) and its hash."""
    head = canonical.dumps(manifest if isinstance(manifest, dict) else m.to_json(manifest))
    return files | {"manifest.json": head, "manifest.sha256": canonical.sha256(head).encode() + b"\n"}


def write(path: Path, manifest: m.Manifest | dict[str, Any] | None = None) -> Path:
    """Publish the handmade bundle, or another manifest over its files, at `path`."""
    built, files = manifest_and_files()
    publish(files_of(manifest or built, files), path)
    return path


def word(data: bytes) -> int:
    """A little-endian integer parameter."""
    return int.from_bytes(data, "little", signed=True)
