"""The report as one page that needs nothing else: ``report.html`` with the rows in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources

from kgen.build.report import Row, Totals


def render(rows: Sequence[Row], totals: Totals, device: str | None, bundles: Sequence[str]) -> str:
    """The page.

    Args:
        device: whose records were taken; None where there are none.
        bundles: the names and versions of the bundles that were read.
    """
    data = {
        "device": device,
        "bundles": list(bundles),
        "totals": totals._asdict(),
        "rows": [row._asdict() for row in rows],
    }
    # "<" would let a name end the script element that holds the data.
    text = json.dumps(data).replace("<", "\\u003c")
    template = resources.files("kgen.build").joinpath("report.html").read_text(encoding="utf-8")
    return template.replace("@DATA@", text)
