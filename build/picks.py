"""What tuning picked, as the guards of a build.

A tuning entry holds the config that was fastest at one point (``dims``) of a contract, and ``until``: the largest size
at which it still was at least as fast as the next point's pick. Sorted by size they make a dispatch of ``m <= until``,
the last one without a bound. A config's own guard stays in force; where that leaves a hole, the untuned dispatch fills
it. Picks of several devices are told apart by their ``sm_count``.
"""

from __future__ import annotations

from collections.abc import Iterator

from kgen.build.coverage import reach
from kgen.build.records import Entry, Records
from kgen.compiler.model import Candidate
from kgen.compiler.ops.contract import Config, Operator
from kgen.runtime.format.expr import Expr
from kgen.runtime.format.manifest import Operator as ManifestOperator


def dispatch(contract: Operator, records: Records) -> list[Candidate]:
    """(guard, config) pairs, first match wins: the picks in `records`, or the contract's own dispatch without any."""
    devices = _devices(contract, records)
    if not devices:
        return contract.dispatch()
    rules: list[Candidate] = []
    for entries in devices[1:]:
        here = ["==", "sm_count", entries[0]["sm_count"]]
        rules += [(_both(here, guard), config) for guard, config in _rules(contract, entries)]
    rules += _rules(contract, devices[0])
    guards = [guard for guard, _ in rules]
    if reach(contract.name, contract.dims, guards)[1] is not None:
        rules += contract.dispatch()
    firsts, _ = reach(contract.name, contract.dims, [guard for guard, _ in rules])
    return [rules[index] for index in sorted(firsts)]


def stale(contract: Operator, records: Records, built: ManifestOperator) -> Iterator[str]:
    """A sentence for each pick of `dispatch` that was measured on other kernels than `built` has for its config."""
    kernels = [(v.config, [launch.kernel for launch in v.program.launches]) for v in built.variants]
    for entries in _devices(contract, records):
        for entry in entries:
            if (entry["config"], entry["kernels"]) not in kernels:
                where = "".join(f" {dim}={size}" for dim, size in entry["dims"].items())
                yield f"{contract.name}{where}: tuned on other code; run kgen tune again"


def _devices(contract: Operator, records: Records) -> list[list[Entry]]:
    """The tuning entries of `contract`, by size; the device with the most first, and one device an ``sm_count``."""
    digest = contract.digest()
    tuned = [
        sorted(
            (e for e in entries if e["kind"] == "tune" and e.get("contract") == digest),
            key=lambda entry: sorted(entry["dims"].items()),
        )
        for _, entries in sorted(records.devices.items())
    ]
    distinct: dict[int, list[Entry]] = {}
    for entries in sorted(filter(None, tuned), key=len, reverse=True):
        distinct.setdefault(entries[0]["sm_count"], entries)
    return list(distinct.values())


def _rules(contract: Operator, entries: list[Entry]) -> list[Candidate]:
    """The picks of one device; neighbours with the same config are one rule."""
    offered = contract.candidates()
    rules: list[Candidate] = []
    for i, entry in enumerate(entries):
        if i + 1 < len(entries) and entries[i + 1]["config"] == entry["config"]:
            continue
        bound = _until(entry, entries[i + 1]) if i + 1 < len(entries) else 1
        rules.append((_both(_legal(entry["config"], offered), bound), entry["config"]))
    return rules


def _until(entry: Entry, after: Entry) -> Expr:
    """The bound of `entry`: its crossover, or just below the next point where that was tuned later, in between."""
    ((dim, size),) = after["dims"].items()
    return ["<=", dim, min(entry["until"].get(dim, size - 1), size - 1)]


def _legal(config: Config, offered: list[Candidate]) -> Expr:
    """The guard that the contract gives `config`."""
    return next((guard for guard, known in offered if known == config), 1)


def _both(a: Expr, b: Expr) -> Expr:
    """Both guards."""
    return b if a == 1 else a if b == 1 else ["and", a, b]
