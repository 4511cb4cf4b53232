"""``kgen explain``."""

from __future__ import annotations

from pathlib import Path

import click

from kgen.build.cli import json_option, parse_dims, show_json
from kgen.runtime.bundle import Bundle
from kgen.runtime.format.expr import evaluate
from kgen.runtime.plan import select


@click.command("explain")
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.argument("operator")
@click.argument("dims", nargs=-1, metavar="[DIM=N]...")
@click.option("--sm-count", default=132, show_default=True, help="Multiprocessors of the device in question.")
@click.option("--target", help="[the bundle's first]")
@json_option
def command(bundle, operator, dims, sm_count, target, as_json) -> None:
    """Say which variant of OPERATOR would run for these dims, and why the others would not. Needs no GPU."""
    manifest = Bundle.open(bundle).manifest
    if operator not in manifest.operators:
        raise click.BadParameter(f"no operator {operator!r}; the bundle has {', '.join(manifest.operators)}")
    chosen = select(manifest.operators[operator], target or manifest.targets[0], sm_count, parse_dims(dims))
    launches = [
        {
            "kernel": launch.kernel,
            "entry": manifest.kernels[launch.kernel].entry,
            "grid": [evaluate(extent, chosen.symbols) for extent in launch.grid],
            "block": list(manifest.kernels[launch.kernel].block),
        }
        for launch in chosen.variant.program.launches
    ]
    if as_json:
        show_json(
            {
                "variant": chosen.index,
                "config": chosen.variant.config,
                "workspace_bytes": chosen.workspace_bytes,
                "launches": launches,
            }
        )
        return
    click.echo(chosen.explain())
    for launch in launches:
        click.echo(f"launch {launch['entry']}  grid {launch['grid']}  block {launch['block']}")
    click.echo(f"workspace {chosen.workspace_bytes} bytes")
