"""The timer against torch's profiler, and against itself, on a real GPU. Needs torch and cupti-python there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

# One process a measurement: CUPTI has one client, and torch.profiler is another.
SCRIPT = """
import json
import time
from types import SimpleNamespace
import torch
from kgen.build.timing import Stats, open_timer
from kgen.build.timing.cupti import per_call
from kgen.runtime import drivers

SIZES = {"5us": (512, 512, 2048), "20us": (1024, 4096, 2048), "170us": (4096, 4096, 4096)}
driver = drivers.open()
context = driver.retain(0)
driver.set_current(context)
stream = torch.cuda.Stream()
torch.cuda.set_stream(stream)
calls = {}
for name, (m, n, k) in SIZES.items():
    a, b = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k), (n, k)))
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    calls[name] = lambda a=a, b=b, out=out: torch.matmul(a, b.T, out=out)
    calls[name]()
torch.cuda.synchronize()
timer = open_timer(driver, stream.cuda_stream, 0, "cupti")
ours = {name: [Stats.of(timer.samples([call], 100)).median for _ in range(2)] for name, call in calls.items()}
flush = timer._flush.on(stream.cuda_stream)
for kind in timer._kinds:
    timer._cupti.activity_disable(kind)
theirs = {}
for name, call in calls.items():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            for _ in range(20):
                flush()
                call()
            torch.cuda.synchronize()
            time.sleep(0.03)
    spans = [
        SimpleNamespace(name=e.name.lower(), start=e.time_range.start * 1000, end=e.time_range.end * 1000)
        for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA
    ]
    times = per_call(spans, lambda span: "memset" in span.name and span.end - span.start > 10_000)
    assert len(times) == 100, len(times)
    theirs[name] = Stats.of(times).median
print(json.dumps({"ours": ours, "theirs": theirs}))
"""


@pytest.fixture(scope="module")
def measured():
    pytest.importorskip("torch")
    pytest.importorskip("cupti")
    run = subprocess.run([sys.executable, "-c", SCRIPT], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("size", ["5us", "20us", "170us"])
def test_agrees_with_torchs_profiler(measured, size):
    assert measured["ours"][size][0] == pytest.approx(measured["theirs"][size], rel=0.03)


@pytest.mark.parametrize("size", ["20us", "170us"])
def test_repeats_within_two_percent(measured, size):
    first, second = measured["ours"][size]
    assert first == pytest.approx(second, rel=0.02)
