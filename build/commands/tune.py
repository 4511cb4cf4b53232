"""``kgen tune``."""

from __future__ import annotations

from pathlib import Path

import click

from kgen.build.bench import Bench
from kgen.build.cli import json_option, show_json
from kgen.build.records import Records
from kgen.build.tune import Tuner, changed
from kgen.runtime import drivers
from kgen.runtime.bundle import Bundle


@click.command("tune")
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--record",
    required=True,
    type=click.Path(path_type=Path),
    help="A folder of records, or the .json file of this device: earlier picks are read, new ones written.",
)
@click.option("--op", "operators", multiple=True, help="Only this operator; may be repeated.")
@click.option("--workloads-only", is_flag=True, help="Do not tune at powers of four between the ends of a range.")
@click.option("--device", default=0, show_default=True, help="Device ordinal.")
@click.option("--driver", type=click.Choice(drivers.NAMES), help="[whichever is installed]")
@json_option
def command(bundle, record, operators, workloads_only, device, driver, as_json) -> None:
    """Race the variants of a BUNDLE made by `kgen build --candidates` on a GPU and record which runs where.

    The next `kgen build` reads the record and freezes its picks.
    """
    opened = Bundle.open(bundle)
    for name in operators:
        if name not in opened.manifest.operators:
            raise click.BadParameter(f"no operator {name!r}; the bundle has {', '.join(opened.manifest.operators)}")
    tell = (lambda line: None) if as_json else click.echo
    entries, differing = [], []
    with opened.load(device, driver=drivers.open(driver)) as kernels, Bench(kernels) as bench:
        name_of_device = kernels.driver.device_name(device)
        before = Records.load(record).devices.get(name_of_device, [])
        tuner = Tuner(bench, before, tell)
        for name in operators or list(kernels):
            new = tuner.tune(name, ladder=not workloads_only)
            entries += new
            differing += changed(before, new)
            Records.load(record).merge(name_of_device, new).save(record)
    if as_json:
        show_json({"entries": entries, "changed": [list(pair) for pair in differing]})
        return
    click.echo(f"{len(entries)} points tuned; {len(differing)} picks changed since the record that was there")
    for earlier, entry in differing:
        gain = earlier["us"]["median"] / entry["us"]["median"]
        click.echo(f"  {entry['operator']} {entry['dims']}: {earlier['config']} → {entry['config']}, {gain:.3f}×")
