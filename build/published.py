"""The published tables as data, and which operators of a bundle are theirs: ``specs/records/published.yaml``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kgen.runtime.errors import SpecError
from kgen.runtime.format.manifest import Operator


class Published(NamedTuple):
    """A row of a published table.

    Attributes:
        op, page, workload: the published names of the operator, of the page and of the row.
        family, match, dtype_fields, dtype, dims: the operators it is about, see `points`.
        tileops_ms: the printed time of TileOPs, in ms.
        alternatives_ms: the times printed beside it, in ms.
    """

    op: str
    page: str
    workload: str
    family: str
    match: dict[str, Any]
    dtype_fields: tuple[str, ...]
    dtype: str
    dims: dict[str, int]
    tileops_ms: float
    alternatives_ms: dict[str, float]

    @property
    def best_ms(self) -> float | None:
        """The time of the fastest alternative."""
        return min(self.alternatives_ms.values(), default=None)


def load(path: str | Path) -> list[Published]:
    """The rows of a file of published tables, in its order.

    Raises:
        SpecError: it is not YAML of that shape.
    """
    from ruamel.yaml import YAML, YAMLError

    try:
        tables = YAML(typ="safe").load(Path(path).read_text(encoding="utf-8"))
        return [row for table in tables for row in _rows(**table)]
    except (YAMLError, UnicodeDecodeError, TypeError, AttributeError) as error:
        raise SpecError([f"{path} is no file of published tables: {error}"]) from None


def points(row: Published, operator: Operator) -> Iterator[dict[str, int]]:
    """The values of all of `operator`'s dims at which it computes `row`: at a workload, or the static dims alone."""
    dtypes = {_at(operator.attrs, field) for field in row.dtype_fields}
    if operator.op != row.family or dtypes != {row.dtype} or not contains(operator.attrs, row.match):
        return
    for workload in operator.workloads.values() or [{}]:
        dims = full_dims(operator, workload)
        if set(dims) == set(operator.dims) and row.dims.items() <= dims.items():
            yield dims


def full_dims(operator: Operator, dims: Mapping[str, int]) -> dict[str, int]:
    """`dims` with the operator's static ones added."""
    return {dim: least for dim, (least, most) in operator.dims.items() if least == most} | dict(dims)


def contains(value: Any, wanted: Any) -> bool:
    """Whether `value` has every field of `wanted`, and their values; a wanted None may be absent."""
    if isinstance(wanted, dict):
        return isinstance(value, dict) and all(contains(value.get(key), item) for key, item in wanted.items())
    return list(value) == wanted if isinstance(value, tuple) else value == wanted


def _rows(op: str, page: str, family: str, match: dict, dtype: str | list[str], rows: list[dict]) -> list[Published]:
    fields = (dtype,) if isinstance(dtype, str) else tuple(dtype)
    table = {"op": op, "page": page, "family": family, "dtype_fields": fields}
    return [Published(**table, **row | {"match": _merge(match, row.get("match", {}))}) for row in rows]


def _merge(under: Any, over: Any) -> Any:
    """`over` on top of `under`, mapping by mapping."""
    if not (isinstance(under, dict) and isinstance(over, dict)):
        return over
    return under | {key: _merge(under.get(key), item) for key, item in over.items()}


def _at(attrs: dict[str, Any], path: str) -> Any:
    """The field at a path such as ``x.dtype``; None where there is none."""
    value: Any = attrs
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value
