"""What every operator family promises: its fields in a spec, its tensors, its arithmetic, its candidate kernels.

A family is a frozen dataclass whose fields are the keys of its spec entry. Field types are standard-library types,
`Literal`s and other dataclasses, so that the spec reader can validate them and a GPU server can rebuild the contract
from a manifest without the spec reader's dependencies.
"""

from __future__ import annotations

import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from math import prod
from typing import Any, ClassVar, NamedTuple

import numpy as np

from kgen.runtime.format import canonical
from kgen.runtime.format.dtypes import DTYPES
from kgen.runtime.format.expr import Expr, evaluate, fold
from kgen.runtime.format.manifest import Operator as ManifestOperator
from kgen.runtime.format.manifest import Tensor

Dims = Mapping[str, int]
Arrays = dict[str, np.ndarray]
Config = dict[str, Any]

# pydantic reads this attribute of a plain dataclass: unknown keys are errors.
STRICT = {"extra": "forbid", "strict": True}


@dataclass(frozen=True)
class Check:
    """How an output compares with the reference.

    Attributes:
        output: the tensor.
        error, limit: the measure named by `measure`, and the most that is allowed. NaN never passes.
        worst: index of the element furthest off; `got` and `expected` are its values.
    """

    output: str
    measure: str
    error: float
    limit: float
    worst: tuple[int, ...] = ()
    got: float = 0.0
    expected: float = 0.0

    @property
    def ok(self) -> bool:
        return self.error <= self.limit


class Traffic(NamedTuple):
    """Bytes of device memory that a call cannot do without: each input read once, each output written once."""

    read: int
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written


class Work(NamedTuple):
    """What a config's kernel asks of the device, known before it is lowered.

    Attributes:
        blocks: of the grid; for a persistent kernel the tiles, which one block an SM walks.
        threads, smem: of a block; smem in bytes.
        read, written: bytes that a block (a tile) moves from L2 or DRAM, and back.
        flops: of a block (a tile), on the operand type that the contract's `math` names, padding included.
        registers: a thread's, an estimate.
    """

    blocks: int
    threads: int
    smem: int
    read: int
    written: int
    flops: int
    registers: int
    persistent: bool = False


@dataclass(frozen=True, kw_only=True)
class Operator(ABC):
    """Base of the families.

    Attributes:
        name: the instance's name in its bundle.
        dims: dim -> (least, most); a static dim has both equal.
        workloads: workload -> values of the range dims: what tune, verify and bench run.
    """

    name: str
    dims: dict[str, tuple[int, int]]
    workloads: dict[str, dict[str, int]]

    abi: ClassVar[int]
    DIMS: ClassVar[dict[str, str]]
    """Every dim of the family and what it counts."""
    RANGES: ClassVar[tuple[str, ...]]
    """The dims that may be ranges (run-time dims)."""
    math: ClassVar[str | None] = None
    """The operand type whose tensor-core rate bounds `flops`; None where arithmetic never does."""
    deterministic: ClassVar[bool] = True
    """Whether the same inputs give the same bits at every call."""

    @classmethod
    def family(cls) -> str:
        """The family's name in a spec: its module's."""
        return cls.__module__.rpartition(".")[2]

    @classmethod
    def own_fields(cls) -> tuple[str, ...]:
        """The spec keys that belong to the family."""
        base = {f.name for f in fields(Operator)}
        return tuple(f.name for f in fields(cls) if f.name not in base)

    @classmethod
    def from_manifest(cls, operator: ManifestOperator) -> Operator:
        """The contract that a bundle's operator was built from."""
        return cls.from_data(operator.name, operator.dims, operator.workloads, operator.attrs)

    @classmethod
    def from_data(
        cls,
        name: str,
        dims: Mapping[str, tuple[int, int]],
        workloads: Mapping[str, dict[str, int]],
        attrs: Mapping[str, Any],
    ) -> Operator:
        """A contract from plain data: the inverse of `attrs`."""
        hints = typing.get_type_hints(cls)
        own = {key: _construct(hints[key], value) for key, value in attrs.items()}
        return cls(name=name, dims=dict(dims), workloads=dict(workloads), **own)

    def attrs(self) -> dict[str, Any]:
        """The family's own fields as plain data."""
        return {key: _plain(getattr(self, key)) for key in self.own_fields()}

    def digest(self) -> str:
        """16 hex digits that name what is computed: records are keyed by it, whatever the operator is called."""
        what = {"family": self.family(), "abi": self.abi, "dims": self.dims, "attrs": self.attrs()}
        return canonical.sha256(canonical.dumps(what))[:16]

    def extent(self, dim: str) -> Expr:
        """`dim` as an expression: its value where static, its name where a range."""
        least, most = self.dims[dim]
        return least if least == most else dim

    def static(self, dim: str) -> int:
        """The value of a static dim."""
        least, most = self.dims[dim]
        assert least == most, f"{dim} is a range"
        return least

    def full_dims(self, dims: Dims) -> dict[str, int]:
        """`dims` with the static ones added."""
        return {dim: dims.get(dim, least) for dim, (least, _) in self.dims.items()}

    def tensor(self, name: str, role: str, dtype: str, *shape: Expr, align: int = 16) -> Tensor:
        """A contiguous row-major tensor."""
        strides: list[Expr] = []
        step: Expr = 1
        for extent in reversed(shape):
            strides.insert(0, step)
            step = fold("*", extent, step)
        return Tensor(name, role, dtype, tuple(shape), tuple(strides), align)

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensor arguments, in the order of a call."""

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """What the fields' types cannot say: pairs of a field's path and a sentence that names the fix."""
        return iter(())

    @abstractmethod
    def candidates(self) -> list[tuple[Expr, Config]]:
        """What tuning chooses from: (guard over dims and sm_count, config), the configs of `dispatch` among them.

        The guard is true where the config is legal and sensible. Of two that the model calls equal the first is taken.
        """

    @abstractmethod
    def work(self, config: Config, dims: Dims) -> Work:
        """What the kernel of `config` does at `dims`."""

    @abstractmethod
    def dispatch(self) -> list[tuple[Expr, Config]]:
        """The untuned choice: (guard over dims and sm_count, config), first match wins, covering every dim in range."""

    @abstractmethod
    def inputs(self, dims: Dims, rng: np.random.Generator, kind: str) -> Arrays:
        """Random inputs. `kind` is one of `input_kinds`."""

    input_kinds: ClassVar[tuple[str, ...]] = ("normal",)

    @abstractmethod
    def check(self, dims: Dims, inputs: Arrays, outputs: Arrays, rng: np.random.Generator) -> list[Check]:
        """Compare a device's outputs with the reference, computed here in float64 or exact integers."""

    def undefined(self, dims: Dims, inputs: Arrays) -> dict[str, Any]:
        """For the outputs of which a call may leave elements as they are, or anything: an index of those elements."""
        return {}

    def near(self, dims: Dims, inputs: Arrays, outputs: Arrays, rng: np.random.Generator) -> list[Check]:
        """What another library must fulfil to be computing the same thing: `check`, or something looser."""
        return self.check(dims, inputs, outputs, rng)

    @abstractmethod
    def edge_dims(self) -> list[dict[str, int]]:
        """Values of the range dims at which kernels tend to be wrong."""

    def traffic(self, dims: Dims) -> Traffic:
        """The least device memory traffic at `dims`."""
        full = self.full_dims(dims)
        read = written = 0
        for tensor in self.tensors():
            size = DTYPES[tensor.dtype].bytes * prod(evaluate(extent, full) for extent in tensor.shape)
            read += size if tensor.role in ("in", "inout") else 0
            written += size if tensor.role in ("out", "inout") else 0
        return Traffic(read, written)

    @abstractmethod
    def flops(self, dims: Dims) -> int:
        """Floating-point operations."""


def edges(least: int, most: int, *tiles: int) -> list[int]:
    """Sizes in least..most at which tiles tend to go wrong: the ends, primes, and around each tile size."""
    sizes = {least, most, 1, 17, 127, 4095}
    for tile in tiles:
        sizes |= {tile - 1, tile, tile + 1}
    return sorted(size for size in sizes if least <= size <= most)


def row_edges(rows: tuple[int, int], columns: int) -> list[dict[str, int]]:
    """`edges` of the rows ``m`` of a matrix, as far as it stays within 64 Mi elements; none where m is fixed."""
    least, most = rows
    return [] if least == most else [{"m": m} for m in edges(least, most) if m * columns <= 1 << 26]


def uncountable(rows: int, columns: int) -> Iterator[tuple[tuple[str, ...], str]]:
    """The problem of a matrix whose elements a kernel cannot count in int32, its last block's idle threads included."""
    most = (1 << 31) - (1 << 16)
    if rows * columns > most:
        yield ("dims", "m"), f"m · {columns} must be at most {most}: at most {most // columns} rows"


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) else value


def _construct(hint: Any, value: Any) -> Any:
    """Plain data back to the dataclasses that `hint` names; of a union, the one whose fields are the keys."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if not isinstance(value, dict):
            return value
        hint = next(h for h in typing.get_args(hint) if is_dataclass(h) and {f.name for f in fields(h)} == set(value))
    if is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return hint(**{key: _construct(hints[key], item) for key, item in value.items()})
    if typing.get_origin(hint) is tuple and isinstance(value, list):
        return tuple(value)
    return value
