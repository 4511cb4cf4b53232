"""Device time from graph replay, where CUPTI is not installed.

One graph runs the call over `SETS` operand sets, another over half of them; the difference of their times over half
the number of calls is one call's time, without what a graph launch costs. Each set is used once after a flush, so every
call is cold. What stays in the figure is the gap between two kernels of a graph, about a microsecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kgen.build.timing.l2 import Flush
from kgen.runtime.drivers import Driver

SETS = 16


class GraphTimer:
    """See the module. Calls must be capturable."""

    method = f"graph replay over {SETS} operand sets, L2 emptied before each replay, gaps between kernels included"
    sets = SETS

    def __init__(self, driver: Driver, stream: int, flush: Flush):
        self._driver, self._stream, self._flush = driver, stream, flush
        self._events = driver.create_event(), driver.create_event()

    def samples(self, calls: Sequence[Any], count: int, during: Any = None, rest: bool = True) -> list[float]:
        """See `Timer.samples`; a replay is short enough to need no rest."""
        half = len(calls) // 2
        graphs = [self._instantiate(part) for part in (calls[:half], calls)]
        try:
            for graph in graphs:
                self._replay(graph)
            times = []
            for _ in range(count):
                short, full = (self._replay(graph) for graph in graphs)
                times.append((full - short) / (len(calls) - half))
            if during:
                self._driver.launch_graph(graphs[1], self._stream)
                during()
        finally:
            self._driver.synchronize_stream(self._stream)
            for graph in graphs:
                self._driver.destroy_graph_exec(graph)
        return times

    def close(self) -> None:
        for event in self._events:
            self._driver.destroy_event(event)
        self._flush.close()

    def _instantiate(self, calls: Sequence[Any]) -> int:
        driver = self._driver
        calls[0]()  # a library's first call may allocate, which a capture forbids
        driver.synchronize_stream(self._stream)
        driver.begin_capture(self._stream)
        try:
            for call in calls:
                call()
        finally:
            graph = driver.end_capture(self._stream)
        try:
            return driver.instantiate(graph)
        finally:
            driver.destroy_graph(graph)

    def _replay(self, graph: int) -> float:
        """Microseconds from the end of the flush to the end of the graph."""
        driver, stream, (start, end) = self._driver, self._stream, self._events
        self._flush.on(stream)()
        driver.record_event(start, stream)
        driver.launch_graph(graph, stream)
        driver.record_event(end, stream)
        return driver.elapsed_ms(start, end) * 1000
