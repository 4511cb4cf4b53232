"""``kgen inspect``."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import click

from kgen.build.cli import json_option, show_json
from kgen.runtime.bundle import Bundle, version_text
from kgen.runtime.errors import KgenError
from kgen.runtime.format.expr import show
from kgen.runtime.format.manifest import Kernel, Operator, to_json


@click.command("inspect")
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.argument("kernel", required=False)
@click.option("--source", "what", flag_value="source", help="Print KERNEL's CUDA source.")
@click.option("--ptx", "what", flag_value="ptx", help="Print KERNEL's PTX.")
@click.option("--sass", "what", flag_value="sass", help="Print KERNEL's machine code (needs nvdisasm).")
@json_option
def command(bundle, kernel, what, as_json) -> None:
    """Show what is in a BUNDLE: operators, variants, kernels, resources, verification state. Needs no GPU.

    KERNEL is the beginning of a kernel's id, or its entry's name.
    """
    opened = Bundle.open(bundle)
    if what:
        click.echo(_code(opened, _find(opened, kernel), what))
    elif as_json:
        known = _verified(opened)
        verified = {id: id in known for id in opened.manifest.kernels}
        show_json({"id": opened.id, "verified": verified, "manifest": to_json(opened.manifest)})
    else:
        _print(opened)


def _print(bundle: Bundle) -> None:
    manifest = bundle.manifest
    code = sum(blob.size for blob in manifest.blobs.values() if blob.kind == "cubin")
    click.secho(f"{manifest.name} {manifest.version}", bold=True, nl=False)
    click.echo(f"  for {', '.join(manifest.targets)}, CUDA driver {version_text(manifest.min_driver)} or newer")
    click.echo(f"{bundle.id}\n{len(manifest.kernels)} kernels, {code / 1024:.0f} KiB of machine code\n")
    for operator in manifest.operators.values():
        _print_operator(operator)
    click.secho("\nkernels", bold=True)
    click.echo(f"  {'id':12}  {'registers':>9} {'spills':>6} {'smem':>7} {'cubin':>9}  {'verified':8}  entry")
    verified = _verified(bundle)
    for kernel in manifest.kernels.values():
        smem = kernel.dynamic_smem + kernel.static_smem
        size = manifest.blobs[kernel.cubin].size
        state = "yes" if kernel.id in verified else "no"
        click.echo(
            f"  {kernel.id[:12]}  {kernel.registers:9} {kernel.spills:6} {smem:7} {size:9}  {state:8}  {kernel.entry}"
        )


def _print_operator(operator: Operator) -> None:
    dims = " ".join(f"{d}={a}" if a == b else f"{d}={a}..{b}" for d, (a, b) in operator.dims.items())
    click.secho(operator.name, bold=True, nl=False)
    click.echo(f"  {operator.op}@{operator.abi}  {dims}")
    for tensor in operator.tensors:
        shape = ", ".join(map(show, tensor.shape))
        click.echo(f"  {tensor.role:5} {tensor.name}: {tensor.dtype} [{shape}], aligned to {tensor.align}")
    for index, variant in enumerate(operator.variants):
        config = " ".join(f"{key}={value}" for key, value in variant.config.items())
        kernels = ", ".join(launch.kernel[:12] for launch in variant.program.launches)
        guard = "always" if variant.guard == 1 else show(variant.guard)
        click.echo(f"  variant {index} ({variant.target}) when {guard}: {config} → {kernels}")


def _verified(bundle: Bundle) -> set[str]:
    """The kernels that a record in the bundle says were verified."""
    content = bundle.evidence("records/records.json")
    entries = [entry for found in json.loads(content).values() for entry in found] if content else []
    return {kernel for entry in entries if entry["kind"] == "verify" and entry["ok"] for kernel in entry["kernels"]}


def _find(bundle: Bundle, wanted: str | None) -> Kernel:
    kernels = bundle.manifest.kernels.values()
    found = [k for k in kernels if wanted and (k.id.startswith(wanted) or k.entry == wanted)]
    if len(found) != 1:
        entries = ", ".join(f"{k.id[:12]} {k.entry}" for k in (found or kernels))
        raise click.UsageError(f"KERNEL {wanted!r} names {len(found)} kernels; choose one of: {entries}")
    return found[0]


def _code(bundle: Bundle, kernel: Kernel, what: str) -> str:
    if what == "ptx":
        return bytes(bundle.blob(kernel.ptx)).decode()
    if what == "source":
        source = bundle.evidence(f"sources/{kernel.id}.cu")
        if source is None:
            raise KgenError(f"{bundle.path} was packed lean: it carries no sources")
        return source.decode()
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(bundle.blob(kernel.cubin))
        return subprocess.run([_nvdisasm(), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout


def _nvdisasm() -> str:
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations) if spec else []
    beside = [path for folder in folders if (path := Path(folder, "cu13/bin/nvdisasm")).exists()]
    found = str(beside[0]) if beside else shutil.which("nvdisasm")
    if found is None:
        raise KgenError("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm, or put the CUDA toolkit on PATH")
    return found
