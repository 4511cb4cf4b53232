"""What can go wrong, one class a cause. Every message names the operator, the value, what was allowed and the fix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class KgenError(Exception):
    """Base of every error that kgen raises on purpose."""


class SpecError(KgenError):
    """A spec is wrong: unknown key, bad value, broken divisibility rule, duplicate name.

    Attributes:
        problems: everything that is wrong, in file order: ``kgen.compiler.source.Problem``, one line each as a string.
    """

    def __init__(self, problems: Iterable[Any]):
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(map(str, self.problems))


class BuildError(KgenError):
    """A kernel could not be lowered or compiled."""


class FormatError(KgenError):
    """A bundle's manifest or container does not follow the format."""


class IntegrityError(KgenError):
    """A bundle's bytes do not match their hash."""


class ArchMismatch(KgenError):
    """The bundle holds no code for this device's architecture."""


class UnknownOperator(KgenError):
    """A bundle holds an operator whose contract this version of kgen does not know."""


class DriverTooOld(KgenError):
    """The CUDA driver is older than the bundle's code needs."""


class DriverNotFound(KgenError):
    """No CUDA driver library, or no binding to it, can be loaded."""


class DeviceLimit(KgenError):
    """The device lacks what a kernel needs (shared memory, clusters)."""


class DriverError(KgenError):
    """A CUDA driver call failed.

    Attributes:
        function: the driver's name of the call, such as ``cuLaunchKernelEx``.
        code: its ``CUresult``.
    """

    def __init__(self, function: str, code: int, name: str, hint: str = ""):
        self.function, self.code = function, code
        super().__init__(f"{function} failed with {name} ({code})" + (f": {hint}" if hint else ""))


class WrongResult(KgenError):
    """A kernel computed something else than its contract says."""


class UnsupportedShape(KgenError):
    """No variant of the operator covers these dims."""


class ArgumentError(KgenError):
    """A call's argument does not fit its contract; the subclasses say how."""


class DtypeMismatch(ArgumentError):
    """A tensor has another dtype than the contract's."""


class ShapeMismatch(ArgumentError):
    """A tensor has another shape than the dims give."""


class StrideMismatch(ArgumentError):
    """A tensor's memory order is not the contract's."""


class Misaligned(ArgumentError):
    """A tensor's address is not a multiple of what the kernel needs."""


class DeviceMismatch(ArgumentError):
    """A tensor does not live on the device the kernels were loaded on."""


class Overlap(ArgumentError):
    """An output shares memory with another argument."""


class WorkspaceTooSmall(ArgumentError):
    """The workspace has fewer bytes than ``plan.workspace_bytes``."""
