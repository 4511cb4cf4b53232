"""Operator families: the contract of each, in a module of its name. A new module here is a new operator.

A family's module defines one subclass of `contract.Operator`; its tilelang programs live in the module of the same name
under `kgen.compiler.kernels`. Nothing here imports tilelang or torch: a GPU server reads contracts too.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil

from kgen.compiler.ops.contract import Operator
from kgen.runtime.errors import UnknownOperator
from kgen.runtime.format.manifest import Operator as ManifestOperator

_NOT_FAMILIES = {"contract", "numerics", "routing", "scaling"}


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


def from_manifest(operator: ManifestOperator) -> Operator:
    """The contract that a bundle's operator was built from.

    Raises:
        UnknownOperator: the bundle was built by a kgen with other families, or other fields of this one.
    """
    if operator.op not in names():
        raise UnknownOperator(
            f"{operator.name}: this kgen has no operator family {operator.op!r}; it has {', '.join(names())}: "
            "use the kgen that built the bundle"
        )
    cls = family(operator.op)
    if cls.abi != operator.abi:
        raise UnknownOperator(
            f"{operator.name} is of {operator.op}@{operator.abi}; this kgen has {operator.op}@{cls.abi}: "
            "use the kgen that built the bundle"
        )
    try:
        return cls.from_manifest(operator)
    except (KeyError, TypeError, StopIteration) as error:
        raise UnknownOperator(
            f"{operator.name}: this kgen's {operator.op} ({', '.join(cls.own_fields())}) has other fields than the "
            f"bundle's ({', '.join(operator.attrs)}): use the kgen that built the bundle"
        ) from error
