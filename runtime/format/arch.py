"""Which target runs on which device.

A target is ``sm_90`` (that major, same or higher minor), ``sm_100f`` (the family: same major, same or higher minor)
or ``sm_90a`` (exactly that device). The cubin's own ELF flags do not tell 90 from 90a, so the manifest must say it.
Source: "Compatibility" chapters of the CUDA C++ Programming Guide 13.0, and NVIDIA's "family-specific features" post.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from kgen.runtime.errors import FormatError


class Target(NamedTuple):
    """A parsed target: compute capability and suffix (``""``, ``"a"`` or ``"f"``)."""

    major: int
    minor: int
    suffix: str

    @classmethod
    def parse(cls, text: str) -> Target:
        match = re.fullmatch(r"sm_(\d{1,3})(\d)([af]?)", text) if isinstance(text, str) else None
        if match is None:
            raise FormatError(f"target {text!r} is not of the form sm_90, sm_90a or sm_100f")
        return cls(int(match[1]), int(match[2]), match[3])

    def runs_on(self, major: int, minor: int) -> bool:
        """Whether code for this target runs on a device of compute capability major.minor."""
        if self.suffix == "a":
            return (self.major, self.minor) == (major, minor)
        return self.major == major and self.minor <= minor

    def ptx_runs_on(self, major: int, minor: int) -> bool:
        """Whether PTX for this target can be compiled for major.minor: plain PTX also for any later device."""
        return (self.major, self.minor) <= (major, minor) if not self.suffix else self.runs_on(major, minor)


def best(targets: Iterable[str], major: int, minor: int, ptx: bool = False) -> str | None:
    """The most specific of `targets` whose code (or PTX) runs on major.minor, or None."""
    rank = {"a": 2, "f": 1, "": 0}
    parsed = [(Target.parse(target), target) for target in targets]
    fitting = [
        ((target.major, target.minor, rank[target.suffix]), text)
        for target, text in parsed
        if (target.ptx_runs_on(major, minor) if ptx else target.runs_on(major, minor))
    ]
    return max(fitting)[1] if fitting else None
