"""Race a bundle's quickstart operators against torch on one GPU, in one process.

    python tests/perf/race.py BUNDLE [--json FILE] [--record FOLDER]

Device time of each call from CUPTI activity records (through torch.profiler), L2 emptied before each, A B A B in bursts
of 20; the median of all samples. Also measures what a launch and a load cost the host.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable

import torch

from kgen.build.records import Records
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
    plan = kernels[name].plan(m=m)
    call = plan.bind(a=a, b=b, out=mine)
    stream = torch.cuda.current_stream().cuda_stream
    us = race({"kgen": lambda: call(stream), "cublas": lambda: torch.matmul(a, right, out=out)})
    assert torch.allclose(out.float(), mine.float(), rtol=2e-2, atol=2.0)
    return row_of(plan, {"m": m}, us, ratio=us["cublas"] / us["kgen"], tflops=2e-6 * m * n * k / us["kgen"])


def quantize(kernels, name: str, m: int) -> dict:
    operator = kernels[name].operator
    dtype, k = getattr(torch, operator.tensors[0].dtype), operator.dims["k"][0]
    x = torch.randn(m, k, device="cuda", dtype=dtype)
    q = torch.empty(m, k, device="cuda", dtype=torch.int8)
    scale = torch.empty(m, device="cuda")
    plan = kernels[name].plan(m=m)
    call = plan.bind(x=x, q=q, scale=scale)
    stream = torch.cuda.current_stream().cuda_stream
    nbytes = x.nbytes + q.nbytes + scale.nbytes
    source = torch.empty(nbytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    us = race({"kgen": lambda: call(stream), "copy": lambda: target.copy_(source)})
    return row_of(plan, {"m": m}, us, of_copy=us["copy"] / us["kgen"], tb_s=nbytes / us["kgen"] * 1e-6)


def row_of(plan, dims: dict, us: dict, **derived: float) -> dict:
    kernels = [launch.kernel for launch in plan.selection.variant.program.launches]
    return {"operator": plan.selection.operator.name, "dims": dims, "us": us, **derived, "kernels": kernels}


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


def entry(row: dict) -> dict:
    """A record of a race."""
    times = {key: round(value, 2) for key, value in row["us"].items()}
    return {
        "kind": "bench",
        "operator": row["operator"],
        "dims": row["dims"],
        "kernels": row["kernels"],
        "us": times,
        "method": f"CUPTI, L2 emptied, median of {ROUNDS} bursts of {BURST}, in turns",
        "driver": drivers.open().version(),
        "date": datetime.date.today().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle")
    parser.add_argument("--json")
    parser.add_argument("--record")
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
        shown = {key: value for key, value in (row | row.get("us", {})).items() if key not in ("us", "kernels")}
        print(
            "  ".join(f"{key} {value:.3f}" if isinstance(value, float) else f"{value}" for key, value in shown.items())
        )
    if options.record:
        driver = drivers.open()
        records = Records.load(options.record).merge(
            driver.device_name(0), [entry(row) for row in rows if "dims" in row]
        )
        records.save(options.record)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
