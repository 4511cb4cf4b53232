"""From CUDA source to cubin and PTX, without a GPU.

Two steps: a front end writes PTX (NVRTC, which needs no host compiler, or nvcc), ptxas turns that into a cubin. Between
them unreferenced globals are dropped: NVRTC takes every static constexpr member of every header for a device variable,
some 850 of them, and their names alone made a cubin of 15 KB one of 137 KB.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path

from kgen.compiler.kernel import KernelSource
from kgen.runtime.errors import BuildError

FRONT_ENDS = ("nvrtc", "nvcc")
_FLAGS = ("-std=c++17",)
_PACKAGES = {
    "tilelang": "tilelang",
    "ptxas": "nvidia-cuda-nvcc",
    "nvrtc": "nvidia-cuda-nvrtc",
    "cudart": "nvidia-cuda-runtime",
    "cccl": "nvidia-cuda-cccl",
}
_NVRTC_FLAGS = ("-default-device", "-diag-suppress=1444,20012")  # of tilelang's and CUTLASS's headers


@dataclass(frozen=True)
class Report:
    """What ptxas says of a kernel: registers a thread; bytes of stack, of spill stores and loads, of shared memory."""

    registers: int
    stack: int
    spills: int
    static_smem: int


@dataclass(frozen=True)
class Code:
    """A compiled kernel."""

    cubin: bytes
    ptx: bytes
    report: Report


class Toolchain:
    """A front end and ptxas of one CUDA toolkit, found among the installed wheels.

    Args:
        front_end: one of `FRONT_ENDS`.
    """

    MIN_DRIVER = 13000
    """A cubin loads on drivers of its toolkit's major version, from its own minor on."""

    def __init__(self, front_end: str = "nvrtc"):
        if front_end not in FRONT_ENDS:
            raise BuildError(f"no front end {front_end!r}; known: {', '.join(FRONT_ENDS)}")
        self.front_end = front_end

    def versions(self) -> dict[str, str]:
        """Versions of everything that the code depends on, by a short name."""
        return {"front_end": self.front_end} | {name: _version(package) for name, package in _PACKAGES.items()}

    def fingerprint(self, target: str) -> str:
        """Versions and flags, no paths: with a kernel's source it decides the kernel's code."""
        versions = " ".join(f"{name}=={version}" for name, version in self.versions().items())
        return " ".join((target, *_FLAGS, *_NVRTC_FLAGS, versions))

    def compile(self, kernel: KernelSource, target: str) -> Code:
        """Compile one kernel.

        Raises:
            BuildError: the source does not compile, or ptxas reports spills or a performance loss (such as C7510,
                "wgmma serialized") that ``kernel.tolerates`` gives no reason for.
        """
        ptx = self._nvrtc(kernel, target) if self.front_end == "nvrtc" else self._nvcc(kernel, target)
        ptx = drop_unused_globals(ptx)
        cubin, log = self._ptxas(kernel, ptx, target)
        report = parse_report(log)
        complaints = {code: line for line in log.splitlines() for code in re.findall(r"\((C\d+)\)", line)}
        if report.spills:
            complaints["spills"] = f"{report.spills} bytes of registers spilled to local memory"
        for code, line in complaints.items():
            if code not in kernel.tolerates:
                raise BuildError(
                    f"{kernel.entry}: ptxas reports {code}: {line.strip()}. Change the kernel, or give the reason why "
                    f"it is still the fastest in its Launch(tolerates={{{code!r}: …}})"
                )
        return Code(cubin, ptx.encode(), report)

    @cached_property
    def _include(self) -> list[str]:
        tilelang = Path(_location("tilelang"))
        toolkit = self._toolkit / "include"
        folders = [tilelang / "src", tilelang / "3rdparty/cutlass/include", toolkit, toolkit / "cccl"]
        return [f"-I{folder}" for folder in folders]

    @cached_property
    def _toolkit(self) -> Path:
        return Path(_location("nvidia")) / "cu13"

    def _nvrtc(self, kernel: KernelSource, target: str) -> str:
        from cuda.bindings import nvrtc

        def call(function, *args):
            status, *values = function(*args)
            if status != nvrtc.nvrtcResult.NVRTC_SUCCESS and function is not nvrtc.nvrtcCompileProgram:
                raise BuildError(f"{kernel.entry}: {function.__name__} failed with {status.name}")
            return (status, *values)

        source = "#include <tl_templates/cuda/nvrtc_std.h>\n"
        if kernel.pdl or "cudaTriggerProgrammaticLaunchCompletion" in kernel.source:
            source += "#include <cuda_device_runtime_api.h>\n"
        _, program = call(nvrtc.nvrtcCreateProgram, (source + kernel.source).encode(), b"kernel.cu", 0, [], [])
        options = [f"-arch={target.replace('sm_', 'compute_')}", *_FLAGS, *_NVRTC_FLAGS, *self._include]
        (status,) = call(nvrtc.nvrtcCompileProgram, program, len(options), [option.encode() for option in options])
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytes(call(nvrtc.nvrtcGetProgramLogSize, program)[1])
            call(nvrtc.nvrtcGetProgramLog, program, log)
            raise BuildError(f"{kernel.entry}: NVRTC: {log.rstrip(bytes(1)).decode(errors='replace')}")
        ptx = bytes(call(nvrtc.nvrtcGetPTXSize, program)[1])
        call(nvrtc.nvrtcGetPTX, program, ptx)
        call(nvrtc.nvrtcDestroyProgram, program)
        return ptx.rstrip(b"\0").decode()

    def _nvcc(self, kernel: KernelSource, target: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            source, ptx = Path(folder, "kernel.cu"), Path(folder, "kernel.ptx")
            source.write_text(kernel.source)
            arch = f"-arch={target.replace('sm_', 'compute_')}"
            self._run(kernel, "nvcc", "-ptx", arch, *_FLAGS, *self._include, str(source), "-o", str(ptx))
            return ptx.read_text()

    def _ptxas(self, kernel: KernelSource, ptx: str, target: str) -> tuple[bytes, str]:
        with tempfile.TemporaryDirectory() as folder:
            source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
            source.write_text(ptx)
            log = self._run(kernel, "ptxas", "-v", f"-arch={target}", str(source), "-o", str(cubin))
            return cubin.read_bytes(), log

    def _run(self, kernel: KernelSource, tool: str, *args: str) -> str:
        path = self._toolkit / "bin" / tool
        if not path.exists():
            raise BuildError(f"{tool} is not installed: pip install 'kgen[compiler]'")
        done = subprocess.run([str(path), *args], capture_output=True, text=True)
        if done.returncode:
            raise BuildError(f"{kernel.entry}: {tool} failed:\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr


def drop_unused_globals(ptx: str) -> str:
    """`ptx` without the module-scope variables that nothing else in it names."""
    uses = Counter(re.findall(r"[\w$]+", ptx))
    declaration = re.compile(r"\.global [^;{]*?([\w$]+)(\[\d*\])?( = [^;]*)?;")

    def unused(line: str) -> bool:
        match = declaration.fullmatch(line)
        return match is not None and uses[match[1]] == 1

    return "\n".join(line for line in ptx.split("\n") if not unused(line))


def parse_report(log: str) -> Report:
    """Read the output of ``ptxas -v`` for one kernel."""

    def number(pattern: str) -> int:
        return sum(map(int, re.findall(pattern, log)))

    return Report(
        registers=number(r"Used (\d+) registers"),
        stack=number(r"(\d+) bytes stack frame"),
        spills=number(r"(\d+) bytes spill (?:stores|loads)"),
        static_smem=number(r"(\d+) bytes smem"),
    )


def _location(package: str) -> str:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise BuildError(f"{package} is not installed: pip install 'kgen[compiler]'")
    return next(iter(spec.submodule_search_locations))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        raise BuildError(f"{package} is not installed: pip install 'kgen[compiler]'") from None
