"""``kgen diff``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kgen.build.cli import json_option, show_json
from kgen.build.diff import Change, Diff, KernelChange, OperatorChange, compare, diff, sizes
from kgen.build.records import Records
from kgen.build.routes import SM_COUNT, Choice, Route, Time, carried, times
from kgen.runtime.bundle import Bundle, version_text
from kgen.runtime.format.expr import Expr, show

MARKS = {"added": click.style("+", fg="green"), "removed": click.style("-", fg="red"), "changed": "~"}
OPAQUE = ("steps", "workspace")  # that they changed says enough; --json has them
RESOURCES = ("registers", "spills", "smem", "cubin_bytes")  # of a kernel that only one bundle has
BUNDLE = click.Path(exists=True, path_type=Path)
Row = Sequence[str]


@click.command("diff")
@click.argument("a", type=BUNDLE)
@click.argument("b", type=BUNDLE)
@click.option(
    "--record",
    type=click.Path(exists=True, path_type=Path),
    help="Compare recorded times too: a folder of records, or a .json file of them.",
)
@click.option("--sm-count", default=SM_COUNT, show_default=True, help="Multiprocessors of the device in question.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 where the bundles differ.")
@json_option
def command(a, b, record, sm_count, exit_code, as_json) -> None:
    """Say what changed from bundle A to bundle B: contracts, dispatch, code, size, toolchain. Needs no GPU.

    With --record also the times of what each runs at its workloads, as far as they were recorded there or in the
    records that the bundles carry.
    """
    old, new = Bundle.open(a), Bundle.open(b)
    found = diff(old, new, sm_count)
    measured = None
    if record:
        measured = times(old.manifest, new.manifest, [carried(old), carried(new), Records.load(record)])
    if as_json:
        listed = None if measured is None else [asdict(time) for time in measured]
        show_json(asdict(found) | {"a": _about(old), "b": _about(new), "times": listed})
    else:
        _print(found, old, new)
        if measured is not None:
            _section("recorded medians, and A's over B's", map(_time, measured))
    sys.exit(1 if exit_code and not found.identical else 0)


def _about(bundle: Bundle) -> dict[str, Any]:
    manifest = bundle.manifest
    about = {"path": bundle.path, "id": bundle.id, "name": manifest.name, "version": manifest.version}
    return about | {"bytes": sizes(bundle)["all"]}


def _print(found: Diff, a: Bundle, b: Bundle) -> None:
    if found.identical:
        click.echo(f"identical: {a.manifest.name} {a.manifest.version}  {a.id}")
    else:
        _table([side, f"{x.manifest.name} {x.manifest.version}", x.id, x.path] for side, x in (("A", a), ("B", b)))
    _section("bundle", map(_row, found.header))
    _section("toolchain", map(_row, found.toolchain))
    _section(f"operators: {_count(found.operators, found.same['operators'])}", map(_whole, found.operators))
    for operator in found.operators:
        if operator.kind == "changed":
            _section(operator.name, _parts(operator))
    _section("dispatch", map(_route, found.routes))
    _section(f"kernels: {_count(found.kernels, found.same['kernels'])}", map(_kernel, found.kernels))
    told = {f"sources/{id}.cu" for kernel in found.kernels for id in (kernel.a, kernel.b)}
    _section("evidence", (_row(change) for change in found.evidence if change.field not in told))
    _section("size in bytes", ([*_row(change), f"{change.b - change.a:+}"] for change in found.size))


def _section(title: str, rows: Iterable[Row]) -> None:
    if rows := list(rows):
        click.secho(f"\n{title}", bold=True)
        _table(["", *row] for row in rows)


def _table(rows: Iterable[Row]) -> None:
    """Print rows with their columns aligned."""
    rows = [list(row) for row in rows]
    widths = [max((len(click.unstyle(row[i])) for row in rows if i < len(row) - 1), default=0) for i in range(99)]
    for row in rows:
        cells = [cell + " " * (width - len(click.unstyle(cell))) for cell, width in zip(row, widths, strict=False)]
        click.echo("  ".join(cells).rstrip())


def _count(changes: Sequence[OperatorChange | KernelChange], same: int) -> str:
    kinds = [change.kind for change in changes]
    return ", ".join([*(f"{kinds.count(kind)} {kind}" for kind in MARKS if kind in kinds), f"{same} the same"])


def _row(change: Change) -> Row:
    return MARKS[change.kind], change.field, _values(change)


def _whole(operator: OperatorChange) -> Row:
    if operator.kind == "changed":
        return MARKS["changed"], operator.name
    fields = {change.field: change.b or change.a for change in operator.contract}
    return MARKS[operator.kind], operator.name, f"{fields['op']}@{fields['abi']}  {_text('dims', fields['dims'])}"


def _parts(operator: OperatorChange) -> Iterator[Row]:
    for change in operator.contract:
        yield MARKS[change.kind], "contract", change.field, _values(change)
    for variant in operator.variants:
        indices = dict.fromkeys(str(index) for index in (variant.a, variant.b) if index is not None)
        title = f"variant {' → '.join(indices)} ({variant.target})"
        if variant.kind == "changed":
            for change in variant.changes:
                yield MARKS[change.kind], title, change.field, _values(change)
            continue
        fields = {change.field: change.a if variant.kind == "removed" else change.b for change in variant.changes}
        guard, kernels = _text("guard", fields["guard"]), _text("kernels", fields["kernels"])
        yield MARKS[variant.kind], title, "when", f"{guard}: {_text('config', variant.config)} → {kernels}"


def _route(route: Route) -> Row:
    where = (route.operator, route.workload, _text("", route.dims), route.target)
    return "~", *where, f"{_choice(route.a, route.b)} → {_choice(route.b, route.a)}"


def _choice(choice: Choice | None, other: Choice | None) -> str:
    """What runs, and of its config what differs from the other's."""
    if choice is None:
        return "refused"
    differing = {change.field for change in compare(choice.config, other.config if other else {})}
    config = "".join(f" {key}={value}" for key, value in choice.config.items() if key in differing)
    return f"variant {choice.variant}{config} ({_text('kernels', choice.kernels)})"


def _kernel(kernel: KernelChange) -> Row:
    ids = " → ".join(dict.fromkeys(id[:12] for id in (kernel.a, kernel.b) if id))
    if kernel.kind == "changed":
        told = [change for change in kernel.changes if change.field not in ("cubin", "ptx")]
        facts = [f"{change.field} {_values(change)}" for change in told] or ["other code, the same resources"]
    else:
        told = [change for change in kernel.changes if change.field in RESOURCES]
        facts = [f"{change.field} {_values(change)}" for change in told]
    return MARKS[kernel.kind], ids, kernel.entry, ", ".join(facts)


def _time(time: Time) -> Row:
    where = (time.operator, time.workload, _text("", time.dims))
    if time.device is None:
        return *where, "not recorded"
    sides = ("not recorded" if us is None else f"{us:.2f} µs" for us in (time.a_us, time.b_us))
    ratio = "" if time.ratio is None else f"{time.ratio:.2f}×"
    return *where, " → ".join(sides), ratio, f"{time.device}, {time.kind}"


def _values(change: Change) -> str:
    if change.field in OPAQUE:
        return "changed"
    sides = {"added": (change.b,), "removed": (change.a,), "changed": (change.a, change.b)}[change.kind]
    return " → ".join(_text(change.field, side) for side in sides)


def _text(field: str, value: Any) -> str:
    """A field's value as people read it."""
    if field in ("guard", "workspace_bytes"):
        return "always" if (field, value) == ("guard", 1) else show(value)
    if field.startswith("tensors.") and field.endswith((".shape", ".strides")):
        return _extents(value)
    if field == "grids":
        return ", ".join(map(_extents, value))
    if field == "min_driver":
        return version_text(value)
    if isinstance(value, dict):
        return " ".join(f"{key}={_text(f'{field}.{key}', item)}" for key, item in value.items())
    if field.startswith("dims."):
        least, most = value
        return str(least) if least == most else f"{least}..{most}"
    if isinstance(value, list):
        return ", ".join(_text(field, item) for item in value)
    text = str(value)
    return text[:12] if len(text) == 64 else text  # a sha256


def _extents(value: Sequence[Expr]) -> str:
    return f"[{', '.join(map(show, value))}]"
