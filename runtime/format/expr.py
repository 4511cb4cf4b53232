"""Integer expressions as JSON: an int, a symbol (string), or a prefix list such as ``["ceildiv", "m", 128]``.

Symbols are an operator's dims and ``sm_count``. The interpreter is total: every expression that passes `validate`
ends, allocates nothing, and yields an int or raises `FormatError`. Comparisons yield 0 or 1; division floors.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

from kgen.runtime.errors import FormatError

Expr = int | str | list
MAX_NODES = 512
LIMIT = 1 << 62

# name -> (least, most operands, function); None: any number
OPS: dict[str, tuple[int, int | None, Callable[..., Any]]] = {
    "+": (2, None, lambda *v: sum(v)),
    "*": (2, None, lambda *v: math.prod(v)),
    "-": (2, 2, operator.sub),
    "//": (2, 2, operator.floordiv),
    "%": (2, 2, operator.mod),
    "ceildiv": (2, 2, lambda a, b: -(-a // b)),
    "align": (2, 2, lambda a, b: -(-a // b) * b),
    "min": (2, None, min),
    "max": (2, None, max),
    "<": (2, 2, operator.lt),
    "<=": (2, 2, operator.le),
    ">": (2, 2, operator.gt),
    ">=": (2, 2, operator.ge),
    "==": (2, 2, operator.eq),
    "!=": (2, 2, operator.ne),
    "and": (1, None, lambda *v: all(v)),
    "or": (1, None, lambda *v: any(v)),
    "not": (1, 1, operator.not_),
    "select": (3, 3, lambda c, a, b: a if c else b),
}


def evaluate(expr: Expr, symbols: Mapping[str, int]) -> int:
    """The value of `expr`.

    Raises:
        FormatError: a symbol is unknown, a divisor is 0, or a value leaves ±2**62.
    """
    if isinstance(expr, int):
        return int(expr)
    if isinstance(expr, str):
        try:
            return symbols[expr]
        except KeyError:
            raise FormatError(f"unknown symbol {expr!r}; known: {', '.join(sorted(symbols))}") from None
    name, *operands = expr
    values = [evaluate(operand, symbols) for operand in operands]
    try:
        value = int(OPS[name][2](*values))
    except ZeroDivisionError:
        raise FormatError(f"division by zero in {show(expr)}") from None
    if not -LIMIT < value < LIMIT:
        raise FormatError(f"{show(expr)} leaves the range of 62 bits")
    return value


def validate(expr: Any, symbols: Collection[str]) -> Expr:
    """Check the form of `expr` and return it.

    Raises:
        FormatError: unknown operator or symbol, wrong number of operands, more than `MAX_NODES` nodes.
    """
    nodes = 0
    stack = [(expr, 0)]
    while stack:
        node, depth = stack.pop()
        nodes += 1
        if nodes > MAX_NODES or depth > 64:
            raise FormatError(f"expression too large (more than {MAX_NODES} nodes or 64 levels)")
        if isinstance(node, bool) or not isinstance(node, (int, str, list)):
            raise FormatError(f"{node!r} is no integer, symbol or [operator, …]")
        if isinstance(node, str) and node not in symbols:
            raise FormatError(f"unknown symbol {node!r}; known: {', '.join(sorted(symbols))}")
        if isinstance(node, int) and not -LIMIT < node < LIMIT:
            raise FormatError(f"{node} leaves the range of 62 bits")
        if isinstance(node, list):
            if not node or not isinstance(node[0], str) or node[0] not in OPS:
                raise FormatError(f"{node[:1]} is no operator; known: {' '.join(OPS)}")
            least, most, _ = OPS[node[0]]
            count = len(node) - 1
            if count < least or (most is not None and count > most):
                raise FormatError(f"operator {node[0]!r} does not take {count} operands")
            stack += [(operand, depth + 1) for operand in node[1:]]
    return expr


def fold(name: str, *operands: Expr) -> Expr:
    """``[name, *operands]``, evaluated where every operand is a constant, and without neutral elements."""
    if all(isinstance(operand, int) for operand in operands):
        return evaluate([name, *operands], {})
    neutral = {"+": 0, "*": 1}.get(name)
    if neutral is not None:
        if name == "*" and 0 in operands:
            return 0
        kept = [operand for operand in operands if isinstance(operand, bool) or operand != neutral]
        return kept[0] if len(kept) == 1 else [name, *kept]
    if name in ("//", "ceildiv", "align") and operands[1] == 1:
        return operands[0]
    return [name, *operands]


def symbols_of(expr: Expr) -> set[str]:
    """The symbols that `expr` reads."""
    if isinstance(expr, str):
        return {expr}
    if isinstance(expr, list):
        return set().union(*(symbols_of(operand) for operand in expr[1:]))
    return set()


def show(expr: Expr) -> str:
    """`expr` as people write it: ``ceildiv(m, 128) * 2``."""
    if not isinstance(expr, list):
        return str(expr)
    name, *operands = expr
    if name in ("ceildiv", "align", "min", "max", "select"):
        return f"{name}({', '.join(map(show, operands))})"
    if name == "not":
        return f"not {_wrap(operands[0])}"
    return f" {name} ".join(map(_wrap, operands))


def _wrap(expr: Expr) -> str:
    infix = isinstance(expr, list) and expr[0] not in ("ceildiv", "align", "min", "max", "select")
    return f"({show(expr)})" if infix else show(expr)
