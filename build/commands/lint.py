"""``kgen lint``."""

from __future__ import annotations

from pathlib import Path

import click

from kgen.build.cli import json_option, show_json


@click.command("lint")
@click.argument("specs", nargs=-1, required=True, type=click.Path(dir_okay=False, path_type=Path))
@json_option
def command(specs, as_json) -> None:
    """Check each SPEC without building it; exit code 2 and every problem with its place if there are any."""
    from kgen.compiler.spec import load

    found = [{"spec": str(path), "operators": [operator.name for operator in load(path).operators]} for path in specs]
    if as_json:
        show_json(found)
    else:
        for item in found:
            click.echo(f"{item['spec']}: {len(item['operators'])} operators, no problems")
