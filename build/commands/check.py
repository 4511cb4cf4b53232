"""``kgen check``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from kgen.build.cli import json_option, show_json
from kgen.runtime import drivers
from kgen.runtime.bundle import Bundle


@click.command("check")
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.option("--device", default=0, show_default=True, help="Device ordinal.")
@click.option("--driver", type=click.Choice(drivers.NAMES), help="[whichever is installed]")
@click.option("--expect", help="The id that the bundle must have, sha256:…")
@json_option
def command(bundle, device, driver, expect, as_json) -> None:
    """Say whether a BUNDLE is sound and would run on this device, with every reason why not; loads nothing."""
    opened = Bundle.open(bundle, expect=expect)
    reasons = opened.check(device, driver=drivers.open(driver))
    if as_json:
        listed = [{"class": type(reason).__name__, "message": str(reason)} for reason in reasons]
        show_json({"id": opened.id, "runs": not reasons, "reasons": listed})
    else:
        for reason in reasons:
            click.echo(f"{type(reason).__name__}: {reason}", err=True)
        if not reasons:
            click.echo(f"{bundle} is sound and runs on device {device}")
    sys.exit(4 if reasons else 0)
