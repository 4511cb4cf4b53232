"""What a kernel module returns: the steps of a call over tilelang functions, before they are lowered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kgen.runtime.format.expr import Expr


@dataclass(frozen=True)
class Launch:
    """Launch a tilelang function, under `name` in profilers and in the code.

    Its parameters are matched by name: a tensor of the operator, a part of the workspace, a dim, or ``sm_count``;
    `rename` maps the function's names to those where they differ. `pass_config` is tilelang's.
    `cooperative`: its blocks wait for each other, so all of them must be on the device at once.
    `tolerates` maps what ptxas complains of (``"spills"``, ``"C7510"``) to the reason why the kernel is kept anyhow.
    """

    function: Any
    name: str
    rename: Mapping[str, str] = field(default_factory=dict)
    pass_config: Mapping[str, Any] = field(default_factory=dict)
    cooperative: bool = False
    tolerates: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Memset:
    """Fill `bytes` bytes of a tensor or workspace part with `byte`."""

    buffer: str
    byte: int
    bytes: Expr


@dataclass(frozen=True)
class Workspace:
    """Device memory that a call needs besides its tensors: ``scratch``, or ``locks`` (zero on entry, left zero)."""

    name: str
    kind: str
    bytes: Expr


@dataclass(frozen=True)
class Program:
    """The steps of a call, in order, and the workspace they share."""

    steps: tuple[Launch | Memset, ...]
    workspace: tuple[Workspace, ...] = ()
