"""``kgen verify``."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import click

from kgen.build import verify as verification
from kgen.build.cli import json_option, show_json
from kgen.build.records import Records
from kgen.runtime import drivers
from kgen.runtime.bundle import Bundle


@click.command("verify")
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.option("--op", "operators", multiple=True, help="Only this operator; may be repeated.")
@click.option("--device", default=0, show_default=True, help="Device ordinal.")
@click.option("--driver", type=click.Choice(drivers.NAMES), help="[whichever is installed]")
@click.option("--seed", type=int, help="Of the random inputs. [a fresh one]")
@click.option(
    "--record", type=click.Path(file_okay=False, path_type=Path), help="Add the results to this folder of records."
)
@json_option
def command(bundle, operators, device, driver, seed, record, as_json) -> None:
    """Run a BUNDLE's operators on a GPU against numpy references, at their workloads and at edge sizes."""
    opened = Bundle.open(bundle)
    for name in operators:
        if name not in opened.manifest.operators:
            raise click.BadParameter(f"no operator {name!r}; the bundle has {', '.join(opened.manifest.operators)}")
    cases = []
    with opened.load(device, driver=drivers.open(driver)) as kernels:
        for case in verification.verify(kernels, list(operators), seed):
            cases.append(case)
            if not as_json:
                _print(case)
        if record:
            entries = verification.entries(cases, kernels.driver.version())
            Records.load(record).merge(kernels.driver.device_name(device), entries).save(record)
    failed = sum(not case.ok for case in cases)
    if as_json:
        show_json([asdict(case) | {"ok": case.ok} for case in cases])
    else:
        click.echo(f"{len(cases) - failed} of {len(cases)} cases passed")
    sys.exit(1 if failed else 0)


def _print(case: verification.Case) -> None:
    dims = " ".join(f"{dim}={value}" for dim, value in case.dims.items())
    errors = ", ".join(f"{check.error:.3g}" for check in case.checks)
    click.secho("ok  " if case.ok else "FAIL", fg="green" if case.ok else "red", nl=False)
    click.echo(f"  {case.operator} {dims} {case.kind}  {case.workload or ''}  [{errors}]")
    for failure in case.failures:
        click.echo(f"      {failure}")
