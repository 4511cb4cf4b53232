"""What two bundles run for the workloads of the operators that they share, and what records say of its time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kgen.build.published import full_dims
from kgen.build.records import Entry, Records
from kgen.build.report import SM_COUNT
from kgen.runtime.bundle import Bundle
from kgen.runtime.errors import FormatError, UnsupportedShape
from kgen.runtime.format.manifest import Manifest, Operator
from kgen.runtime.plan import select

RECORDS = "records/records.json"


@dataclass(frozen=True)
class Choice:
    """What runs: a variant's index, its config, and the ids of its kernels."""

    variant: int
    config: dict[str, Any]
    kernels: list[str]


@dataclass(frozen=True)
class Route:
    """What each bundle runs for a workload; None where it refuses those dims."""

    operator: str
    workload: str
    dims: dict[str, int]
    target: str
    a: Choice | None
    b: Choice | None


@dataclass(frozen=True)
class Time:
    """Recorded medians of what each bundle runs for a workload, in µs; None where there is no record.

    Attributes:
        device: None where no device has any.
        kind, method: of the records; both sides were measured alike.
        ratio: A's time over B's: above 1 B is faster.
    """

    operator: str
    workload: str
    dims: dict[str, int]
    device: str | None = None
    kind: str | None = None
    method: str | None = None
    a_us: float | None = None
    b_us: float | None = None
    ratio: float | None = None


def routes(a: Manifest, b: Manifest, sm_count: int = SM_COUNT) -> Iterator[Route]:
    """One for each workload, and each target that both bundles are for."""
    for old, new in _shared(a, b):
        for workload, dims in _workloads(old, new):
            for target in (target for target in a.targets if target in b.targets):
                choices = (choice(operator, target, sm_count, dims) for operator in (old, new))
                yield Route(old.name, workload, dims, target, *choices)


def choice(operator: Operator, target: str, sm_count: int, dims: dict[str, int]) -> Choice | None:
    """What `operator` runs at `dims`; None where it refuses them."""
    try:
        chosen = select(operator, target, sm_count, dims)
    except UnsupportedShape:
        return None
    return Choice(chosen.index, chosen.variant.config, [launch.kernel for launch in chosen.variant.program.launches])


def moved(route: Route) -> bool:
    """Whether other code runs; that a variant has another number does not count."""
    a, b = ((side.config, side.kernels) if side else None for side in (route.a, route.b))
    return a != b


def carried(bundle: Bundle) -> Records:
    """The records that a bundle carries as evidence.

    Raises:
        FormatError: they are not JSON.
    """
    content = bundle.evidence(RECORDS)
    try:
        return Records(json.loads(content)) if content else Records()
    except ValueError as error:
        raise FormatError(f"{bundle.path}: evidence/{RECORDS}: {error}") from None


def times(a: Manifest, b: Manifest, records: Iterable[Records]) -> list[Time]:
    """One item a workload and device that has a record, or one item without a device.

    Where there are several records, it is of those that both sides have, and of benchmarks before tuning.
    """
    known = [(device, entry) for r in records for device, entries in r.devices.items() for entry in entries]
    found: list[Time] = []
    for old, new in _shared(a, b):
        for workload, dims in _workloads(old, new):
            best: dict[str, Time] = {}
            for time in _recorded(old, new, {*a.targets, *b.targets}, workload, dims, known):
                best[time.device] = max(best.get(time.device, time), time, key=_preference)
            found += best.values() or [Time(old.name, workload, dims)]
    return found


def _recorded(
    a: Operator, b: Operator, targets: set[str], workload: str, dims: dict[str, int], known: list[tuple[str, Entry]]
) -> Iterator[Time]:
    """A time for each way in which the kernels of `a` or `b` were measured at `dims`."""
    medians: dict[tuple, dict[str, float]] = {}
    for device, entry in known:
        if entry["operator"] != a.name or "median" not in entry.get("us", {}):
            continue
        sm_count = entry.get("sm_count", SM_COUNT)
        way = (device, sm_count, entry["kind"], entry.get("method"))
        for side, operator in (("a_us", a), ("b_us", b)):
            if full_dims(operator, entry["dims"]) != full_dims(operator, dims):
                continue
            choices = [choice(operator, target, sm_count, dims) for target in targets]
            if any(chosen and chosen.kernels == entry["kernels"] for chosen in choices):
                medians.setdefault(way, {})[side] = entry["us"]["median"]
    for (device, _, kind, method), us in medians.items():
        ratio = us["a_us"] / us["b_us"] if len(us) == 2 else None
        yield Time(a.name, workload, dims, device, kind, method, **us, ratio=ratio)


def _preference(time: Time) -> tuple[bool, bool]:
    return time.ratio is not None, time.kind == "bench"


def _shared(a: Manifest, b: Manifest) -> Iterator[tuple[Operator, Operator]]:
    for name, operator in a.operators.items():
        if name in b.operators:
            yield operator, b.operators[name]


def _workloads(a: Operator, b: Operator) -> list[tuple[str, dict[str, int]]]:
    """The workloads of both; an operator without range dims has one anyway."""
    found = [*a.workloads.items(), *b.workloads.items()]
    if not found and not (a.range_dims or b.range_dims):
        found = [("", {})]
    return [item for i, item in enumerate(found) if item not in found[:i]]
