"""What the MoE routing families share: random routings, and the reference of sorting pairs by expert.

A pair is one (token, slot) of a routing table ``topk_ids [tokens, topk]``; its number is ``token · topk + slot``. A
token may name an expert twice; a pair whose id is outside of ``0..experts - 1`` is absent: it goes nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kgen.compiler.ops.contract import Config, Operator, edges
from kgen.runtime.format.expr import Expr, fold

KINDS = ("uniform", "one_expert", "skewed", "absent", "wild")
MAX_EXPERTS = 1024  # a thread each
MAX_TOPK = 16
MAX_PAIRS = 1 << 20


class Sorted(NamedTuple):
    """Pairs by expert.

    Attributes:
        pairs: numbers of the pairs that are not absent, by expert and then by number.
        counts: pairs of each expert, ``[experts]``.
    """

    pairs: np.ndarray
    counts: np.ndarray

    @property
    def offsets(self) -> np.ndarray:
        """Where each expert's pairs start, and where the last one's end, ``[experts + 1]``."""
        return np.concatenate([[0], np.cumsum(self.counts)])


def problems(op: Operator) -> Iterator[tuple[tuple[str, ...], str]]:
    """What is wrong with the dims of an operator over pairs."""
    tokens, topk, experts = op.dims["tokens"][1], op.static("topk"), op.dims.get("experts", (0, 0))[1]
    if experts > MAX_EXPERTS:
        yield ("dims", "experts"), f"{experts} is more than {MAX_EXPERTS}"
    if topk > MAX_TOPK:
        yield ("dims", "topk"), f"{topk} is more than {MAX_TOPK}"
    if tokens * topk > MAX_PAIRS:
        yield ("dims", "tokens"), f"tokens · topk must be at most {MAX_PAIRS}: at most {MAX_PAIRS // topk} tokens"


def bad_factor(factor: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """The problem of a `scaling_factor` that is no number."""
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?(e-?[0-9]+)?", factor):
        yield ("scaling_factor",), f'{factor!r} is no number in quotes, such as "2.5"'


def few_tokens(op: Operator, most: int) -> Expr:
    """A guard: at most `most` tokens. 1 or 0 where that is always or never so."""
    least, top = op.dims["tokens"]
    return 1 if top <= most else 0 if least > most else fold("<=", "tokens", most)


def many_tokens(op: Operator, least: int) -> Expr:
    """A guard: at least `least` tokens. 1 or 0 where that is always or never so."""
    bottom, top = op.dims["tokens"]
    return 1 if bottom >= least else 0 if top < least else fold(">=", "tokens", least)


def stages(op: Operator, *steps: tuple[int | None, Config]) -> list[tuple[Expr, Config]]:
    """A dispatch by the number of tokens: each config up to its number, the last, whose number is None, beyond."""
    guarded = [(1 if most is None else few_tokens(op, most), config) for most, config in steps]
    found = [(guard, config) for guard, config in guarded if guard != 0]
    always = next(i for i, (guard, _) in enumerate(found) if guard == 1)
    return found[: always + 1]


def sort(ids: np.ndarray, experts: int) -> Sorted:
    """The pairs of a routing table by expert."""
    flat = ids.reshape(-1)
    present = np.flatnonzero((flat >= 0) & (flat < experts))
    order = np.argsort(flat[present], kind="stable")
    return Sorted(present[order], np.bincount(flat[present], minlength=experts))


def random_ids(rng: np.random.Generator, kind: str, shape: tuple[int, int], experts: int) -> np.ndarray:
    """A random routing table, int32.

    uniform: any expert, with repeats in a token. one_expert: every pair to the same. skewed: nine of ten pairs to three
    experts, some absent. absent: ids outside of 0..experts - 1 alone. wild: any int32, some of them in range.
    """
    if kind == "uniform":
        return rng.integers(0, experts, shape, np.int32)
    if kind == "one_expert":
        return np.full(shape, rng.integers(0, experts), np.int32)
    anything = rng.integers(-(1 << 31), 1 << 31, shape, np.int64)
    edge = rng.choice([-1, experts, -(1 << 31), (1 << 31) - 1], shape)
    anything = np.where(rng.random(shape) < 0.5, anything, edge)
    absent = np.where((anything >= 0) & (anything < experts), -1, anything)
    spread = rng.integers(0, experts, shape)
    if kind == "skewed":
        few = rng.choice(rng.integers(0, experts, 3), shape)
        turn = rng.random(shape)
        return np.select([turn < 0.9, turn < 0.95], [few, spread], absent).astype(np.int32)
    if kind == "absent":
        return absent.astype(np.int32)
    assert kind == "wild", kind
    return np.where(rng.random(shape) < 0.5, anything, spread).astype(np.int32)


def token_edges(tokens: tuple[int, int], elements: int) -> list[dict[str, int]]:
    """Numbers of tokens at which kernels tend to be wrong, as far as `elements` a token stay within 64 Mi."""
    least, most = tokens
    sizes = edges(least, most, 2, 32, 1024)
    return [] if least == most else [{"tokens": size} for size in sizes if size * elements <= 1 << 26]
