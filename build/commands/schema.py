"""``kgen schema``."""

from __future__ import annotations

import click

from kgen.build.cli import show_json


@click.command("schema")
@click.option("--json", "as_json", is_flag=True, help="Accepted for symmetry: the schema is JSON anyway.")
def command(as_json) -> None:
    """Print the JSON Schema of specs, for editors that complete and check YAML."""
    from kgen.compiler.spec import schema

    show_json(schema())
