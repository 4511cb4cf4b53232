"""Run a bundle's operators on a GPU against their numpy references.

Each case: random inputs, outputs poisoned, guard bytes around every buffer, a plain run; then again with fresh uploads
and another poison, through a captured graph on a second stream. The contract checks the outputs; guards and inputs
must stay as they were and locks be zero again; and the two runs must give the same bits: an element that a kernel
leaves unwritten holds the poison of each, and a race seldom ends twice in the same way.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from kgen.build import arena, compare
from kgen.compiler.ops.contract import Arrays, Check, Config, Operator
from kgen.runtime.drivers import Driver
from kgen.runtime.errors import DriverError, KgenError
from kgen.runtime.format.expr import evaluate
from kgen.runtime.kernels import Kernels, Plan
from kgen.runtime.tensors import Ptr

POISONS = (0xFF, 0x5A)  # 0xFF…: NaN in every float format; -1 as an integer


@dataclass(frozen=True)
class Point:
    """An operator at a size (of its range dims; a workload's, if it has a name), with a kind of input."""

    contract: Operator
    workload: str | None
    dims: dict[str, int]
    kind: str

    def __str__(self) -> str:
        dims = [f"{dim}={value}" for dim, value in self.dims.items()]
        return " ".join([self.contract.name, *dims, *([f"({self.workload})"] if self.workload else []), self.kind])


@dataclass(frozen=True)
class Case:
    """What came of a point.

    Attributes:
        failures: a sentence each; none where it passed.
        kernels, variant, config: what ran: ids, the variant's place among the operator's, and its config.
        lost: the device faulted, and its context is of no more use.
        ran: false for the points after that.
    """

    point: Point
    seed: int
    checks: tuple[Check, ...] = ()
    failures: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    variant: int = 0
    config: Config | None = None
    lost: bool = False
    ran: bool = True

    @property
    def status(self) -> str:
        """``ok``, ``failed`` or ``not run``."""
        return "not run" if not self.ran else "failed" if self.failures else "ok"

    def to_json(self) -> dict[str, Any]:
        """Plain data; numbers that JSON lacks (NaN, infinities) are null."""
        checks = [
            {key: _finite(value) for key, value in asdict(check).items()} | {"ok": check.ok} for check in self.checks
        ]
        point = self.point
        return {
            "operator": point.contract.name,
            "workload": point.workload,
            "dims": point.dims,
            "kind": point.kind,
            "status": self.status,
            "checks": checks,
            "failures": list(self.failures),
            "kernels": list(self.kernels),
            "config": self.config,
        }


def points(
    contract: Operator,
    workloads: Collection[str] = (),
    sizes: Collection[dict[str, int]] = (),
    kinds: Collection[str] = (),
) -> Iterator[Point]:
    """Every workload and edge with the contract's first kind of input, and the one in the middle with the others.

    Args:
        workloads, sizes: only these of its workloads, or only these values of its range dims.
        kinds: only these of its kinds, at every size.
    """
    named: list[tuple[str | None, dict[str, int]]] = [(None, size) for size in sizes]
    if not sizes:
        named += [item for item in contract.workloads.items() if not workloads or item[0] in workloads]
    if not sizes and not workloads:
        named += [(None, size) for size in contract.edge_dims()]
        named = named or [(None, {})]
    distinct: dict[tuple, tuple[str | None, dict[str, int]]] = {}
    for name, size in named:
        distinct.setdefault(tuple(size.items()), (name, size))
    named = list(distinct.values())
    everywhere = [kind for kind in contract.input_kinds if kind in kinds] if kinds else contract.input_kinds[:1]
    for workload, size in named:
        for kind in everywhere:
            yield Point(contract, workload, size, kind)
    if named and not kinds:
        for kind in contract.input_kinds[1:]:
            yield Point(contract, *named[len(named) // 2], kind)


def verify(kernels: Kernels, todo: Iterable[Point], seed: int) -> Iterator[Case]:
    """Verify the points in order. After a fault on the device the others are cases that did not run."""
    lost = False
    for point in todo:
        case = Case(point, seed, ran=False) if lost else verify_point(kernels, point, seed)
        lost |= case.lost
        yield case


def verify_point(kernels: Kernels, point: Point, seed: int) -> Case:
    """Verify one point. Its inputs depend on the seed, the operator's name and the dims alone."""
    contract, dims, driver = point.contract, point.dims, kernels.driver
    rng = np.random.default_rng([seed, *contract.name.encode(), *(dims[dim] for dim in sorted(dims))])
    inputs = contract.inputs(dims, rng, point.kind)
    case = Case(point, seed)
    try:
        plan = kernels[contract.name].plan(**dims)
        launched = tuple(launch.kernel for launch in plan.selection.variant.program.launches)
        case = replace(case, kernels=launched, variant=plan.selection.index, config=dict(plan.selection.variant.config))
        with driver.using(kernels.context), arena.Arena(driver) as buffers:
            (first, again), failures = _run(buffers, plan, contract, dims, inputs)
    except KgenError as error:
        return replace(case, failures=(f"{type(error).__name__}: {error}",), lost=_is_lost(driver, kernels.context))
    checks = contract.check(dims, inputs, first, rng)
    if not contract.deterministic:
        checks = [*checks, *contract.check(dims, inputs, again, rng)]
    wrong = [compare.explain(check) for check in checks if not check.ok]
    for name, index in contract.undefined(dims, inputs).items():
        first[name][index] = again[name][index] = 0
    for name in first:
        wrong += compare.runs(name, first[name], again[name], POISONS, contract.deterministic)
    return replace(case, checks=tuple(checks), failures=tuple(dict.fromkeys([*wrong, *failures])))


def _run(
    buffers: arena.Arena, plan: Plan, contract: Operator, dims: dict[str, int], inputs: Arrays
) -> tuple[list[Arrays], list[str]]:
    """Outputs of a plain run and of a graph's replay, and what they damaged."""
    driver = buffers.driver
    tensors = arena.stage(buffers, contract, dims, {})
    workspace = arena.workspace(buffers, plan)
    call = plan.bind(workspace=workspace, **tensors)
    results, failures = [], []
    for byte, run in zip(POISONS, (call, partial(_replay, driver, call)), strict=True):
        for name, array in inputs.items():
            arena.upload(driver, tensors[name], array)
        arena.poison(buffers, contract, tensors, byte)
        _poison_scratch(driver, plan, workspace, byte)
        driver.synchronize()
        stream = buffers.stream()
        run(stream)
        driver.synchronize_stream(stream)
        results.append(arena.outputs(driver, contract, tensors))
        failures += [*buffers.broken(), *_held_locks(driver, plan, workspace)]
        for tensor in contract.tensors():
            if tensor.role == "in":
                failures += compare.changed(tensor.name, inputs[tensor.name], arena.read(driver, tensors[tensor.name]))
    return results, failures


def _replay(driver: Driver, call: Callable[[int], None], stream: int) -> None:
    driver.begin_capture(stream)
    try:
        call(stream)
    except DriverError:
        with suppress(DriverError):  # it ends the capture, and says again that it failed
            driver.end_capture(stream)
        raise
    graph = driver.end_capture(stream)
    executable = driver.instantiate(graph)
    driver.launch_graph(executable, stream)
    driver.synchronize_stream(stream)
    driver.destroy_graph_exec(executable)
    driver.destroy_graph(graph)


def _poison_scratch(driver: Driver, plan: Plan, workspace: Ptr | None, byte: int) -> None:
    """A call must not depend on what its scratch memory holds."""
    for _, address, nbytes in _parts(plan, workspace, "scratch"):
        driver.memset(address, byte, nbytes)


def _held_locks(driver: Driver, plan: Plan, workspace: Ptr | None) -> Iterator[str]:
    """A sentence for each part with locks that a run did not leave zero, as the next run needs them."""
    for name, address, nbytes in _parts(plan, workspace, "locks"):
        locks = np.empty(nbytes, np.uint8)
        driver.copy_to_host(locks, address)
        if locks.any():
            yield f"{name}: not zero after a run, the first at byte {np.flatnonzero(locks)[0]} of {nbytes}"


def _parts(plan: Plan, workspace: Ptr | None, kind: str) -> Iterator[tuple[str, int, int]]:
    """(name, address, bytes) of the workspace's parts of a kind; those that are empty are left out."""
    symbols = plan.selection.symbols
    for part in plan.selection.variant.program.workspace:
        if part.kind == kind and (nbytes := evaluate(part.bytes, symbols)):
            yield part.name, workspace.address + evaluate(part.offset, symbols), nbytes


def _is_lost(driver: Driver, context: int) -> bool:
    """Whether nothing works any more, as after a fault on the device; other errors leave the context as it was."""
    try:
        with driver.using(context):
            driver.synchronize()
    except DriverError:
        return True
    return False


def entries(cases: Iterable[Case], about: dict[str, Any]) -> list[dict[str, Any]]:
    """Record entries of the cases that ran: one an operator and size, over all kinds of input.

    Args:
        about: fields that say what it was measured on (`device.facts`).
    """
    grouped: dict[tuple, list[Case]] = {}
    for case in cases:
        if case.ran:
            key = (case.point.contract.name, tuple(case.point.dims.items()))
            grouped.setdefault(key, []).append(case)
    return [_entry(group, about) for group in grouped.values()]


def _entry(group: list[Case], about: dict[str, Any]) -> dict[str, Any]:
    worst: dict[str, float] = {}
    for check in (check for case in group for check in case.checks):
        label = f"{check.output}: {check.measure}"
        worst[label] = float(np.maximum(worst.get(label, 0.0), float(f"{check.error:.3g}")))  # NaN stays
    case = group[0]
    return {
        "kind": "verify",
        "operator": case.point.contract.name,
        "contract": case.point.contract.digest(),
        "dims": dict(case.point.dims),
        "kernels": list(case.kernels),
        "inputs": sorted({case.point.kind for case in group}),
        "seed": case.seed,
        "ok": not any(case.failures for case in group),
        "errors": {label: _finite(error) for label, error in worst.items()},
        **about,
        "date": datetime.date.today().isoformat(),
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
