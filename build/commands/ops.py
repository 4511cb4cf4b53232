"""``kgen ops``."""

from __future__ import annotations

import dataclasses
import inspect
import typing

import click

from kgen.build.cli import json_option, show_json
from kgen.compiler import ops


@click.command("ops")
@click.argument("family", required=False)
@json_option
def command(family, as_json) -> None:
    """List the operator families, or describe one FAMILY: its dims, its fields and what it computes."""
    if family and family not in ops.names():
        raise click.BadParameter(f"no family {family!r}; there are {', '.join(ops.names())}")
    described = [_describe(name) for name in ([family] if family else ops.names())]
    if as_json:
        show_json(described)
        return
    for item in described:
        click.secho(item["family"], bold=True, nl=False)
        click.echo(f"  {item['summary']}")
        if family:
            click.echo(f"\n{item['contract']}\n\ndims:")
            for dim, what in item["dims"].items():
                click.echo(f"  {dim}: {what}" + ("  (may be a range)" if dim in item["ranges"] else ""))
            click.echo("fields:")
            for name, what in item["fields"].items():
                click.echo(f"  {name}: {what}")


def _describe(name: str) -> dict:
    cls = ops.family(name)
    hints = typing.get_type_hints(cls)
    return {
        "family": name,
        "abi": cls.abi,
        "summary": inspect.getdoc(cls),
        "contract": inspect.getdoc(inspect.getmodule(cls)),
        "dims": cls.DIMS,
        "ranges": list(cls.RANGES),
        "fields": {field: _type(hints[field]) for field in cls.own_fields()},
    }


def _type(hint: typing.Any) -> str:
    """A field's type as a spec writes it."""
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(map(str, typing.get_args(hint)))
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        inner = ", ".join(f"{f.name}: {_type(hints[f.name])}" for f in dataclasses.fields(hint))
        return f"{{{inner}}}"
    if typing.get_args(hint):
        return " | ".join(_type(arg) for arg in typing.get_args(hint))
    return getattr(hint, "__name__", str(hint))
