"""``kgen bench``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from kgen.build import peers as peers_
from kgen.build.bench import Bench, Entry, Options, points
from kgen.build.cli import json_option, show_json
from kgen.build.records import Records
from kgen.build.timing import METHODS
from kgen.runtime import drivers
from kgen.runtime.bundle import Bundle


@click.command("bench")
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.option("--op", "operators", multiple=True, help="Only this operator; may be repeated.")
@click.option("--workload", "workloads", multiple=True, help="Only this workload; may be repeated.")
@click.option(
    "--peers", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder of adapters to race against."
)
@click.option("--samples", type=click.IntRange(6), default=60, show_default=True, help="Calls timed of each contender.")
@click.option(
    "--sustained", type=click.FloatRange(0), default=0, metavar="SECONDS", help="Also time each after so long a load."
)
@click.option("--method", type=click.Choice(METHODS), help="[cupti where cupti-python is installed, else graph]")
@click.option("--no-check", is_flag=True, help="Do not compare kgen's own outputs with the reference.")
@click.option("--device", default=0, show_default=True, help="Device ordinal.")
@click.option("--driver", type=click.Choice(drivers.NAMES), help="[whichever is installed]")
@click.option(
    "--record", type=click.Path(file_okay=False, path_type=Path), help="Add the results to this folder of records."
)
@json_option
def command(
    bundle, operators, workloads, peers, samples, sustained, method, no_check, device, driver, record, as_json
) -> None:
    """Time a BUNDLE's operators at their workloads on a GPU: device time, L2 emptied before each call.

    Beside each time stand the roofline and the time of a plain streaming kernel over as many bytes, both measured in
    the same run, and every peer of --peers that can be loaded, taking turns with kgen's kernel.
    """
    opened = Bundle.open(bundle)
    for name in operators:
        if name not in opened.manifest.operators:
            raise click.BadParameter(f"no operator {name!r}; the bundle has {', '.join(opened.manifest.operators)}")
    adapters = peers_.load(peers) if peers else []
    options = Options(samples, sustained, not no_check)
    entries = []
    with opened.load(device, driver=drivers.open(driver)) as kernels, Bench(kernels, method, options) as bench:
        todo = list(points(kernels, list(operators), list(workloads)))
        if not todo:
            raise click.UsageError("nothing to time: no operator has such a workload")
        if not as_json:
            click.echo(f"{kernels.driver.device_name(device)}  {bench.timer.method}")
        for number, (name, workload, dims) in enumerate(todo, 1):
            if not as_json and sys.stderr.isatty():
                click.echo(f"[{number}/{len(todo)}] {name} {workload}\r", nl=False, err=True)
            entries.append(bench.run(name, dims, adapters))
            if not as_json:
                _print(workload, entries[-1])
            if record:  # after each, so that a long run that is cut off loses nothing
                Records.load(record).merge(kernels.driver.device_name(device), entries).save(record)
    if as_json:
        show_json(entries)


def _print(workload: str, entry: Entry) -> None:
    us, floor = entry["us"], entry["floor_us"]
    dims = " ".join(f"{dim}={value}" for dim, value in entry["dims"].items())
    click.echo(
        f"{entry['operator']} {dims} ({workload})  {us['median']:.2f} µs [{us['p10']:.2f}..{us['p90']:.2f}]"
        f"  {entry['gb_s']:.0f} GB/s  {entry['tflops']:.1f} TFLOP/s"
        f"  roofline {floor['roofline']:.2f} ({floor['roofline'] / us['median']:.0%})"
        f"  streaming {floor['streaming']:.2f} ({floor['streaming'] / us['median']:.0%})"
    )
    sustained = entry.get("sustained_us", {})
    if sustained:
        click.echo(f"    sustained {sustained['kgen']:.2f} µs")
    for name, peer in entry["peers"].items():
        ratio = peer["us"]["median"] / us["median"]
        mark = "" if peer["agrees"] else "  computes something else"
        long = f"  sustained {sustained[name]:.2f} ({sustained[name] / sustained['kgen']:.3f}×)" if sustained else ""
        note = f"  {peer['note']}" if peer["note"] else ""
        click.echo(f"    {name} {peer['us']['median']:.2f} µs  {ratio:.3f}×{long}{mark}{note}")
    for name, reason in entry["missing"].items():
        click.echo(f"    {name} not measured: {reason}")
    if entry["throttled"]:
        click.echo(f"    SM clock {entry['sm_mhz'][0]}..{entry['sm_mhz'][1]} MHz: {', '.join(entry['throttled'])}")
