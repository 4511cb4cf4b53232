"""Time a bundle's operators at their workloads, beside the floors of the device and other libraries' kernels.

kgen and its peers take turns (A B A B) in bursts, each call with L2 emptied before it, in one process on one stream.
A peer's outputs are checked against the contract, so that one that computes something else is named as such.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np

from kgen.build import arena, peers
from kgen.build.device import Clocks, facts
from kgen.build.floors import Floors
from kgen.build.timing import Call, Stats, open_timer
from kgen.compiler import ops
from kgen.compiler.ops.contract import Arrays, Operator
from kgen.runtime.errors import WrongResult
from kgen.runtime.kernels import Kernels, LoadedOperator

Entry = dict[str, Any]
ROUNDS = 3
MAX_ROUND_SECONDS = 0.5


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        samples: of each contender, over all rounds; fewer where a call takes long, but at least two a round.
        sustained: seconds of back-to-back calls before each contender's sustained figure; 0 for none.
        check: compare kgen's own outputs with the reference too (peers' always are).
    """

    samples: int = 60
    sustained: float = 0.0
    check: bool = True


class Bench:
    """A bench on one device: its stream, timer, floors and clocks."""

    def __init__(self, kernels: Kernels, method: str | None = None, options: Options = Options()):
        driver = kernels.driver
        self.kernels, self.driver, self.options = kernels, driver, options or Options()
        self._stack = ExitStack()
        self._stack.enter_context(driver.using(kernels.context))
        self.stream = driver.create_stream()
        self._stack.callback(driver.destroy_stream, self.stream)
        self.timer = open_timer(driver, self.stream, kernels.device, method)
        self._stack.callback(self.timer.close)
        self.clocks = Clocks(driver, kernels.device)
        self.has_torch = find_spec("torch") is not None
        if self.has_torch:
            import torch

            torch.cuda.set_stream(torch.cuda.ExternalStream(self.stream, device=kernels.device))
        self.floors = Floors(driver, self.stream, self.timer)
        self._stack.callback(self.floors.close)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, name: str, dims: Mapping[str, int], adapters: list[ModuleType] | None = None) -> Entry:
        """The record entry of one operator at `dims`.

        Raises:
            ArgumentError, UnsupportedShape: as plan and bind do.
            WrongResult: kgen's own outputs do not match the reference; a wrong kernel is not timed.
        """
        loaded = self.kernels[name]
        contract = ops.from_manifest(loaded.operator)
        full = contract.full_dims(dims)
        rng = np.random.default_rng()
        inputs = contract.inputs(dims, rng, contract.input_kinds[0])
        with ExitStack() as stack:
            plan = loaded.plan(**dims)
            staged = [self._stage(stack, plan, contract, dims, inputs) for _ in range(self.timer.sets)]
            calls = {"kgen": [call for call, _ in staged]}
            tensors = staged[0][1]
            calls["kgen"][0]()
            self.driver.synchronize_stream(self.stream)
            outputs = arena.outputs(self.driver, contract, tensors)
            if self.options.check:
                _require(contract, dims, inputs, outputs, rng)
            found, missing = peers.find(adapters, contract, full, tensors) if adapters else ([], {})
            agreement = {peer.name: self._agrees(peer, contract, dims, inputs, outputs, rng) for peer in found}
            calls |= {peer.name: [peer.call] * self.timer.sets for peer in found}
            times = self.race(calls)
            entry = self._entry(loaded, contract, dims, plan, times["kgen"])
            entry["peers"] = {
                peer.name: {"us": times[peer.name]._asdict(), "agrees": agrees, "note": note}
                for peer in found
                for agrees, note in [agreement[peer.name]]
            }
            entry["missing"] = missing
            if self.options.sustained:
                entry["sustained_us"] = {label: round(us, 3) for label, us in self.sustained(calls).items()}
        return entry

    def race(self, calls: Mapping[str, list[Call]]) -> dict[str, Stats]:
        """Each contender's time, in `ROUNDS` turns."""
        count = {label: self._count(own) for label, own in calls.items()}
        samples: dict[str, list[float]] = {label: [] for label in calls}
        for turn in range(ROUNDS):
            for label in list(calls)[:: -1 if turn % 2 else 1]:
                samples[label] += self.timer.samples(calls[label], count[label], self.clocks.sample)
        return {label: Stats.of(times) for label, times in samples.items()}

    def sustained(self, calls: Mapping[str, list[Call]]) -> dict[str, float]:
        """Median microseconds of each contender after seconds of its calls back to back: at the power cap."""
        medians: dict[str, list[float]] = {label: [] for label in calls}
        for _ in range(2):
            for label, own in calls.items():
                end = time.monotonic() + self.options.sustained
                while time.monotonic() < end:
                    for _ in range(20):
                        own[0]()
                    self.driver.synchronize_stream(self.stream)
                medians[label].append(Stats.of(self.timer.samples(own, 10, self.clocks.sample, rest=False)).median)
        return {label: sum(values) / len(values) for label, values in medians.items()}

    def _count(self, calls: list[Call]) -> int:
        """Samples a round: those asked for, unless the round would take long."""
        seconds = min(self.timer.samples(calls, 3)) * 1e-6 * len(calls)
        return max(2, min(self.options.samples // ROUNDS, int(MAX_ROUND_SECONDS / max(seconds, 1e-9))))

    def _stage(
        self, stack: ExitStack, plan: Any, contract: Operator, dims: Mapping[str, int], inputs: Arrays
    ) -> tuple[Call, dict[str, Any]]:
        buffers = stack.enter_context(arena.Arena(self.driver))
        tensors = arena.stage(buffers, contract, dims, inputs)
        call = plan.bind(workspace=arena.workspace(buffers, plan), **tensors)
        self.driver.synchronize()
        return partial(call, self.stream), tensors

    def _agrees(
        self,
        peer: peers.Peer,
        contract: Operator,
        dims: Mapping[str, int],
        inputs: Arrays,
        ours: Arrays,
        rng: np.random.Generator,
    ) -> tuple[bool, str]:
        """Whether the peer computes the contract as far as other libraries can be asked to, and its note."""
        theirs = peer.outputs()
        dtypes = {t.name: t.dtype for t in contract.tensors()}
        got = ours | {name: peers.to_numpy(value, dtypes[name]) for name, value in theirs.items()}
        if all(np.array_equal(got[name].view(np.uint8), ours[name].view(np.uint8)) for name in theirs):
            return True, peer.note
        wrong = [check for check in contract.near(dims, inputs, got, rng) if not check.ok]
        notes = [peer.note, *(f"{c.output}: {c.measure} {c.error:.3g} exceeds {c.limit:g}" for c in wrong)]
        return not wrong, "; ".join(note for note in notes if note)

    def _entry(
        self, loaded: LoadedOperator, contract: Operator, dims: Mapping[str, int], plan: Any, us: Stats
    ) -> Entry:
        traffic, flops = contract.traffic(dims), contract.flops(dims)
        roofline = self.floors.roofline(traffic, flops, contract.math)
        streaming = self.floors.streaming(traffic)
        rate = self.floors.rate(contract.math) if contract.math else None
        return {
            "kind": "bench",
            "operator": loaded.operator.name,
            "contract": contract.digest(),
            "dims": dict(dims),
            "kernels": [launch.kernel for launch in plan.selection.variant.program.launches],
            "us": us._asdict(),
            "floor_us": {"roofline": round(roofline, 3), "streaming": streaming.median},
            "ceilings": {
                "copy_tb_s": round(self.floors.bandwidth / 1e12, 3),
                "matmul_tflops": rate and round(rate / 1e12, 1),
            },
            "gb_s": round(traffic.total / us.median / 1e3, 1),
            "tflops": round(flops / us.median / 1e6, 2),
            **facts(self.driver, self.kernels.device),
            **self.clocks.take(),
            "method": self.timer.method,
            "date": datetime.date.today().isoformat(),
        }


def points(kernels: Kernels, names: list[str], workloads: list[str]) -> Iterator[tuple[str, str, dict[str, int]]]:
    """(operator, workload, dims) to measure; all operators and workloads where the lists are empty."""
    for name in names or list(kernels):
        for workload, dims in kernels[name].operator.workloads.items():
            if not workloads or workload in workloads:
                yield name, workload, dims


def _require(
    contract: Operator, dims: Mapping[str, int], inputs: Arrays, outputs: Arrays, rng: np.random.Generator
) -> None:
    for check in contract.check(dims, inputs, outputs, rng):
        if not check.ok:
            raise WrongResult(
                f"{contract.name} {dict(dims)}: {check.output}: {check.measure} {check.error:g} exceeds "
                f"{check.limit:g}; kgen verify says more"
            )
