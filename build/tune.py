"""Choose, on a GPU, which of a bundle's variants runs where.

At each tuned point every variant that covers it is verified, then raced with early stopping: a few samples of all, more
of those that stay near the best, and the finalists in turns. Between neighbouring points with different picks the
crossover is found by bisection, so that guards are measured too.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from kgen.build import arena
from kgen.build.bench import Bench, Entry
from kgen.build.device import facts
from kgen.build.timing import Call, Stats
from kgen.compiler import ops
from kgen.compiler.ops.contract import Arrays, Config, Operator
from kgen.runtime.errors import ArgumentError, WrongResult
from kgen.runtime.kernels import LoadedOperator, Plan

HEATS = ((3, 1.30), (10, 1.08))  # samples of each candidate, and how far from the best one may be to go on
FINALISTS = 4
TIE = 0.01  # a pick is kept, and the model's order decides, within this share of the best
LADDER = 4  # untuned sizes are never further than this factor from a tuned one
NEAR = 1.07  # a crossover is known within this factor


@dataclass(frozen=True)
class Candidate:
    """A variant at a point."""

    plan: Plan
    call: Call

    @property
    def config(self) -> Config:
        return self.plan.selection.variant.config

    @property
    def kernels(self) -> list[str]:
        return [launch.kernel for launch in self.plan.selection.variant.program.launches]


class Tuner:
    """Tunes the operators of a bundle on a bench.

    Args:
        earlier: tuning entries of this device; a pick within a percent of the best is kept.
        tell: called with a line about each step.

    Raises:
        ArgumentError: the bench's timer cannot time single calls.
    """

    def __init__(self, bench: Bench, earlier: list[Entry], tell: Callable[[str], None] = lambda line: None):
        if bench.timer.sets != 1:
            raise ArgumentError("tuning times single calls: pip install cupti-python")
        self.bench, self.tell = bench, tell
        self._earlier = {
            (entry["contract"], _key(entry["dims"])): entry for entry in earlier if entry["kind"] == "tune"
        }

    def tune(self, name: str, ladder: bool = True) -> list[Entry]:
        """A record entry for each tuned point of operator `name`, in order.

        Args:
            ladder: besides the workloads, tune at powers of four over the declared range.

        Raises:
            WrongResult: no candidate computes the contract.
        """
        loaded = self.bench.kernels[name]
        contract = ops.from_manifest(loaded.operator)
        entries = [self._point(loaded, contract, dims) for dims in tuned_points(contract, ladder)]
        for entry, after in pairwise(entries):
            (dim,) = entry["dims"]
            entry["until"] = {dim: self._crossover(loaded, contract, dim, entry, after)}
        return entries

    def _point(self, loaded: LoadedOperator, contract: Operator, dims: dict[str, int]) -> Entry:
        with self._candidates(loaded, contract, dims) as candidates:
            times = self._race(candidates)
            kept = self._earlier.get((contract.digest(), _key(dims)))
            winner = pick([candidate.config for candidate in candidates], times, kept and kept["config"])
        chosen = candidates[winner]
        us = times[winner]
        self.tell(f"{loaded.operator.name} {_show(dims)}: {us.median:.2f} µs of {len(candidates)}  {chosen.config}")
        return {
            "kind": "tune",
            "operator": loaded.operator.name,
            "contract": contract.digest(),
            "dims": dict(dims),
            "config": chosen.config,
            "kernels": chosen.kernels,
            "until": {},
            "us": us._asdict(),
            "candidates": len(candidates),
            **facts(self.bench.driver, self.bench.kernels.device),
            **self.bench.clocks.take(),
            "method": self.bench.timer.method,
            "date": datetime.date.today().isoformat(),
        }

    def _race(self, candidates: list[Candidate]) -> dict[int, Stats]:
        """Stats of the finalists, by index."""
        running = list(range(len(candidates)))
        for samples, slack in HEATS:
            if len(running) == 1:
                break
            medians = {i: Stats.of(self._samples(candidates[i], samples)).median for i in running}
            best = min(medians.values())
            running = [i for i in running if medians[i] <= best * slack]
        if len(running) > FINALISTS:
            running = sorted(sorted(running, key=medians.__getitem__)[:FINALISTS])
        return self.bench.race({i: [candidates[i].call] for i in running})

    def _samples(self, candidate: Candidate, count: int) -> list[float]:
        return self.bench.timer.samples([candidate.call], count)

    def _crossover(self, loaded: LoadedOperator, contract: Operator, dim: str, low: Entry, high: Entry) -> int:
        """The largest size at which the pick of `low` is at least as fast as that of `high`."""
        least, most = low["dims"][dim], high["dims"][dim]
        if low["config"] == high["config"]:
            return most - 1
        while most - least > 1 and most > least * NEAR:
            middle = round((least * most) ** 0.5)
            middle = min(max(middle, least + 1), most - 1)
            with self._candidates(loaded, contract, {dim: middle}) as candidates:
                rivals = {
                    side: [c.call for c in candidates if c.config == entry["config"]][:1]
                    for side, entry in (("low", low), ("high", high))
                }
                if not all(rivals.values()):  # a guard ends here
                    faster = "low" if rivals["low"] else "high"
                else:
                    times = self.bench.race(rivals)
                    faster = "low" if times["low"].median <= times["high"].median else "high"
            if faster == "low":
                least = middle
            else:
                most = middle
        self.tell(f"{loaded.operator.name}: {low['config']} up to {dim}={least}, then {high['config']}")
        return least

    @contextmanager
    def _candidates(
        self, loaded: LoadedOperator, contract: Operator, dims: dict[str, int]
    ) -> Iterator[list[Candidate]]:
        """The variants that cover `dims`, bound to one set of tensors and verified on it."""
        driver, stream = self.bench.driver, self.bench.stream
        rng = np.random.default_rng()
        inputs = contract.inputs(dims, rng, contract.input_kinds[0])
        right: list[Arrays] = []
        candidates: list[Candidate] = []
        with arena.Arena(driver) as buffers:
            tensors = arena.stage(buffers, contract, dims, inputs)
            for plan in loaded.plans(**dims):
                bound = plan.bind(workspace=arena.workspace(buffers, plan), **tensors)
                candidate = Candidate(plan, partial(bound, stream))
                arena.poison(buffers, contract, tensors, 0xFF)
                driver.synchronize()
                candidate.call()
                driver.synchronize_stream(stream)
                outputs = arena.outputs(driver, contract, tensors)
                if not any(_same(outputs, known) for known in right):
                    if not all(check.ok for check in contract.check(dims, inputs, outputs, rng)):
                        self.tell(f"{contract.name} {_show(dims)}: wrong, not timed: {candidate.config}")
                        continue
                    right.append(outputs)
                candidates.append(candidate)
            if not candidates:
                raise WrongResult(f"{contract.name} {_show(dims)}: no candidate computes the contract")
            yield candidates


def pick(configs: list[Config], times: Mapping[int, Stats], earlier: Config | None) -> int:
    """The index to take: of those within `TIE` of the fastest the one picked earlier, else the first."""
    fastest = min(stats.median for stats in times.values())
    level = [i for i in sorted(times) if times[i].median <= fastest * (1 + TIE)]
    return next((i for i in level if configs[i] == earlier), level[0])


def tuned_points(contract: Operator, ladder: bool) -> list[dict[str, int]]:
    """The workloads and, with `ladder`, powers of four over the declared range, both ends among them."""
    ranges = {dim: ends for dim, ends in contract.dims.items() if ends[0] != ends[1]}
    if not ranges:
        return [{}]
    if len(ranges) > 1:
        raise ArgumentError(f"{contract.name}: tuning knows one range dim, and this has {', '.join(ranges)}")
    ((dim, (least, most)),) = ranges.items()
    sizes = {dims[dim] for dims in contract.workloads.values()}
    if ladder or not sizes:
        sizes |= {size for power in range(31) if least <= (size := LADDER**power) <= most} | {least, most}
    return [{dim: size} for size in sorted(sizes)]


def changed(before: list[Entry], after: list[Entry]) -> Iterator[tuple[Entry, Entry]]:
    """Pairs of an earlier and a new pick at the same point that differ in their config."""
    old = {(e["contract"], _key(e["dims"])): e for e in before if e["kind"] == "tune"}
    for entry in after:
        earlier = old.get((entry["contract"], _key(entry["dims"])))
        if earlier and earlier["config"] != entry["config"]:
            yield earlier, entry


def _same(a: Arrays, b: Arrays) -> bool:
    return all(np.array_equal(a[name].view(np.uint8), b[name].view(np.uint8)) for name in a)


def _key(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True)


def _show(dims: Mapping[str, int]) -> str:
    return " ".join(f"{dim}={value}" for dim, value in dims.items())
