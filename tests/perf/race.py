"""Race a bundle's quickstart operators against torch on one GPU, in one process.

    python tests/perf/race.py BUNDLE [--json FILE]

Device time of each call from CUPTI activity records (through torch.profiler), L2 emptied before each, A B A B in bursts
of 20; the median of all samples. Also measures what a launch and a load cost the host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from kgen.runtime import Bundle, drivers

BURST, ROUNDS = 20, 5
FLUSH = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")  # bytes: more than four times the L2


def device_times(call: Callable[[], None]) -> list[float]:
    """Microseconds of device time of each of `BURST` calls."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(BURST):
            FLUSH.zero_()
            call()
        torch.cuda.synchronize()
    on_device = (e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    events = sorted(on_device, key=lambda e: e.time_range.start)
    times: list[float] = []
    for event in events:
        if "fill" in event.name.lower() or "memset" in event.name.lower():
            if not times or times[-1]:
                times.append(0.0)
        elif times:
            times[-1] += event.time_range.end - event.time_range.start
    assert len(times) == BURST, f"{len(times)} samples of {BURST} calls"
    return times


def race(calls: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Median microseconds of each call, taken in turns."""
    samples: dict[str, list[float]] = {label: [] for label in calls}
    for _ in range(ROUNDS):
        for label, call in calls.items():
            samples[label] += device_times(call)
    return {label: statistics.median(times) for label, times in samples.items()}


def gemm(kernels, name: str, m: int) -> dict:
    operator = kernels[name].operator
    dtype = getattr(torch, operator.tensors[0].dtype)
    n, k = operator.dims["n"][0], operator.dims["k"][0]
    a = torch.randn(m, k, device="cuda", dtype=dtype)
    b = torch.randn(operator.tensors[1].shape, device="cuda", dtype=dtype)
    out, mine = torch.empty(m, n, device="cuda", dtype=dtype), torch.empty(m, n, device="cuda", dtype=dtype)
    right = b.T if b.shape == (n, k) else b
    call = kernels[name].plan(m=m).bind(a=a, b=b, out=mine)
    stream = torch.cuda.current_stream().cuda_stream
    times = race({"kgen": lambda: call(stream), "cublas": lambda: torch.matmul(a, right, out=out)})
    assert torch.allclose(out.float(), mine.float(), rtol=2e-2, atol=2.0)
    return {
        "operator": name,
        "m": m,
        **times,
        "ratio": times["cublas"] / times["kgen"],
        "tflops": 2e-6 * m * n * k / times["kgen"],
    }


def quantize(kernels, name: str, m: int) -> dict:
    operator = kernels[name].operator
    dtype, k = getattr(torch, operator.tensors[0].dtype), operator.dims["k"][0]
    x = torch.randn(m, k, device="cuda", dtype=dtype)
    q = torch.empty(m, k, device="cuda", dtype=torch.int8)
    scale = torch.empty(m, device="cuda")
    call = kernels[name].plan(m=m).bind(x=x, q=q, scale=scale)
    stream = torch.cuda.current_stream().cuda_stream
    nbytes = x.nbytes + q.nbytes + scale.nbytes
    source = torch.empty(nbytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = race({"kgen": lambda: call(stream), "copy": lambda: target.copy_(source)})
    return {
        "operator": name,
        "m": m,
        **times,
        "of_copy": times["copy"] / times["kgen"],
        "tb_s": nbytes / times["kgen"] * 1e-6,
    }


def host_costs(path: str, name: str) -> list[dict]:
    """What a bound call costs beside one bare driver launch of the same kernel, and what open and load cost."""
    rows = []
    for binding in ("ctypes", "cuda-python"):
        driver = drivers.open(binding)
        driver.retain(0)
        start = time.perf_counter()
        bundle = Bundle.open(path)
        bundle.check(0, driver=driver)
        kernels = bundle.load(0, driver=driver)
        load = time.perf_counter() - start
        x = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)
        q, scale = torch.empty(1, 4096, device="cuda", dtype=torch.int8), torch.empty(1, device="cuda")
        call = kernels[name].plan(m=1).bind(x=x, q=q, scale=scale)
        stream = driver.create_stream()
        call(stream)
        (bare,) = call._prepared[stream]
        costs = {"bare": float("inf"), "call": float("inf")}
        for _ in range(20):
            for label, function in (("bare", bare), ("call", lambda call=call, stream=stream: call(stream))):
                driver.synchronize_stream(stream)
                begin = time.perf_counter()
                for _ in range(500):
                    function()
                costs[label] = min(costs[label], (time.perf_counter() - begin) / 500 * 1e6)
        rows.append({"driver": binding, "load_ms": load * 1e3, "kernels": len(bundle.manifest.kernels), **costs})
        kernels.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle")
    parser.add_argument("--json")
    options = parser.parse_args()
    rows = []
    with Bundle.open(options.bundle).load(0) as kernels:
        for name in kernels:
            if name.startswith("gemm"):
                rows += [gemm(kernels, name, m) for m in (4096, 128)]
            else:
                rows += [quantize(kernels, name, m) for m in (14336, 17)]
    rows += host_costs(options.bundle, "int8_channel_k4096_bfloat16")
    for row in rows:
        print("  ".join(f"{key} {value:.3f}" if isinstance(value, float) else f"{value}" for key, value in row.items()))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
