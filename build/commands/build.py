"""``kgen build``."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kgen.build.cache import Cache, default_root
from kgen.build.cli import json_option, show_json
from kgen.build.publish import publish
from kgen.build.records import Records
from kgen.build.toolchain import FRONT_ENDS
from kgen.runtime.errors import BuildError

if TYPE_CHECKING:
    from kgen.build.pipeline import Built


@click.command("build")
@click.argument("specs", nargs=-1, required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="FILE.kgen or a folder. [dist/NAME-VERSION.kgen]")
@click.option(
    "--candidates",
    is_flag=True,
    help="Build what is worth measuring, for `kgen tune`. [dist/NAME-VERSION-candidates.kgen]",
)
@click.option(
    "-j", "--jobs", type=click.IntRange(1), default=os.cpu_count(), show_default=True, help="Processes at a time."
)
@click.option("--cache", type=click.Path(file_okay=False, path_type=Path), help="Cache folder. [~/.cache/kgen]")
@click.option("--front-end", type=click.Choice(FRONT_ENDS), default=FRONT_ENDS[0], help="nvcc needs a host compiler.")
@click.option("--records", type=click.Path(file_okay=False, path_type=Path), help="[the spec's folder/records]")
@click.option("--check", is_flag=True, help="Build again without the cache and compare the bundles byte for byte.")
@json_option
def command(specs, output, candidates, jobs, cache, front_end, records, check, as_json) -> None:
    """Build each SPEC into a bundle. Needs no GPU.

    Where the records hold what `kgen tune` picked for an operator, its variants are those picks.
    """
    # Imported here, so that the other commands work without the compiler's dependencies.
    from kgen.build.pipeline import build
    from kgen.compiler.spec import load

    if output and len(specs) > 1:
        raise click.UsageError("--output goes with one spec")
    results = []
    for path in specs:
        started = time.monotonic()
        spec = load(path)
        known = Records.load(records or path.parent / "records")
        options = {"jobs": jobs, "front_end": front_end, "records": known, "candidates": candidates}
        with _progress(spec.name, as_json) as progress:
            built = build(spec, Cache(cache or default_root()), progress=progress, **options)
        if check:
            with tempfile.TemporaryDirectory() as fresh, _progress(f"{spec.name} again", as_json) as progress:
                again = build(spec, Cache(fresh), progress=progress, **options)
            if again.files != built.files:
                names = sorted(n for n in built.files | again.files if built.files.get(n) != again.files.get(n))
                raise BuildError(f"{path}: two builds differ in {', '.join(names[:5])}")
        target = output or Path("dist") / f"{spec.name}-{spec.version}{'-candidates' if candidates else ''}.kgen"
        publish(built.files, target)
        size = sum(map(len, built.files.values()))
        results.append(
            {
                "spec": str(path),
                "bundle": str(target),
                "id": f"sha256:{built.id}",
                "operators": len(built.manifest.operators),
                "kernels": len(built.manifest.kernels),
                "bytes": size,
                "dropped": list(built.dropped),
                "stale": list(built.stale),
                "seconds": round(time.monotonic() - started, 2),
            }
        )
        if not as_json:
            last = results[-1]
            click.echo(f"{target}  {last['operators']} operators, {last['kernels']} kernels, {size / 1024:.0f} KiB")
            click.echo(f"{last['id']}  in {last['seconds']} s" + ("  (reproduced)" if check else ""))
            _tell(built)
    if as_json:
        show_json(results)


def _tell(built: Built) -> None:
    """Print the candidates that did not build, and on stderr the picks that were measured on other code."""
    if built.dropped:
        tried = len(built.dropped) + sum(len(operator.variants) for operator in built.manifest.operators.values())
        click.echo(f"{len(built.dropped)} of {tried} candidates did not build:")
        for line in built.dropped:
            click.echo(f"  {line}")
    for sentence in built.stale:
        click.echo(f"warning: {sentence}", err=True)


def _progress(what: str, quiet: bool):
    """A progress bar on stderr: a context that yields the pipeline's callback."""
    from contextlib import contextmanager

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    @contextmanager
    def bar():
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), disable=quiet, transient=True) as progress:
            task = progress.add_task(what, total=None)
            yield lambda done, total, name: progress.update(
                task, completed=done, total=total, description=f"{what}: {name}"
            )

    return bar()
