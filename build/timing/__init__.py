"""Device time of a call with a cold L2: through CUPTI where it is installed, else by replaying graphs.

A timer empties L2 before each call (a memset of twice its size) and times what the call itself runs: kernels, memsets
and copies. Launch gaps and host time do not count with CUPTI; graph replay contains the gaps between kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import NamedTuple, Protocol

from kgen.build.timing.l2 import Flush
from kgen.runtime.drivers import Driver
from kgen.runtime.errors import ArgumentError

Call = Callable[[], object]
METHODS = ("cupti", "graph")


class Timer(Protocol):
    """Times calls on its stream.

    Attributes:
        method: how, in a sentence for records.
        sets: how many calls over operands of their own `samples` wants.
    """

    method: str
    sets: int

    def samples(self, calls: Sequence[Call], count: int, during: Call | None = None, rest: bool = True) -> list[float]:
        """Microseconds of `count` calls, each with L2 emptied before it.

        Args:
            calls: the same work over different operands, `sets` of them, all on the timer's stream.
            during: called while the device is busy with them, to read clocks.
            rest: let the device rest between bursts, so that its power limit does not lower the clock.
        """

    def close(self) -> None:
        """Give back what it holds."""


class Stats(NamedTuple):
    """Microseconds."""

    median: float
    p10: float
    p90: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Stats:
        import numpy as np

        p10, median, p90 = np.percentile(samples, (10, 50, 90))
        return cls(*(round(float(value), 3) for value in (median, p10, p90)), len(samples))

    @property
    def spread(self) -> float:
        """Half the distance of p10 and p90, over the median."""
        return (self.p90 - self.p10) / 2 / self.median


def open_timer(driver: Driver, stream: int, device: int, method: str | None = None) -> Timer:
    """The timer of that method; by default CUPTI where ``cupti`` can be imported, else graph replay.

    Raises:
        ArgumentError: another method, or CUPTI asked for and not installed.
    """
    installed = find_spec("cupti") is not None
    method = method or ("cupti" if installed else "graph")
    if method not in METHODS:
        raise ArgumentError(f"no timing method is named {method!r}: choose {' or '.join(METHODS)}")
    if method == "graph":
        from kgen.build.timing.graph import GraphTimer

        return GraphTimer(driver, stream, Flush(driver, device))
    if not installed:
        raise ArgumentError("timing through CUPTI needs: pip install cupti-python (or use --method graph)")
    from kgen.build.timing.cupti import CuptiTimer

    return CuptiTimer(driver, stream, Flush(driver, device))
