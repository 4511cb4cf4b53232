"""``kgen verify``."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import click
import numpy as np

from kgen.build import verify as verification
from kgen.build.cli import json_option, parse_dims, show_json
from kgen.build.device import facts
from kgen.build.records import Records
from kgen.build.verify import Case, Point
from kgen.compiler import ops
from kgen.runtime import drivers
from kgen.runtime.bundle import Bundle
from kgen.runtime.errors import UnsupportedShape
from kgen.runtime.format.manifest import Manifest, Operator
from kgen.runtime.plan import complete


@click.command("verify")
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.option("--op", "operators", multiple=True, help="Only this operator; may be repeated.")
@click.option("--workload", "workloads", multiple=True, help="Only this workload; may be repeated.")
@click.option("--dims", multiple=True, metavar="DIM=N", help="Only this size, such as m=17; may be repeated.")
@click.option("--kind", "kinds", multiple=True, help="Only this kind of input, at every size; may be repeated.")
@click.option("--seed", type=click.IntRange(0), help="Of the random inputs. [a fresh one]")
@click.option("--device", default=0, show_default=True, help="Device ordinal.")
@click.option("--driver", type=click.Choice(drivers.NAMES), help="[whichever is installed]")
@click.option(
    "--record", type=click.Path(file_okay=False, path_type=Path), help="Add the results to this folder of records."
)
@json_option
def command(bundle, operators, workloads, dims, kinds, seed, device, driver, record, as_json) -> None:
    """Run a BUNDLE's operators on a GPU against numpy references, at their workloads and at edge sizes.

    Each case runs twice, the second time through a captured graph: outputs poisoned, guard bytes around every buffer,
    inputs checked for changes. All cases run unless the device faults; the exit code is 0 if every one passed.
    """
    opened = Bundle.open(bundle)
    points = _points(opened.manifest, operators, workloads, dims, kinds)
    if not points:
        raise click.ClickException(f"nothing to verify: no operator of {bundle} has all that was asked for")
    seed = int(np.random.SeedSequence().entropy % (1 << 32)) if seed is None else seed
    cases: list[Case] = []
    with ExitStack() as stack:
        kernels = stack.enter_context(opened.load(device, driver=drivers.open(driver)))
        name, about = kernels.driver.device_name(device), facts(kernels.driver, device)
        for case in verification.verify(kernels, points, seed):
            cases.append(case)
            _print(case, f"[{len(cases)}/{len(points)}]", bundle, err=as_json)
            if record:  # after each, so that a long run that is cut off loses nothing
                Records.load(record).merge(name, verification.entries(cases, about)).save(record)
        if any(case.lost for case in cases):
            stack.pop_all()  # in a lost context nothing can be unloaded
    if as_json:
        show_json({"device": name, "seed": seed, "cases": [case.to_json() for case in cases]})
    count = Counter(case.status for case in cases)
    others = [f"{count[status]} {status}" for status in ("failed", "not run") if count[status]]
    click.echo(", ".join([f"{count['ok']} of {len(cases)} cases passed", *others, f"seed {seed}"]), err=True)
    sys.exit(0 if count["ok"] == len(cases) else 1)


def _points(
    manifest: Manifest,
    names: tuple[str, ...],
    workloads: tuple[str, ...],
    dims: tuple[str, ...],
    kinds: tuple[str, ...],
) -> list[Point]:
    """What the options leave to verify.

    Raises:
        BadParameter: no operator has what one of the options names.
        UnknownOperator: this kgen does not know the contract of an operator.
    """
    _require("operator", names, manifest.operators, "the bundle has")
    operators = [manifest.operators[name] for name in names or manifest.operators]
    contracts = {operator.name: ops.from_manifest(operator) for operator in operators}
    found = [name for operator in operators for name in operator.workloads]
    _require("workload", workloads, found, "the operators have")
    found = [kind for contract in contracts.values() for kind in contract.input_kinds]
    _require("kind of input", kinds, found, "the operators have")
    if dims and workloads:
        raise click.BadParameter(f"{dims[0]!r} is a size and {workloads[0]!r} another: give one of --dims, --workload")
    sizes = _sizes(operators, dims)
    points: list[Point] = []
    for name, contract in contracts.items():
        if sizes[name] or not dims:
            points += verification.points(contract, workloads, sizes[name], kinds)
    return points


def _require(what: str, values: Iterable[str], allowed: Iterable[str], owner: str) -> None:
    for value in values:
        if value not in allowed:
            raise click.BadParameter(f"no {what} {value!r}; {owner} {', '.join(dict.fromkeys(allowed)) or 'none'}")


def _sizes(operators: list[Operator], words: tuple[str, ...]) -> dict[str, list[dict[str, int]]]:
    """For each operator the sizes that it can run: every combination of the values that were given of each dim."""
    values: dict[str, list[int]] = {}
    for word in words:
        for dim, value in parse_dims((word,)).items():
            values.setdefault(dim, []).append(value)
    sizes: dict[str, list[dict[str, int]]] = {operator.name: [] for operator in operators}
    for combination in product(*values.values()) if values else ():
        size, refusals = dict(zip(values, combination, strict=True)), []
        for operator in operators:
            try:
                full = complete(operator, size)
                sizes[operator.name].append({dim: full[dim] for dim in operator.range_dims})
            except UnsupportedShape as error:
                refusals.append(str(error))
        if refusals and len(refusals) == len(operators):
            raise click.BadParameter("; ".join(refusals))
    return sizes


def _print(case: Case, progress: str, bundle: Path, err: bool) -> None:
    point = case.point
    color = {"ok": "green", "failed": "red", "not run": "yellow"}[case.status]
    errors = ", ".join(f"{check.error:.3g}" for check in case.checks)
    click.secho(f"{progress} {case.status:7}", fg=color, nl=False, err=err)
    click.echo(f" {point}  [{errors}]" if errors else f" {point}", err=err)
    if not case.failures:
        return
    for failure in case.failures:
        click.echo(f"    {failure}", err=err)
    if case.lost:
        click.echo("    the device's context is lost: the remaining cases cannot run", err=err)
    if case.config is not None:
        config = " ".join(f"{key}={value}" for key, value in case.config.items())
        click.echo(f"    variant {case.variant} ran: {config}", err=err)
    dims = "".join(f" --dims {dim}={value}" for dim, value in point.dims.items())
    where = f"{shlex.quote(str(bundle))} --op {point.contract.name}{dims} --kind {point.kind} --seed {case.seed}"
    click.echo(f"    reproduce: kgen verify {where}", err=err)
