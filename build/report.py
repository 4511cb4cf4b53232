"""The published tables beside our own measurements: one row each, and their totals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kgen.build.published import Published, full_dims, points
from kgen.build.records import Entry
from kgen.runtime.format.manifest import Manifest, Operator
from kgen.runtime.plan import select

SM_COUNT = 132  # of an H100 or H200; for entries that do not tell


class Row(NamedTuple):
    """A published row and what the records say of our operator for it. Times in ms; None where unknown.

    Attributes:
        op, page, workload, dtype, dims: the published row.
        tileops_ms, published_best_ms, published_ratio: TileOPs as printed, its fastest alternative, that over TileOPs.
        peers, marks: the times measured beside ours; those of them that compute something else.
        operator: ours, as ``bundle/operator``.
        built, verified: a bundle holds it; its kernels of today passed verification at these dims.
        time_ms, p10_ms, p90_ms: the median device time, and percentiles.
        floor_ms: the time of streaming the same bytes.
        roofline_share: the roofline's time over ours.
        best_peer, ratio: the fastest peer that is no mark; its time over ours: above 1 we are faster.
    """

    op: str
    page: str
    workload: str
    dtype: str
    dims: dict[str, int]
    tileops_ms: float
    published_best_ms: float | None
    published_ratio: float | None
    peers: dict[str, float]
    marks: list[str]
    operator: str | None = None
    built: bool = False
    verified: bool = False
    time_ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    floor_ms: float | None = None
    roofline_share: float | None = None
    best_peer: str | None = None
    ratio: float | None = None


class Totals(NamedTuple):
    """Counts of rows. `compared` have a ratio, `won` one of 1 or more, `geomean` is the ratios' geometric mean."""

    rows: int
    built: int
    verified: int
    timed: int
    compared: int
    won: int
    geomean: float | None


def report(published: Iterable[Published], manifests: Sequence[Manifest], entries: Sequence[Entry]) -> list[Row]:
    """One row a published row, in their order, from the `entries` of one device.

    Where several operators are a row's, the one that was verified and timed is shown.
    """
    return [max(_rows(row, manifests, entries), key=lambda r: (r.verified, r.time_ms is not None)) for row in published]


def totals(rows: Sequence[Row]) -> Totals:
    """What `rows` add up to."""
    ratios = [row.ratio for row in rows if row.ratio is not None]
    return Totals(
        rows=len(rows),
        built=sum(row.built for row in rows),
        verified=sum(row.verified for row in rows),
        timed=sum(row.time_ms is not None for row in rows),
        compared=len(ratios),
        won=sum(ratio >= 1 for ratio in ratios),
        geomean=math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) if ratios else None,
    )


def _rows(row: Published, manifests: Sequence[Manifest], entries: Sequence[Entry]) -> list[Row]:
    """`row` with each operator that computes it, or alone where none does."""
    best = row.best_ms
    ratio = None if best is None else best / row.tileops_ms
    alone = Row(row.op, row.page, row.workload, row.dtype, row.dims, row.tileops_ms, best, ratio, {}, [])
    built = [
        _measured(
            alone._replace(built=True, operator=f"{manifest.name}/{operator.name}"),
            _current(entries, manifest, operator, dims),
        )
        for manifest in manifests
        for operator in manifest.operators.values()
        for dims in points(row, operator)
    ]
    return built or [alone]


def _measured(row: Row, entries: Sequence[Entry]) -> Row:
    """`row` with what `entries`, all about its operator's kernels of today, tell."""
    verified = next((entry["ok"] for entry in entries if entry["kind"] == "verify"), False)
    bench = next((entry for entry in entries if entry["kind"] == "bench" and "median" in entry["us"]), None)
    row = row._replace(verified=verified)
    return row if bench is None else _timed(row, bench)


def _timed(row: Row, entry: Entry) -> Row:
    time, peers = entry["us"]["median"], entry.get("peers", {})
    floors = entry.get("floor_us", {})
    medians = {name: peer["us"]["median"] for name, peer in peers.items()}
    marks = sorted(name for name, peer in peers.items() if peer.get("agrees") is False)
    best = min((name for name in medians if name not in marks), key=medians.__getitem__, default=None)
    return row._replace(
        time_ms=_ms(time),
        p10_ms=_ms(entry["us"].get("p10")),
        p90_ms=_ms(entry["us"].get("p90")),
        floor_ms=_ms(floors.get("streaming")),
        roofline_share=floors["roofline"] / time if "roofline" in floors else None,
        peers={name: _ms(median) for name, median in medians.items()},
        marks=marks,
        best_peer=best,
        ratio=None if best is None else medians[best] / time,
    )


def _current(entries: Sequence[Entry], manifest: Manifest, operator: Operator, dims: dict[str, int]) -> list[Entry]:
    """The entries measured at `dims` with the very kernels that `operator` launches there; those of its name first."""

    def is_current(entry: Entry) -> bool:
        if full_dims(operator, entry["dims"]) != dims:
            return False
        chosen = [select(operator, target, entry.get("sm_count", SM_COUNT), dims) for target in manifest.targets]
        return any([launch.kernel for launch in c.variant.program.launches] == entry["kernels"] for c in chosen)

    return sorted(filter(is_current, entries), key=lambda entry: entry["operator"] != operator.name)


def _ms(us: float | None) -> float | None:
    """Microseconds to milliseconds, to the nanosecond."""
    return None if us is None else round(us / 1000, 6)
