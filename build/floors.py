"""Two floors of a measurement, from ceilings of the same run: the roofline, and what a plain streaming kernel takes.

Roofline: the larger of bytes over copy bandwidth and flops over the rate of a large matrix product. Practical floor:
the fastest of a few shapes of the kernel in ``stream.cu``, cold, over as many bytes: at a megabyte it is ten times the
roofline, since a launch and a trip to memory take their time whatever is moved.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib.util import find_spec
from math import prod
from pathlib import Path

from kgen.build.timing import Call, Stats, Timer
from kgen.compiler.ops.contract import Traffic
from kgen.runtime.bind import Params
from kgen.runtime.drivers import Driver, LaunchConfig

COPY_BYTES = 1 << 30  # read, and as many written: far beyond L2, so that a launch's fixed costs vanish
MATMUL = (4096, 4096, 8192)  # m, n, k: larger ones reach the power cap within a call
WORD = 16
SHAPES = ((1, 128), (2, 128), (4, 128), (8, 128), (4, 256))  # (unroll, threads a block): the fastest of a wider search


class Floors:
    """Measures both on a timer's stream. `torch`, where importable, brings cuBLAS for the matrix product."""

    def __init__(self, driver: Driver, stream: int, timer: Timer):
        self._driver, self._stream, self._timer = driver, stream, timer
        self._library = driver.load_library((Path(__file__).parent / "stream.ptx").read_bytes())
        self._functions = {
            unroll: driver.function(driver.kernel(self._library, f"stream_{unroll}")) for unroll, _ in SHAPES
        }
        self._rates: dict[str, float] = {}

    def close(self) -> None:
        self._driver.unload_library(self._library)

    @cached_property
    def bandwidth(self) -> float:
        """Bytes a second of a large copy, read and written counted."""
        with self._calls(Traffic(COPY_BYTES, COPY_BYTES)) as calls:
            return 2 * COPY_BYTES / (min(min(self._sample(call, 3)) for call in calls) * 1e-6)

    def streaming(self, traffic: Traffic, samples: int = 20) -> Stats:
        """Microseconds of the fastest streaming kernel that moves `traffic`."""
        with self._calls(traffic) as calls:
            quick = [(min(self._sample(call, 5)), i) for i, call in enumerate(calls)]
            return Stats.of(self._sample(calls[min(quick)[1]], samples))

    def roofline(self, traffic: Traffic, flops: int, math: str | None) -> float:
        """Microseconds: no kernel is faster. Without torch the arithmetic is left out (`rate` is None)."""
        seconds = traffic.total / self.bandwidth
        rate = self.rate(math) if math else None
        return max(seconds, flops / rate if rate else 0.0) * 1e6

    def rate(self, math: str) -> float | None:
        """Operations a second of a large cuBLAS product of `math` operands; None where torch cannot be imported."""
        if find_spec("torch") is None:
            return None
        if math not in self._rates:
            microseconds = Stats.of(self._timer.samples([_matmul(math)] * self._timer.sets, 20)).median
            self._rates[math] = 2 * prod(MATMUL) / (microseconds * 1e-6)
        return self._rates[math]

    def _sample(self, call: Call, count: int) -> list[float]:
        return self._timer.samples([call] * self._timer.sets, count)

    @contextmanager
    def _calls(self, traffic: Traffic) -> Iterator[list[Call]]:
        n_in, n_out = (-(-bytes // WORD) for bytes in traffic)
        source, target = (self._driver.allocate(max(n, 1) * WORD) for n in (n_in, n_out))
        try:
            self._driver.memset(source, 0x5A, max(n_in, 1) * WORD)
            self._driver.synchronize()
            yield [self._call(*shape, source, target, n_in, n_out) for shape in SHAPES]
            self._driver.synchronize_stream(self._stream)
        finally:
            self._driver.free(source)
            self._driver.free(target)

    def _call(self, unroll: int, threads: int, source: int, target: int, n_in: int, n_out: int) -> Call:
        blocks = max(1, -(-max(n_in, n_out) // (threads * unroll)))
        addresses = [ctypes.c_uint64(value) for value in (source, target)]
        params = Params([*addresses, ctypes.c_int64(n_in), ctypes.c_int64(n_out)])
        config = LaunchConfig((blocks, 1, 1), (threads, 1, 1))
        launch = self._driver.launcher(self._functions[unroll], config, params.address, self._stream)

        def call(_alive: Params = params) -> None:
            launch()

        return call


def _matmul(math: str) -> Call:
    """A product in torch, on its current stream, of random operands: zeros would run faster."""
    import torch

    m, n, k = MATMUL
    a, b = (torch.randn(rows, k, device="cuda") for rows in (m, n))
    if math == "int8":
        a, b = (x.mul(40).clamp(-127, 127).to(torch.int8) for x in (a, b))
        return lambda: torch._int_mm(a, b.T)
    dtype = getattr(torch, math)
    a, b = a.to(dtype), b.to(dtype)
    if math.startswith("float8"):
        one = torch.ones((), device="cuda")
        return lambda: torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    out = torch.empty(m, n, device="cuda", dtype=dtype)
    return lambda: torch.matmul(a, b.T, out=out)
