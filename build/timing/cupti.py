"""Device time from CUPTI's activity records (the ``cupti-python`` package)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from kgen.build.timing.l2 import Flush
from kgen.runtime.drivers import Driver
from kgen.runtime.errors import KgenError

BUFFER_BYTES = 8 << 20
BURST_SECONDS, BURST_CALLS = 0.010, 20  # calls in flight before a rest, whichever is fewer
REST = 5  # times as long as the burst took


class CuptiTimer:
    """A call's time is the length of the union of its records' intervals, whose clock ticks every 32 ns.

    Bursts are short, with rests between them, so that power stays under its cap and the clock at its highest: a matrix
    product of 1.38 ms then repeats within 0.5 %, and without rests it drifts to 1.6 ms (H200).

    One at a time in a process, and not together with another user of CUPTI (torch.profiler): CUPTI has one client.
    """

    method = "CUPTI activity records (kernels, memsets, copies), L2 emptied before each call"
    sets = 1

    def __init__(self, driver: Driver, stream: int, flush: Flush):
        from cupti import cupti

        self._cupti, self._driver, self._stream, self._flush = cupti, driver, stream, flush
        self._records: list[Any] = []
        self._kinds = [getattr(cupti.ActivityKind, kind) for kind in ("CONCURRENT_KERNEL", "MEMSET", "MEMCPY")]
        cupti.activity_register_callbacks(lambda: (BUFFER_BYTES, 0), self._records.extend)
        for kind in self._kinds:
            cupti.activity_enable(kind)
        self._memset = cupti.ActivityKind.MEMSET

    def samples(self, calls: Sequence[Any], count: int, during: Any = None, rest: bool = True) -> list[float]:
        """See `Timer.samples`."""
        (call,), flush = calls, self._flush.on(self._stream)
        times: list[float] = []
        burst = 1
        while len(times) < count:
            burst = min(burst, count - len(times))
            self._collect()
            start = time.perf_counter()
            for _ in range(burst):
                flush()
                call()
            if during:
                during()
            got = per_call(self._collect(), self._is_flush)
            seconds = time.perf_counter() - start
            if len(got) != burst:
                raise KgenError(f"CUPTI recorded {len(got)} of {burst} calls: is another profiler active?")
            times += got
            burst = max(1, min(BURST_CALLS, int(BURST_SECONDS * burst / seconds)))
            if rest:
                time.sleep(REST * seconds)
        return times

    def close(self) -> None:
        for kind in self._kinds:
            self._cupti.activity_disable(kind)
        self._flush.close()

    def _collect(self) -> list[Any]:
        self._driver.synchronize_stream(self._stream)
        self._cupti.activity_flush_all(1)
        records = [*self._records]
        self._records.clear()
        return records

    def _is_flush(self, record: Any) -> bool:
        return record.kind == self._memset and record.bytes == self._flush.nbytes


def per_call(records: Iterable[Any], is_flush: Any) -> list[float]:
    """Microseconds of each call: the union of the intervals (``start``, ``end`` in ns) that follow each flush."""
    times: list[float] = []
    covered = 0
    for record in sorted(records, key=lambda r: r.start):
        if is_flush(record):
            times.append(0.0)
            covered = record.end
        elif times:
            times[-1] += max(0, record.end - max(record.start, covered)) / 1000
            covered = max(covered, record.end)
    return times
