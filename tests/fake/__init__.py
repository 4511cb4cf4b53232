"""A CUDA driver that needs no GPU: builds libcuda.c, loads it as libcuda.so.1, sets it up and reads its log.

Loaded globally under that SONAME, it is what a later ``dlopen("libcuda.so.1")`` finds, of ctypes and cuda-python alike.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ATTRIBUTES = {
    "threads": (1, 1024),
    "sm_count": (16, 132),
    "l2_bytes": (38, 60 << 20),
    "major": (75, 9),
    "minor": (76, 0),
    "cooperative": (95, 1),
    "smem_optin": (97, 232448),
    "cluster": (120, 1),
}  # name: (CU_DEVICE_ATTRIBUTE_…, an H200's value)
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


class FakeCuda:
    """The fake driver of this process. `reset` brings back one H200, an empty log and empty memory."""

    def __init__(self, folder: Path):
        compiler = shutil.which("cc") or shutil.which("gcc")
        if not compiler:
            raise FileNotFoundError("no C compiler (cc or gcc) to build the fake libcuda.so.1 with")
        library = folder / "libcuda.so.1"
        command = [compiler, "-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", "-o", library]
        subprocess.run([*command, Path(__file__).with_name("libcuda.c"), "-ldl", "-lpthread"], check=True)
        self._c = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._c.fake_journal.restype = ctypes.c_void_p
        self._c.fake_free.argtypes = (ctypes.c_void_p,)
        self.reset()

    def reset(self) -> None:
        """Forget everything, in the calling thread also its context stack. Old handles fail from here on."""
        self._c.fake_reset()
        self.errors: list[BaseException] = []  # what launch callbacks raised
        self.configure()

    def configure(self, devices: int = 1, driver_version: int = 13000) -> None:
        """How many devices there are (each an H200 until `device` changes it), and the driver's CUDA version."""
        self._c.fake_configure(devices, driver_version)
        for index in range(devices):
            self.device(index, "Fake H200", **{key: value for key, (_, value) in ATTRIBUTES.items()})

    def device(self, index: int, name: str | None = None, **attributes: int) -> None:
        """Change a device: its name, and any of `ATTRIBUTES`, as in ``device(0, major=10, sm_count=78)``."""
        if name is not None:
            self._c.fake_device(index, name.encode())
        for key, value in attributes.items():
            self._c.fake_attribute(index, ATTRIBUTES[key][0], value)

    def fail(self, function: str, code: int) -> None:
        """Have the next call of `function` (its name without version) return `code`."""
        self._c.fake_fail(function.encode(), code)

    def fault(self, code: int) -> None:
        """Have every call that touches the device return `code` from now on, as after a fault in a kernel."""
        self._c.fake_fault(code)

    def register(self, entry: str, sizes: Sequence[int]) -> None:
        """Have launches of `entry` record that many bytes of each parameter."""
        self._c.fake_register(entry.encode(), 0, len(sizes), (ctypes.c_int * len(sizes))(*sizes))

    def missing(self, entry: str) -> None:
        """Have no library contain `entry`."""
        self._c.fake_register(entry.encode(), 1, 0, None)

    def on_launch(self, callback: Callable[[dict[str, Any]], None]) -> None:
        """Run ``callback(launch)``, a launch as in `calls`, at each launch that runs, from a graph too.

        Addresses are host addresses: read and write them with ctypes. What it raises is kept in `errors`, and the
        `fake` fixture raises it when the test ends.
        """

        def run(line: bytes) -> None:
            try:
                callback(_parse(line))
            except BaseException as error:
                self.errors.append(error)

        self._callback = _CALLBACK(run)  # kept: C holds only its address
        self._c.fake_on_launch(self._callback)

    def calls(self, *functions: str) -> list[dict[str, Any]]:
        """The log, or the part of it that is of these functions: the name under ``call``, and the arguments.

        Names are without version. A launch has entry, device, grid, block, cluster, smem, pdl, cooperative, stream,
        captured, and params: the bytes of each parameter of a `register`ed entry.
        """
        address = self._c.fake_journal()
        lines = ctypes.string_at(address).splitlines()
        self._c.fake_free(address)
        return [call for call in map(_parse, lines) if not functions or call["call"] in functions]

    def launches(self) -> list[dict[str, Any]]:
        """The launches in the log, captured ones included."""
        return self.calls("cuLaunchKernelEx", "cuLaunchKernel")

    def clear(self) -> None:
        """Empty the log."""
        self._c.fake_clear()


def tensor_map(data: bytes) -> dict[str, Any]:
    """What the fake's cuTensorMapEncodeTiled was given, read back from the 128 bytes that it filled."""
    magic, address, rank, data_type, interleave, swizzle, promotion, fill = struct.unpack_from("<8sQ6B", data)
    if magic != b"FAKETMAP" or len(data) != 128:
        raise ValueError("these bytes are no tensor map of the fake driver")
    return {
        "data_type": data_type,
        "address": address,
        "dims": list(struct.unpack_from(f"<{rank}Q", data, 24)),
        "strides": list(struct.unpack_from(f"<{rank - 1}Q", data, 64)),
        "box": list(struct.unpack_from(f"<{rank}H", data, 96)),
        "element_strides": list(struct.unpack_from(f"<{rank}H", data, 106)),
        "interleave": interleave,
        "swizzle": swizzle,
        "l2_promotion": promotion,
        "oob_fill": fill,
    }


def _parse(line: bytes) -> dict[str, Any]:
    call = json.loads(line)
    if "params" in call:
        call["params"] = [bytes.fromhex(text) for text in call["params"]]
    return call
