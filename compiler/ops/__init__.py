"""Operator families: the contract of each, in a module of its name. A new module here is a new operator.

A family's module defines one subclass of `contract.Operator`; its tilelang programs live in the module of the same name
under `kgen.compiler.kernels`. Nothing here imports tilelang or torch: a GPU server reads contracts too.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil

from kgen.compiler.ops.contract import Operator

_NOT_FAMILIES = {"contract", "numerics", "scaling"}


def names() -> list[str]:
    """The families there are."""
    return sorted(info.name for info in pkgutil.iter_modules(__path__) if info.name not in _NOT_FAMILIES)


def family(name: str) -> type[Operator]:
    """The contract class of family `name`.

    Raises:
        KeyError: there is no such family.
    """
    if name not in names():
        raise KeyError(name)
    module = importlib.import_module(f"{__name__}.{name}")
    (found,) = (
        cls
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if issubclass(cls, Operator) and cls.__module__ == module.__name__
    )
    return found
