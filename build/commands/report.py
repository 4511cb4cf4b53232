"""``kgen report``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import click

from kgen.build import published
from kgen.build.cli import json_option, show_json
from kgen.build.files import write_atomic
from kgen.build.records import Entry, Records
from kgen.build.report import Row, Totals, report, totals
from kgen.runtime.bundle import Bundle
from kgen.runtime.format.manifest import Manifest

HEADER = ("workload", "dtype", "state", "ms", "roofline", "best peer", "peer ms", "ratio", "TileOPs", "published best")
WORDS = ("workload", "dtype", "state", "best peer")
RATIO = HEADER.index("ratio")


@click.command("report")
@click.argument("bundles", nargs=-1, metavar="[BUNDLE]...", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--records",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default="specs/records",
    show_default=True,
    help="Folder of records.",
)
@click.option(
    "--published",
    "tables",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="[RECORDS/published.yaml]",
)
@click.option("--device", help="Whose records to take. [the only device there is]")
@click.option("--op", help="Only this published operator.")
@click.option(
    "--html", "page", type=click.Path(dir_okay=False, path_type=Path), help="Write a page instead of a table."
)
@json_option
def command(bundles, folder, tables, device, op, page, as_json) -> None:
    """Put what was measured of each BUNDLE beside the published tables. Needs no GPU.

    A BUNDLE may also be a spec (.yaml), which is then built in memory. [every dist/*.kgen]
    """
    tables = tables or folder / "published.yaml"
    if not tables.is_file():
        raise click.UsageError(f"{tables} does not exist: say with --published where the published tables are")
    known = published.load(tables)
    if op:
        names = list(dict.fromkeys(row.op for row in known))
        if op not in names:
            raise click.BadParameter(f"no published operator {op!r}; there are {', '.join(names)}", param_hint="--op")
        known = [row for row in known if row.op == op]
    device, entries = _entries(Records.load(folder), device)
    manifests = [_open(path) for path in bundles or sorted(Path("dist").glob("*.kgen"))]
    if not manifests:
        click.echo("no bundles: dist holds none and none was given", err=True)
    rows = report(known, manifests, entries)
    if page:
        from kgen.build.report_html import render

        names = [f"{manifest.name} {manifest.version}" for manifest in manifests]
        write_atomic(page, render(rows, totals(rows), device, names).encode())
        click.echo(f"wrote {page}", err=True)
    if as_json:
        show_json([row._asdict() for row in rows])
        return
    if not page:
        _print_tables(rows)
    _print_totals(totals(rows))


def _open(path: Path) -> Manifest:
    """The manifest of a bundle, or of what a spec builds."""
    if path.suffix in (".yaml", ".yml"):
        # Imported here, so that bundles can be read without the compiler's dependencies.
        from kgen.build.cache import Cache, default_root
        from kgen.build.pipeline import build
        from kgen.compiler.spec import load

        click.echo(f"building {path}", err=True)
        manifest = build(load(path), Cache(default_root()), jobs=os.cpu_count() or 1).manifest
    else:
        manifest = Bundle.open(path).manifest
    click.echo(f"{path}: {manifest.name} {manifest.version}, {len(manifest.operators)} operators", err=True)
    return manifest


def _entries(records: Records, device: str | None) -> tuple[str | None, list[Entry]]:
    """The device whose records are taken, and they; None and nothing where there are none."""
    names = ", ".join(records.devices) or "none"
    if device is None and len(records.devices) > 1:
        raise click.UsageError(f"there are records of several devices, choose one with --device: {names}")
    if device is None:
        return next(iter(records.devices.items()), (None, []))
    if device not in records.devices:
        raise click.BadParameter(f"no records of {device!r}; there are: {names}", param_hint="--device")
    return device, records.devices[device]


def _print_tables(rows: Sequence[Row]) -> None:
    for (op, page), group in groupby(rows, key=lambda row: (row.op, row.page)):
        lines = [(row, _cells(row)) for row in group]
        widths = [max(map(len, column)) for column in zip(HEADER, *(cells for _, cells in lines), strict=True)]
        click.secho(op, bold=True, nl=False)
        click.echo(f"  {page}")
        click.secho("  ".join(_aligned(HEADER, widths)).rstrip(), underline=True)
        for row, cells in lines:
            padded = _aligned(cells, widths)
            if row.ratio is not None:
                padded[RATIO] = click.style(padded[RATIO], fg=_colour(row.ratio))
            click.secho("  ".join(padded).rstrip(), dim=not row.built or None)
        click.echo()


def _print_totals(total: Totals) -> None:
    click.echo(f"{total.rows} rows: {total.built} built, {total.verified} verified, {total.timed} timed")
    if total.geomean is not None:
        click.echo(
            f"{total.won} of {total.compared} compared are at least as fast as the fastest peer; "
            f"geometric mean {total.geomean:.2f}×"
        )


def _cells(row: Row) -> tuple[str, ...]:
    state = "verified" if row.verified else "built" if row.built else "not built"
    share = "" if row.roofline_share is None else f"{row.roofline_share:.0%}"
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}×"
    peer = row.best_peer or ""
    times = (row.time_ms, row.peers.get(peer), row.tileops_ms, row.published_best_ms)
    ours, theirs, tileops, best = ("" if time is None else f"{time:.4g}" for time in times)
    return row.workload, row.dtype, state, ours, share, peer, theirs, ratio, tileops, best


def _aligned(texts: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Padded to `widths`: words to the left, numbers to the right."""
    return [
        text.ljust(width) if title in WORDS else text.rjust(width)
        for title, text, width in zip(HEADER, texts, widths, strict=True)
    ]


def _colour(ratio: float) -> str:
    return "green" if ratio >= 1 else "yellow" if ratio >= 0.95 else "red"
