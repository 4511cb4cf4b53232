"""``kgen explain``."""

from __future__ import annotations

import math
from pathlib import Path

import click

from kgen.build.cli import json_option, parse_dims, show_json
from kgen.compiler import ops
from kgen.compiler.model import H200, estimate
from kgen.runtime.bundle import Bundle
from kgen.runtime.format.expr import evaluate
from kgen.runtime.plan import Selection, select


@click.command("explain")
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.argument("operator")
@click.argument("dims", nargs=-1, metavar="[DIM=N]...")
@click.option("--sm-count", default=132, show_default=True, help="Multiprocessors of the device in question.")
@click.option("--target", help="[the bundle's first]")
@click.option("--model", "with_model", is_flag=True, help="Estimate the time of every variant on an H200.")
@json_option
def command(bundle, operator, dims, sm_count, target, with_model, as_json) -> None:
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
    estimates = _estimates(chosen) if with_model else []
    if as_json:
        answer = {
            "variant": chosen.index,
            "config": chosen.variant.config,
            "workspace_bytes": chosen.workspace_bytes,
            "launches": launches,
        }
        show_json(answer | ({"model": estimates} if with_model else {}))
        return
    click.echo(chosen.explain())
    for launch in launches:
        click.echo(f"launch {launch['entry']}  grid {launch['grid']}  block {launch['block']}")
    click.echo(f"workspace {chosen.workspace_bytes} bytes")
    for item in estimates:
        time = "-" if item["us"] is None else f"{item['us']:.1f} µs"
        click.echo(
            f"model: variant {item['variant']}  rank {item['rank']}  {time}  bound {item['bound']}"
            f"  waves {item['waves']}  occupancy {item['occupancy']}"
        )


def _estimates(chosen: Selection) -> list[dict]:
    """What the model says of every variant for the target at the chosen one's dims, its guard true or not."""
    operator = chosen.operator
    contract = ops.from_manifest(operator)
    machine = H200._replace(sm_count=chosen.symbols["sm_count"])
    found = {
        index: estimate(contract, variant.config, chosen.symbols, machine)
        for index, variant in enumerate(operator.variants)
        if variant.target == chosen.target
    }
    order = sorted(found, key=lambda index: found[index].seconds)
    return [
        {
            "variant": index,
            "rank": order.index(index) + 1,
            "us": round(seconds * 1e6, 3) if math.isfinite(seconds) else None,
            "bound": bound,
            "waves": waves,
            "occupancy": occupancy,
        }
        for index, (seconds, bound, waves, occupancy) in found.items()
    ]
