"""Lowering: what a launch needs, read from tilelang's IR. Each case lowers in a process of its own, as builds do."""

from __future__ import annotations

import pytest

pytest.importorskip("tilelang", reason="the compiler's dependencies are not installed: pip install 'kgen[compiler]'")

from kgen.build import workers
from kgen.compiler import program
from kgen.compiler.kernel import Lowered
from kgen.runtime.errors import BuildError, FormatError
from kgen.runtime.format import manifest as m
from kgen.runtime.format.expr import evaluate


def lowered(case: str) -> Lowered:
    ((_, result),) = workers.run(_lower, [case], 1)
    if isinstance(result, Exception):
        raise result
    return result


def _lower(case: str) -> Lowered:
    from kgen.compiler.lower import lower

    return lower(globals()[case](), "sm_90a", "toolchain")


def fill(n, grid, value=1.0, pdl=False, cluster=None):
    """out[i] = value, a block for each 128 elements."""
    import tilelang.language as T

    @T.prim_func
    def kernel(out: T.Tensor((n,), "float32"), sm_count: T.int32):
        with T.Kernel(grid(T, n, sm_count), threads=128, cluster_dims=cluster) as b:
            if pdl:
                T.pdl_sync()
            i = b * 128 + T.get_thread_binding()
            if i < n:
                out[i] = value

    return kernel


def blocks(T, n, sm_count):
    return T.ceildiv(n, 128)


def static():
    return program.Program((program.Launch(fill(1000, blocks), "fill"),))


def test_static_extents():
    result = lowered("static")
    (launch,) = result.program.steps
    kernel = result.kernels[launch.kernel]
    assert launch.grid == (8, 1, 1) and kernel.block == (128, 1, 1) and kernel.cluster == (1, 1, 1)
    assert kernel.params == ("pointer",) and launch.args == (m.Arg(pointer="out"),), "what is not read is no parameter"
    assert kernel.entry == "fill_kernel" and "fill_kernel" in kernel.source and not kernel.pdl


def dynamic():
    import tilelang.language as T

    def grid(T, n, sm_count):
        return T.min(T.max(T.ceildiv(n, 128) * 2 - 1, 3), sm_count)

    function = fill(T.dynamic("m"), grid)
    return program.Program((program.Launch(function, "fill", rename={"out": "result", "m": "rows"}),))


def test_run_time_extents_and_renames():
    (launch,) = lowered("dynamic").program.steps
    expected = ["min", ["max", ["-", ["*", ["ceildiv", "rows", 128], 2], 1], 3], "sm_count"]
    assert launch.grid == (expected, 1, 1)
    assert {a.pointer or a.value for a in launch.args} == {"result", "rows", "sm_count"}


def attributes():
    return program.Program((program.Launch(fill(1024, blocks, pdl=True, cluster=2), "fill"),))


def test_cluster_and_pdl():
    (kernel,) = lowered("attributes").kernels.values()
    assert kernel.pdl and kernel.cluster == (2, 1, 1)


def composed():
    import tilelang.language as T

    m_ = T.dynamic("m")
    first = program.Launch(fill(m_, blocks, 1.0), "first", rename={"out": "partial"})
    second = program.Launch(fill(m_, blocks, 2.0), "second")
    workspace = (
        program.Workspace("partial", "scratch", ["*", "m", 4]),
        program.Workspace("arrived", "locks", 12),
        program.Workspace("more", "scratch", 100),
    )
    return program.Program((program.Memset("partial", 0, ["*", "m", 4]), first, second), workspace)


def test_steps_and_workspace():
    result = lowered("composed")
    assert [type(step) for step in result.program.steps] == [m.Memset, m.Launch, m.Launch]
    assert len(result.kernels) == 2
    assert [(part.name, part.offset) for part in result.program.workspace] == [
        ("arrived", 0),
        ("partial", 256),
        ("more", ["+", 256, ["align", ["*", "m", 4], 256]]),
    ]
    assert evaluate(result.program.workspace_bytes, {"m": 65}) == 256 + 512 + 256
    again = Lowered.from_json(result.to_json(), {"m", "sm_count"})
    assert again == result
    with pytest.raises(FormatError, match="unknown symbol 'm'"):
        Lowered.from_json(result.to_json(), {"sm_count"})


def test_the_same_function_gives_the_same_kernel():
    first, second = lowered("static"), lowered("static")
    assert first == second
    (kernel,) = first.kernels.values()
    assert kernel.id("toolchain") in first.kernels and kernel.id("another") not in first.kernels


def floating():
    import tilelang.language as T

    @T.prim_func
    def kernel(out: T.Tensor((128,), "float32"), factor: T.float64):
        with T.Kernel(1, threads=128):
            out[T.get_thread_binding()] = T.cast(factor, "float32")

    return program.Program((program.Launch(kernel, "floating"),))


def test_a_parameter_without_a_word_in_the_format():
    with pytest.raises(BuildError, match="parameter factor of type float64 has no kind"):
        lowered("floating")
