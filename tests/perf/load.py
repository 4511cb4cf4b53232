"""What a server pays before its first launch: importing the runtime, and opening, checking and loading a bundle.

python tests/perf/load.py dist/fifty-1.0.0.kgen        # kgen build tests/perf/fifty.yaml
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys

RUNS = 9
STEPS = """
import sys, time
from kgen.runtime import Bundle, drivers
driver = drivers.open(sys.argv[2])
start = time.perf_counter(); driver.retain(0); context = time.perf_counter()
bundle = Bundle.open(sys.argv[1]); opened = time.perf_counter()
assert not bundle.check(0, driver=driver); checked = time.perf_counter()
bundle.load(0, driver=driver); loaded = time.perf_counter()
print(context - start, opened - context, checked - opened, loaded - checked)
"""


def python(*args: str) -> subprocess.CompletedProcess[str]:
    # Bytecode is written as an installer would have done.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, check=True, env=environment)


def import_ms(binding: str) -> float:
    """Milliseconds that ``-X importtime`` counts for the runtime and its binding."""
    also = "; import cuda.bindings.driver" if binding == "cuda-python" else ""
    report = python("-X", "importtime", "-c", f"import kgen.runtime{also}").stderr
    return (
        sum(int(n) for n in re.findall(r"\| +(\d+) \| (?:kgen\.runtime|cuda\.bindings\.driver)$", report, re.M)) / 1e3
    )


def main() -> None:
    for binding in ("ctypes", "cuda-python"):
        imports = sorted(import_ms(binding) for _ in range(RUNS))
        runs = [[float(n) * 1e3 for n in python("-c", STEPS, sys.argv[1], binding).stdout.split()] for _ in range(RUNS)]
        context, opened, checked, loaded = (statistics.median(column) for column in zip(*runs, strict=True))
        total = sorted(sum(run[1:]) for run in runs)
        print(f"{binding}: import {imports[RUNS // 2]:.1f} ms ({imports[0]:.1f} at best); context {context:.0f} ms;")
        print(f"  open {opened:.1f} + check {checked:.1f} + load {loaded:.1f}: ", end="")
        print(f"{total[RUNS // 2]:.1f} ms ({total[-1]:.1f} at worst)")


if __name__ == "__main__":
    main()
