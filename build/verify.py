"""Run a bundle's operators on a GPU against their numpy references.

Each case: fresh random inputs, outputs poisoned, guard bytes around every buffer, one run, the contract's own check of
the outputs, inputs and guards unchanged; then a second run over outputs poisoned with another byte, through a captured
graph, which must give the same bits: an element that a kernel leaves unwritten differs between the two.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kgen.compiler import ops
from kgen.compiler.ops import numerics
from kgen.compiler.ops.contract import Check, Operator
from kgen.runtime.drivers import Driver
from kgen.runtime.kernels import Kernels, LoadedOperator
from kgen.runtime.tensors import Ptr

GUARD = 4096  # bytes before and after every buffer
GUARD_BYTE = 0xA5
POISONS = (0xFF, 0x5A)  # 0xFF…: NaN in every float format; -1 as an integer


@dataclass(frozen=True)
class Case:
    """One operator at one point of its domain, with one kind of inputs."""

    operator: str
    workload: str | None
    dims: dict[str, int]
    kind: str
    checks: tuple[Check, ...]
    failures: tuple[str, ...]
    kernels: tuple[str, ...] = field(repr=False, default=())

    @property
    def ok(self) -> bool:
        return not self.failures


def verify(kernels: Kernels, names: list[str] | None = None, seed: int | None = None) -> Iterator[Case]:
    """Verify the operators `names` (all by default): each workload and edge size, each kind of input.

    Args:
        seed: of the random inputs; by default a fresh one, which a failure prints.
    """
    seed = int(np.random.SeedSequence().entropy % (1 << 32)) if seed is None else seed
    for name in names or list(kernels):
        loaded = kernels[name]
        contract = ops.family(loaded.operator.op).from_manifest(loaded.operator)
        for workload, dims, kind in points(contract):
            yield verify_case(kernels, loaded, contract, workload, dims, kind, seed)


def points(contract: Operator) -> Iterator[tuple[str | None, dict[str, int], str]]:
    """(workload, dims, kind of input): every workload and edge with normal inputs, one of each with the other kinds."""
    sizes: list[tuple[str | None, dict[str, int]]] = list(contract.workloads.items())
    sizes += [(None, dims) for dims in contract.edge_dims() if dims not in contract.workloads.values()]
    sizes = sizes or [(None, {})]
    for workload, dims in sizes:
        yield workload, dims, contract.input_kinds[0]
    middle = sizes[len(sizes) // 2]
    for kind in contract.input_kinds[1:]:
        yield (*middle, kind)


def verify_case(
    kernels: Kernels,
    loaded: LoadedOperator,
    contract: Operator,
    workload: str | None,
    dims: dict[str, int],
    kind: str,
    seed: int,
) -> Case:
    """Run one case."""
    rng = np.random.default_rng([seed, *dims.values()])
    inputs = contract.inputs(dims, rng, kind)
    plan = loaded.plan(**dims)
    failures: list[str] = []
    with kernels.driver.using(kernels.context):
        arena = Arena(kernels.driver)
        try:
            outputs, again = _run(arena, plan, contract, dims, inputs, failures)
        finally:
            arena.close()
    checks = tuple(contract.check(dims, inputs, outputs, rng))
    failures += [_explain(check) for check in checks if not check.ok]
    for name, first in outputs.items():
        same = first.view(np.uint8) == again[name].view(np.uint8)
        if not same.all():
            where = np.unravel_index(np.argmin(same), same.shape)
            failures.append(
                f"{name}: a second run differs, first at byte {[int(i) for i in where]}: unwritten, or a race"
            )
    if failures:
        failures.append(
            f"reproduce with --seed {seed}; {plan.explain().splitlines()[plan.selection.index].strip('→ ')}"
        )
    launched = tuple(launch.kernel for launch in plan.selection.variant.program.launches)
    return Case(loaded.operator.name, workload, dims, kind, checks, tuple(failures), launched)


class Arena:
    """Device buffers with guard bytes on both sides."""

    def __init__(self, driver: Driver):
        self.driver = driver
        self.buffers: dict[str, tuple[int, int]] = {}

    def add(self, name: str, nbytes: int) -> int:
        """Allocate `nbytes` between guards; returns the address."""
        base = self.driver.allocate(nbytes + 2 * GUARD)
        self.driver.memset(base, GUARD_BYTE, nbytes + 2 * GUARD)
        self.buffers[name] = (base, nbytes)
        return base + GUARD

    def broken(self) -> list[str]:
        """The buffers whose guards were written."""
        found = []
        for name, (base, nbytes) in self.buffers.items():
            for side, address in (("before", base), ("after", base + GUARD + nbytes)):
                guard = np.empty(GUARD, np.uint8)
                self.driver.copy_to_host(guard, address)
                if (guard != GUARD_BYTE).any():
                    found.append(f"{name}: bytes {side} it were overwritten")
        return found

    def close(self) -> None:
        for base, _ in self.buffers.values():
            self.driver.free(base)


def _run(
    arena: Arena,
    plan: Any,
    contract: Operator,
    dims: dict[str, int],
    inputs: dict[str, np.ndarray],
    failures: list[str],
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Outputs of a plain run and of a graph replay."""
    driver = arena.driver
    full = contract.full_dims(dims)
    tensors: dict[str, Ptr] = {}
    for tensor in contract.tensors():
        shape = numerics.shape(tensor, full)
        size = int(np.prod(shape)) * numerics.itemsize(tensor.dtype)
        tensors[tensor.name] = Ptr(arena.add(tensor.name, size), shape, tensor.dtype)
        if tensor.name in inputs:
            driver.copy_to_device(tensors[tensor.name].address, _bytes(inputs[tensor.name]))
    workspace = None
    if plan.workspace_bytes:
        workspace = Ptr(arena.add("workspace", plan.workspace_bytes), (plan.workspace_bytes,), "uint8")
    stream = driver.create_stream()
    try:
        call = plan.bind(workspace=workspace, **tensors)
        results = []
        for poison in POISONS:
            for tensor in contract.tensors():
                if tensor.role == "out":
                    driver.memset(tensors[tensor.name].address, poison, arena.buffers[tensor.name][1])
            driver.synchronize()
            if not results:
                call(stream)
            else:
                _replay(driver, call, stream)
            driver.synchronize_stream(stream)
            results.append(
                {t.name: _read(driver, tensors[t.name]) for t in contract.tensors() if t.role in ("out", "inout")}
            )
    finally:
        driver.destroy_stream(stream)
    failures += arena.broken()
    for name, value in inputs.items():
        role = next(t.role for t in contract.tensors() if t.name == name)
        if role == "in" and not np.array_equal(_bytes(_read(driver, tensors[name])), _bytes(value)):
            failures.append(f"{name}: the kernel changed its input")
    return results[0], results[1]


def _replay(driver: Driver, call: Any, stream: int) -> None:
    driver.begin_capture(stream)
    call(stream)
    graph = driver.end_capture(stream)
    executable = driver.instantiate(graph)
    driver.launch_graph(executable, stream)
    driver.synchronize_stream(stream)
    driver.destroy_graph_exec(executable)
    driver.destroy_graph(graph)


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _read(driver: Driver, pointer: Ptr) -> np.ndarray:
    array = np.empty(pointer.shape, numerics.numpy_dtype(pointer.dtype))
    driver.copy_to_host(array.reshape(-1).view(np.uint8), pointer.address)
    return array


def _explain(check: Check) -> str:
    where = f", worst at {list(check.worst)}: got {check.got:g}, expected {check.expected:g}" if check.worst else ""
    return f"{check.output}: {check.measure} {check.error:g} exceeds {check.limit:g}{where}"


def entries(cases: list[Case], driver_version: int) -> list[dict[str, Any]]:
    """Record entries of verified cases: one an operator, dims and kernels, over all kinds of input."""
    grouped: dict[tuple, list[Case]] = {}
    for case in cases:
        grouped.setdefault((case.operator, tuple(sorted(case.dims.items())), case.kernels), []).append(case)
    out = []
    for (operator, dims, launched), group in grouped.items():
        worst: dict[str, float] = {}
        for case in group:
            for check in case.checks:
                label = f"{check.output}: {check.measure}"
                worst[label] = max(worst.get(label, 0.0), float(f"{check.error:.3g}"))
        out.append(
            {
                "kind": "verify",
                "operator": operator,
                "dims": dict(dims),
                "kernels": list(launched),
                "inputs": sorted({case.kind for case in group}),
                "ok": all(case.ok for case in group),
                "errors": worst,
                "driver": driver_version,
                "date": datetime.date.today().isoformat(),
            }
        )
    return out
