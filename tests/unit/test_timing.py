"""What timers make of records, and the choices of tuning, without a GPU."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest

from kgen.build import timing
from kgen.build.timing import Stats
from kgen.build.timing.cupti import per_call
from kgen.build.timing.graph import SETS, GraphTimer
from kgen.build.timing.l2 import Flush
from kgen.build.tune import changed, pick, tuned_points
from kgen.compiler.ops.gemm import A, B, Gemm, Out
from kgen.runtime.errors import ArgumentError

FLUSH = -1


def records(*spans):
    """Activity records of (kind, start, end) in ns."""
    return [SimpleNamespace(kind=kind, start=start, end=end) for kind, start, end in spans]


def times(*spans):
    return per_call(records(*spans), lambda record: record.kind == FLUSH)


def test_a_calls_time_is_the_union_of_its_records():
    assert times((FLUSH, 0, 10), (0, 20, 1020)) == [1.0]
    assert times((FLUSH, 0, 10), (0, 1000, 3000), (0, 2000, 5000), (0, 6000, 7000)) == [5.0]  # overlap once, gap not
    assert times((FLUSH, 0, 10), (0, 1000, 9000), (0, 2000, 3000)) == [8.0]  # one inside another
    assert times((0, 0, 5), (FLUSH, 5, 9), (0, 10, 1010), (FLUSH, 2000, 3000), (0, 3000, 6000)) == [1.0, 3.0]


def test_records_may_come_in_any_order_and_a_flush_may_run_into_its_call():
    assert times((0, 3000, 6000), (FLUSH, 2000, 3000), (0, 10, 1010), (FLUSH, 5, 9)) == [1.0, 3.0]
    assert times((FLUSH, 0, 1000), (0, 900, 2000)) == [1.0]  # dependent launch: its wait for the flush is not its own


def test_a_call_that_ran_nothing_is_seen():
    assert times((FLUSH, 0, 10), (FLUSH, 20, 30)) == [0.0, 0.0]


def test_stats():
    stats = Stats.of([float(x) for x in range(101)])
    assert stats == (50.0, 10.0, 90.0, 101)
    assert stats.spread == pytest.approx(0.8)


def test_a_method_that_is_not_there_is_refused(driver, monkeypatch):
    with pytest.raises(ArgumentError, match="cupti or graph"):
        timing.open_timer(driver, 1, 0, "stopwatch")
    monkeypatch.setattr(timing, "find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match="pip install cupti-python"):
        timing.open_timer(driver, 1, 0, "cupti")


def test_graph_replay_takes_the_difference_of_two_graphs(monkeypatch):
    """A graph launch costs 9 µs and a call 2: the difference over half the calls is the call's."""

    class Fake:
        def __init__(self):
            self.captured, self.launched, self.flushed, self.destroyed = 0, 0, 0, []

        def create_event(self):
            return 1

        def begin_capture(self, stream):
            self.captured = 0

        def end_capture(self, stream):
            return self.captured

        def instantiate(self, graph):
            return graph

        def destroy_graph(self, graph):
            pass

        def destroy_graph_exec(self, graph):
            self.destroyed.append(graph)

        def record_event(self, event, stream):
            pass

        def launch_graph(self, graph, stream):
            self.launched = graph

        def elapsed_ms(self, start, end):
            return (9 + 2 * self.launched) / 1000

        def synchronize_stream(self, stream):
            pass

        def attribute(self, device, attribute):
            return 1 << 20

        def allocate(self, nbytes):
            return 256

        def memset_launcher(self, address, byte, count, stream):
            assert count == 2 << 20

            def flush():
                self.flushed += 1

            return flush

    driver = Fake()

    def call():
        driver.captured += 1

    timer = GraphTimer(driver, 1, Flush(driver, 0))
    assert timer.samples([call] * SETS, 3) == pytest.approx([2.0] * 3)
    assert driver.flushed == 2 * (1 + 3)  # a warm-up and three samples of two graphs, each after a flush
    assert driver.destroyed == [SETS // 2, SETS]


def gemm(m=(1, 8192), workloads=None):
    dtype = "bfloat16"
    dims = {"m": m, "n": (256, 256), "k": (256, 256)}
    return Gemm(
        name="g", dims=dims, workloads=workloads or {}, a=A(dtype=dtype), b=B(dtype=dtype), out=Out(dtype=dtype)
    )


def test_tuned_points_are_the_workloads_and_a_ladder():
    sizes = [point["m"] for point in tuned_points(gemm(workloads={"w": {"m": 100}}), ladder=True)]
    assert sizes == [1, 4, 16, 64, 100, 256, 1024, 4096, 8192]
    assert tuned_points(gemm(workloads={"w": {"m": 100}}), ladder=False) == [{"m": 100}]
    assert tuned_points(gemm(m=(64, 64)), ladder=True) == [{}]
    assert all(after / before <= 4 for before, after in pairwise(sizes))


def stats(*medians):
    return {i: Stats(median, median, median, 20) for i, median in enumerate(medians) if median}


def test_the_fastest_is_picked_and_within_a_percent_the_earlier_one_or_the_first():
    configs = [{"t": 1}, {"t": 2}, {"t": 3}]
    assert pick(configs, stats(10.0, 9.0, 11.0), None) == 1
    assert pick(configs, stats(10.0, 9.95, 9.93), None) == 0  # level: the model's order
    assert pick(configs, stats(10.0, 9.95, 9.93), {"t": 3}) == 2  # level: the pick stays
    assert pick(configs, stats(10.0, 9.0, 11.0), {"t": 3}) == 1  # not level any more
    assert pick(configs, stats(0, 9.0, 8.0), {"t": 1}) == 2  # one that did not reach the final


def test_changed_picks_are_found_at_equal_points_only():
    def entry(m, t, contract="c"):
        return {"kind": "tune", "contract": contract, "dims": {"m": m}, "config": {"t": t}}

    before = [entry(1, 1), entry(2, 1), entry(3, 1, "other")]
    after = [entry(1, 1), entry(2, 2), entry(3, 2), entry(4, 2)]
    assert list(changed(before, after)) == [(before[1], after[1])]
