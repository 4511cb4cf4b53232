"""The committed PTX of the streaming kernel is what its source compiles to: ``python tests/compile/test_stream.py``
writes it anew."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kgen.build

FOLDER = Path(kgen.build.__file__).parent


def compile_ptx() -> bytes:
    """PTX for any device from sm_90 on."""
    from cuda.bindings import nvrtc

    def call(function, *args):
        status, *values = function(*args)
        assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, (function.__name__, status)
        return values[0] if values else None

    source = (FOLDER / "stream.cu").read_bytes()
    program = call(nvrtc.nvrtcCreateProgram, source, b"stream.cu", 0, [], [])
    call(nvrtc.nvrtcCompileProgram, program, 1, [b"-arch=compute_90"])
    ptx = bytes(call(nvrtc.nvrtcGetPTXSize, program))
    call(nvrtc.nvrtcGetPTX, program, ptx)
    return ptx.rstrip(b"\0")


def test_the_committed_ptx_is_that_of_the_source():
    # In another process: NVRTC must not share one with the fake driver.
    compiled = subprocess.run([sys.executable, __file__, "--print"], check=True, stdout=subprocess.PIPE).stdout
    assert (FOLDER / "stream.ptx").read_bytes() == compiled


if __name__ == "__main__":
    if "--print" in sys.argv:
        sys.stdout.buffer.write(compile_ptx())
    else:
        (FOLDER / "stream.ptx").write_bytes(compile_ptx())
