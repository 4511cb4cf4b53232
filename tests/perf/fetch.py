"""Bring other libraries' kernels to a GPU machine without internet: the few files of their releases that peers need.

    python tests/perf/fetch.py [NAME...] --to FOLDER         # where there is PyPI: one NAME.tar.xz each
    python tests/perf/fetch.py --unpack FOLDER --to TARGET   # on the GPU machine, where KGEN_PEERS is TARGET then

The second needs nothing but the standard library. What each archive is for: tests/perf/README.md.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

PYTHON = "3.12"  # of the GPU machine
LICENSE = re.compile(r"[^/]+(\.dist-info/licenses)?/license[^/]*", re.IGNORECASE)


@dataclass(frozen=True)
class Part:
    """Files of one release.

    Attributes:
        release: name and version, as pip writes them.
        members: patterns of file names in the wheel or source archive; each must match.
        root: what is taken off those names.
        source: whether it is a source archive, as PyPI has no wheel.
    """

    release: str
    members: tuple[str, ...]
    root: str = ""
    source: bool = False


VLLM = "vllm==0.33.0"
ARCHIVES = {
    "deepgemm": [Part(VLLM, ("vllm/third_party/deep_gemm/*",), root="vllm/third_party/")],
    "vllm-c": [Part(VLLM, ("vllm/_C_stable_libtorch.abi3.so",))],
    "vllm-moe": [Part(VLLM, ("vllm/_moe_C_stable_libtorch.abi3.so",))],
    "vllm-triton": [Part(VLLM, ("vllm/model_executor/layers/quantization/utils/int8_utils.py",))],
    # Built for torch 2.11.0; 0.4.10 is for 2.14.1.
    "sglang": [Part("sglang-kernel==0.4.4", ("sgl_kernel/sm90/common_ops.abi3.so",))],
    "deepspeed": [
        Part(
            "deepspeed==0.19.8",
            ("deepspeed-0.19.8/csrc/quantization/quantize.cu", "deepspeed-0.19.8/csrc/includes/*.h"),
            source=True,
        )
    ],
    # Both of CUDA 13.0, since the layout of CUPTI's records changes with its version.
    "cupti": [
        Part("cupti-python==13.0.1", ("cupti/*",)),
        Part("nvidia-cuda-cupti==13.0.85", ("nvidia/cu13/lib/libcupti.so.13",)),
    ],
}


def download(part: Part, folder: Path) -> Path:
    """The release's wheel or source archive in `folder`, where pip leaves it for the next time."""
    name, version = part.release.split("==")
    kind = ["--no-binary", name] if part.source else ["--only-binary", ":all:", "--python-version", PYTHON]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, *kind, part.release], check=True)
    suffix = ".tar.gz" if part.source else "-*.whl"
    (path,) = folder.glob(f"{name.replace('-', '_')}-{version}{suffix}")
    return path


def contents(path: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """The names of a wheel's or source archive's files, and what reads each."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            for name in wheel.namelist():
                if not name.endswith("/"):
                    yield name, partial(wheel.read, name)
    else:
        with tarfile.open(path) as source:
            for member in source:
                if member.isfile():
                    yield member.name, source.extractfile(member).read


def select(part: Part, path: Path) -> dict[str, bytes]:
    """The part's files by the names that they get, with the release's licenses.

    Raises:
        ValueError: a pattern matches nothing.
    """
    chosen, missing = {}, set(part.members)
    for name, read in contents(path):
        matching = {pattern for pattern in part.members if fnmatch(name, pattern)}
        missing -= matching
        if matching:
            chosen[name.removeprefix(part.root)] = read()
        elif LICENSE.fullmatch(name):
            chosen[f"licenses/{part.release}/{Path(name).name}"] = read()
    if missing:
        raise ValueError(f"{path.name} holds no {' and no '.join(sorted(missing))}")
    return chosen


def pack(files: dict[str, bytes], archive: Path) -> None:
    """Write a .tar.xz."""
    with tarfile.open(archive, "w:xz", preset=6) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def fetch(names: Iterable[str], folder: Path, wheels: Path) -> None:
    """Write the archives of those names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        files: dict[str, bytes] = {}
        for part in ARCHIVES[name]:
            files |= select(part, download(part, wheels))
        archive = folder / f"{name}.tar.xz"
        pack(files, archive)
        print(f"{archive}: {archive.stat().st_size / 2**20:.1f} MiB, {len(files)} files", flush=True)


def unpack(folder: Path, target: Path) -> None:
    """Extract every archive of `folder` into `target`."""
    for archive in sorted(folder.glob("*.tar.xz")):
        with tarfile.open(archive) as tar:
            tar.extractall(target, filter="data")
        print(archive.name.removesuffix(".tar.xz"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"[all] {', '.join(ARCHIVES)}")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="where the archives or files go")
    parser.add_argument("--unpack", type=Path, metavar="FOLDER", help="extract the archives of this folder")
    wheels = Path(tempfile.gettempdir(), "kgen-wheels")
    parser.add_argument("--wheels", type=Path, default=wheels, metavar="FOLDER", help=f"keeps downloads [{wheels}]")
    options = parser.parse_args()
    unknown = set(options.names) - set(ARCHIVES)
    if unknown:
        parser.error(f"no archive is named {', '.join(sorted(unknown))}; there are {', '.join(ARCHIVES)}")
    if options.unpack:
        unpack(options.unpack, options.to)
    else:
        fetch(options.names or ARCHIVES, options.to, options.wheels)


if __name__ == "__main__":
    main()
