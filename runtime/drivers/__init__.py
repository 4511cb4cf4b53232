"""The CUDA driver API, through one of two bindings that behave the same: ``cuda-python`` and plain ``ctypes``.

Importing this package loads neither; `open` does. See `Driver` for what a driver can do.
"""

from __future__ import annotations

from kgen.runtime.errors import ArgumentError, DriverNotFound

TYPE_CHECKING = False  # as typing's, whose import alone takes longer than this module's
if TYPE_CHECKING:
    from kgen.runtime.drivers.common import Attribute, Driver, FunctionAttribute, LaunchConfig

NAMES = ("cuda-python", "ctypes")

__all__ = ["NAMES", "Attribute", "Driver", "FunctionAttribute", "LaunchConfig", "open"]

_opened: dict[str, Driver] = {}


def open(name: str | None = None) -> Driver:
    """The driver of that name, initialized: the same object whenever it is asked for.

    Args:
        name: ``cuda-python``, ``ctypes``, or None: cuda-python where ``cuda.bindings`` is installed, else ctypes.

    Raises:
        ArgumentError: another name.
        DriverNotFound: libcuda.so.1, or the binding, is not on this machine.
        DriverError: the driver found no usable device (``cuInit``).
    """
    if name is None:
        name = "cuda-python" if "cuda-python" in _opened or _has_bindings() else "ctypes"
    if name not in NAMES:
        raise ArgumentError(f"no driver is named {name!r}: choose {' or '.join(map(repr, NAMES))}")
    if name not in _opened:
        if name == "ctypes":
            from kgen.runtime.drivers.ctypes_driver import CtypesDriver as Implementation
        else:
            if not _has_bindings():
                raise DriverNotFound("cuda.bindings is not installed: pip install cuda-bindings, or use 'ctypes'")
            from kgen.runtime.drivers.cuda_python import CudaPythonDriver as Implementation
        _opened.setdefault(name, Implementation())
    return _opened[name]


def _has_bindings() -> bool:
    from importlib.util import find_spec

    try:
        return find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:  # no `cuda` at all
        return False


def __getattr__(name: str) -> object:
    if name in ("Attribute", "Driver", "FunctionAttribute", "LaunchConfig"):
        from kgen.runtime.drivers import common

        return getattr(common, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
