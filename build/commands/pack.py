"""``kgen pack``."""

from __future__ import annotations

from pathlib import Path

import click

from kgen.build.cli import json_option, show_json
from kgen.build.publish import publish
from kgen.runtime.bundle import Bundle
from kgen.runtime.format import container


@click.command("pack")
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--lean", is_flag=True, help="Leave the evidence out: sources and records. The bundle's id stays.")
@json_option
def command(bundle, output, lean, as_json) -> None:
    """Write a BUNDLE in the other form: OUTPUT is a file where it ends in .kgen, otherwise a directory."""
    opened = Bundle.open(bundle)
    files = {name: bytes(content) for name, content in container.read(bundle).items()}
    if lean:
        files = {name: content for name, content in files.items() if not name.startswith("evidence/")}
    publish(files, output)
    if as_json:
        show_json({"bundle": str(output), "id": opened.id, "bytes": sum(map(len, files.values()))})
    else:
        click.echo(f"{output}  {opened.id}")
