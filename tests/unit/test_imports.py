"""What depends on what, and what importing the runtime costs a server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import bundles
import pytest

ROOT = Path(__file__).parents[2]


def run(script: str, *args: str, **options) -> str:
    done = subprocess.run([sys.executable, *args, "-c", script], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_arrows_point_one_way():
    done = subprocess.run(["lint-imports"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_what_importing_the_runtime_loads():
    loaded = set(run("import sys; import kgen.runtime; print(*sys.modules)").split())
    heavy = {"numpy", "cuda", "torch", "tilelang", "tvm", "click", "pydantic", "yaml", "ruamel", "ml_dtypes"}
    assert not {name for name in loaded if name.split(".")[0] in heavy}
    kgen = {name for name in loaded if name.startswith("kgen.")}
    assert kgen and all(name.startswith("kgen.runtime") for name in kgen)
    assert not loaded & {"dataclasses", "inspect", "asyncio", "multiprocessing", "tempfile", "zipfile", "subprocess"}


@pytest.mark.parametrize(
    "module",
    [
        "kgen.compiler.ops.gemm",
        "kgen.compiler.ops.quantize",
        "kgen.compiler.model",
        "kgen.build.picks",
        "kgen.build.verify",
    ],
)
def test_contracts_need_no_compiler(module):
    blocked = "import sys\nfor name in ('tilelang', 'torch', 'pydantic', 'ruamel', 'rich'): sys.modules[name] = None\n"
    run(f"{blocked}import {module}")


@pytest.mark.parametrize(
    ("command", "missing", "words"),
    [
        (
            "lint specs/quickstart.yaml",
            "pydantic",
            "BuildError: this command needs pydantic: pip install 'kgen[compiler]'",
        ),
        ("schema", "ruamel", "BuildError: this command needs ruamel"),
    ],
)
def test_a_missing_extra_is_named(command, missing, words):
    script = f"import sys\nsys.modules[{missing!r}] = None\nfrom kgen.build.cli import main\nmain({command.split()})"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith(words) and "Traceback" not in done.stderr


def test_a_bundle_opens_read_only_without_a_home(tmp_path):
    """A read-only folder, a user without rights and without HOME; nothing is written anywhere."""
    path = bundles.write(tmp_path / "ro" / "b.kgen")
    bundles.write(tmp_path / "ro" / "b")
    folder = tmp_path / "ro"
    for file in [folder, *folder.rglob("*")]:
        os.chmod(file, 0o555 if file.is_dir() else 0o444)
    for parent in tmp_path.parents:
        if parent.owner() == "root" and parent != Path("/"):
            os.chmod(parent, parent.stat().st_mode | 0o055)
    os.chmod(tmp_path, 0o755)
    script = f"""
import os, sys
sys.dont_write_bytecode = True
from kgen.runtime import Bundle
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
opened = []
def watch(event, args):
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        opened.append(args)
sys.addaudithook(watch)
print(Bundle.open({str(path)!r}).id == Bundle.open({str(tmp_path / "ro" / "b")!r}).id, opened)
"""
    environment = {key: value for key, value in os.environ.items() if key not in ("HOME", "XDG_CACHE_HOME", "TMPDIR")}
    try:
        assert run(script, env=environment, cwd="/") == "True []\n"
    finally:
        os.chmod(folder, 0o755)
        os.chmod(folder / "b", 0o755)
