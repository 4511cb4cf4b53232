"""The quickstart bundle on a real GPU, with the base install alone. Bring ``dist/quickstart-1.0.0.kgen`` along."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BUNDLE = Path(__file__).parents[2] / "dist" / "quickstart-1.0.0.kgen"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not BUNDLE.exists(), reason=f"{BUNDLE} is not there: kgen build specs/quickstart.yaml"),
]

SCRIPT = """
import sys
import numpy as np
from kgen.build.verify import Point, verify_point
from kgen.compiler import ops
from kgen.runtime import Bundle, DeviceBuffer, drivers

driver = drivers.open(sys.argv[2])
with Bundle.open(sys.argv[1]).load(0, driver=driver) as kernels:
    for name, m, kind in (("gemm_nt_bfloat16", 129, "normal"), ("int8_channel_k4099_float16", 17, "special")):
        contract = ops.from_manifest(kernels[name].operator)
        case = verify_point(kernels, Point(contract, None, {"m": m}, kind), 1)
        assert not case.failures, case.failures
    x = DeviceBuffer.from_numpy(np.ones((3, 4096), np.float32), driver=driver)
    q, scale = DeviceBuffer.empty((3, 4096), "int8", driver=driver), DeviceBuffer.empty((3,), "float32", driver=driver)
    kernels.int8_channel_k4096_float32(x=x, q=q, scale=scale, stream=0)
    assert (q.to_numpy() == 127).all() and (scale.to_numpy() == np.float32(1) / np.float32(127)).all()
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"torch", "tilelang", "pydantic"}, loaded
assert sys.argv[2] == "cuda-python" or "cuda" not in loaded
"""


@pytest.mark.parametrize("driver", ["ctypes", "cuda-python"])
def test_right_results_without_torch(driver):
    subprocess.run([sys.executable, "-c", SCRIPT, str(BUNDLE), driver], check=True)
