"""From tilelang functions to CUDA source and a program of launches.

Everything a launch needs is read from tilelang's IR, never from the source text: the device function's parameters,
``thread_extent``, shared memory, cluster and PDL attributes, and the host function's ``tma_descriptor_args``. Extents
that depend on run-time dims are converted to the bundle's expressions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tilelang
from tilelang import tvm
from tilelang.transform import PassContext
from tvm import tirx
from tvm.target import Target

from kgen.compiler import program
from kgen.compiler.kernel import KernelSource, Lowered
from kgen.runtime.errors import BuildError
from kgen.runtime.format import manifest
from kgen.runtime.format.expr import Expr, fold

_BINARY = {
    "Add": "+", "Sub": "-", "Mul": "*", "FloorDiv": "//", "FloorMod": "%", "Div": "//", "Mod": "%",
    "Min": "min", "Max": "max", "LT": "<", "LE": "<=", "GT": ">", "GE": ">=", "EQ": "==", "NE": "!=",
    "And": "and", "Or": "or",
}  # fmt: skip


def lower(steps: program.Program, target: str, toolchain: str) -> Lowered:
    """Lower every launch of `steps`.

    Args:
        steps: a kernel module's program.
        target: such as ``sm_90a``.
        toolchain: fingerprint of the compiler and flags that the source is meant for.

    Raises:
        BuildError: tilelang rejects a function, or its IR holds something that the format has no word for.
    """
    kernels: dict[str, KernelSource] = {}
    lowered: list[manifest.Launch | manifest.Memset] = []
    for step in steps.steps:
        if isinstance(step, program.Memset):
            lowered.append(manifest.Memset(step.buffer, step.byte, step.bytes))
            continue
        kernel, grid, args = _launch(step, target)
        id = kernel.id(toolchain)
        kernels[id] = kernel
        lowered.append(manifest.Launch(id, grid, args))
    parts, total = _layout(steps.workspace)
    return Lowered(manifest.Program(tuple(lowered), parts, total), kernels)


def _layout(workspace: tuple[program.Workspace, ...]) -> tuple[tuple[manifest.Workspace, ...], Expr]:
    """Offsets one after the other, locks first, so that they stay put when the scratch grows with a dim."""
    parts = []
    offset: Expr = 0
    for part in sorted(workspace, key=lambda part: part.kind != "locks"):
        parts.append(manifest.Workspace(part.name, part.kind, offset, part.bytes))
        offset = fold("+", offset, fold("align", part.bytes, manifest.WORKSPACE_ALIGN))
    return tuple(parts), offset


def _launch(
    step: program.Launch, target: str
) -> tuple[KernelSource, tuple[Expr, Expr, Expr], tuple[manifest.Arg, ...]]:
    where = Target({"kind": "cuda", "arch": target})
    try:
        with PassContext(opt_level=3, config=dict(step.pass_config)), where:
            artifact = tilelang.lower(step.function.with_attr("global_symbol", step.name), target=where)
    except Exception as error:  # tilelang raises whatever its passes raise
        raise BuildError(f"{step.name}: tilelang cannot lower this: {type(error).__name__}: {error}") from error
    (device,) = _functions(artifact.device_mod)
    (host,) = _functions(artifact.host_mod)
    attrs = device.attrs
    extent = {str(tag): value for tag, value in attrs["thread_extent"].items()}
    params: list[str] = []
    args: list[manifest.Arg] = []
    maps = {var.name: list(items) for var, items in host.attrs["tma_descriptor_args"].items()}
    for var in device.params:
        name = step.rename.get(var.name, var.name)
        if var.name in maps:
            params.append("tensor_map")
            args.append(manifest.Arg(tensor_map=_tensor_map(maps[var.name], step.rename)))
        elif str(var.dtype) == "handle":
            params.append("pointer")
            args.append(manifest.Arg(pointer=name))
        elif str(var.dtype) in ("int32", "int64"):
            params.append(str(var.dtype))
            args.append(manifest.Arg(value=name))
        else:
            raise BuildError(f"{step.name}: parameter {var.name} of type {var.dtype} has no kind in the bundle format")
    axes = "xyz"
    kernel = KernelSource(
        source=artifact.kernel_source,
        entry=str(attrs["global_symbol"]),
        params=tuple(params),
        block=tuple(int(extent.get(f"threadIdx.{axis}", 1)) for axis in axes),
        cluster=tuple(int(size) for size in attrs["cluster_dims"]) if "cluster_dims" in attrs else (1, 1, 1),
        dynamic_smem=int(attrs["dyn_shared_memory_buf"]) if "dyn_shared_memory_buf" in attrs else 0,
        pdl="has_cuda_pdl_sync" in attrs,
        cooperative=step.cooperative,
        tolerates=tuple(sorted(step.tolerates)),
    )
    grid = tuple(expression(extent.get(f"blockIdx.{axis}", 1), step.rename) for axis in axes)
    return kernel, grid, tuple(args)


def _tensor_map(items: list[Any], rename: Mapping[str, str]) -> manifest.TensorMap:
    """tilelang's ``[create, descriptor, type, rank, base, dims, strides, box, element strides, four modes]``."""
    create, _, data_type, rank, base, *rest = items
    kind = str(getattr(create, "value", create))
    if kind != "__tvm_tensormap_create_tiled":
        raise BuildError(f"tensor map {base}: {kind} has no word in the bundle format; only tiled maps do")
    rank = int(rank)
    dims, strides, box, element_strides = (rest[rank * i : rank * (i + 1)] for i in range(4))
    interleave, swizzle, l2_promotion, oob_fill = map(int, rest[4 * rank :])
    return manifest.TensorMap(
        tensor=rename.get(base.name, base.name),
        data_type=int(data_type),
        dims=tuple(expression(dim, rename) for dim in dims),
        strides=tuple(expression(stride, rename) for stride in strides[1:]),
        box=tuple(map(int, box)),
        element_strides=tuple(map(int, element_strides)),
        interleave=interleave,
        swizzle=swizzle,
        l2_promotion=l2_promotion,
        oob_fill=oob_fill,
    )


def expression(node: Any, rename: Mapping[str, str] | None = None) -> Expr:
    """A TIR integer expression as the bundle's.

    Raises:
        BuildError: a node that the bundle's expressions do not have.
    """
    rename = rename or {}
    if isinstance(node, int):
        return node
    if isinstance(node, tirx.IntImm):
        return int(node.value)
    if isinstance(node, tirx.Var):
        return rename.get(node.name, node.name)
    kind = type(node).__name__
    if kind == "Cast":
        return expression(node.value, rename)
    if kind in _BINARY:
        a, b = expression(node.a, rename), expression(node.b, rename)
        return _as_ceildiv(a, b) if kind == "FloorDiv" else fold(_BINARY[kind], a, b)
    if kind == "Select":
        return fold("select", *(expression(n, rename) for n in (node.condition, node.true_value, node.false_value)))
    if kind == "Call":
        operands = [expression(operand, rename) for operand in node.args]
        if node.op.name.endswith("if_then_else"):
            return fold("select", *operands)
        if node.op.name.endswith("shift_right") and isinstance(operands[1], int):
            return _as_ceildiv(operands[0], 1 << operands[1])
        if node.op.name.endswith("shift_left") and isinstance(operands[1], int):
            return fold("*", operands[0], 1 << operands[1])
    raise BuildError(f"the extent {node} ({kind}) has no form in the bundle's expressions")


def _as_ceildiv(a: Expr, b: Expr) -> Expr:
    """``(x + b - 1) // b``, as tilelang writes it, back to ``ceildiv(x, b)``."""
    if isinstance(a, list) and a[0] == "+" and len(a) == 3 and isinstance(b, int) and a[2] == b - 1:
        return fold("ceildiv", a[1], b)
    return fold("//", a, b)


def _functions(module: Any) -> list[Any]:
    return [function for function in module.functions.values() if isinstance(function, tvm.tirx.PrimFunc)]
