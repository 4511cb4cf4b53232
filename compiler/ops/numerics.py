"""Shared arithmetic of the contracts: random inputs, element types in numpy, comparisons with float64."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kgen.compiler.ops.contract import Check, Dims
from kgen.runtime.format import expr
from kgen.runtime.format.dtypes import DTYPES
from kgen.runtime.format.manifest import Tensor

# Relative Frobenius error allowed for a product that is accumulated in float32 and rounded once.
PRODUCT_LIMIT = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 1e-6}
EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}  # half an ulp of 1


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of a kgen dtype; ml_dtypes supplies those that numpy lacks."""
    if name.startswith(("bfloat", "float8")):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def itemsize(dtype: str) -> int:
    """Bytes of an element."""
    return DTYPES[dtype].bytes


def shape(tensor: Tensor, dims: Dims) -> tuple[int, ...]:
    """The tensor's shape at `dims`."""
    return tuple(expr.evaluate(extent, dims) for extent in tensor.shape)


def random(rng: np.random.Generator, kind: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Random values of a kind.

    normal: N(0, 1). integers: in -2..2. heavy: Student t with 2 degrees of freedom. subnormal: near the smallest
    normal of float32 (or of the dtype). ties: multiples of half a step below an exact power of two, so that quotients
    land on .5. zeros: some rows all zero, signed. infinities, special: normal with infinities (and NaN) strewn in.
    """
    target = numpy_dtype(dtype)
    if kind == "zeros":
        x = rng.standard_normal(shape, dtype=np.float32)
        x[:: 2 if shape[0] > 1 else 1] = np.float32(-0.0)
        return x.astype(target)
    if kind == "integers":
        return rng.integers(-2, 3, shape).astype(target)
    if kind == "ties":
        x = rng.integers(-254, 255, shape).astype(np.float32) / 2
        x[..., -1] = 127
        return x.astype(target)
    x = rng.standard_normal(shape, dtype=np.float32)
    if kind == "heavy":
        x /= np.sqrt(rng.chisquare(2, shape).astype(np.float32) / 2)
    elif kind == "subnormal":
        x *= np.float32(6e-8 if dtype == "float16" else 1e-38)
    elif kind in ("infinities", "special"):
        flat, strewn = x.reshape(-1), [np.inf, -np.inf, np.nan]
        at = rng.integers(0, flat.size, max(3, flat.size // 5000))
        flat[at] = rng.choice(np.array(strewn[: 2 if kind == "infinities" else 3], np.float32), at.size)
    elif kind != "normal":
        raise ValueError(f"unknown kind of input {kind!r}")
    with np.errstate(over="ignore"):
        return x.astype(target)


def check_equal(output: str, got: np.ndarray, expected: np.ndarray) -> Check:
    """Every element equal, NaN equal to NaN; the error is the number of elements that differ."""
    same = (got == expected) | ((got != got) & (expected != expected))
    wrong = int(same.size - np.count_nonzero(same))
    worst = tuple(int(i) for i in np.unravel_index(np.argmin(same), same.shape)) if wrong else ()
    return Check(output, "elements that differ", wrong, 0, worst, *_pair(got, expected, worst))


def by_rows(function: Callable[[slice], tuple[np.ndarray, ...]], rows: int, step: int = 1) -> list[np.ndarray]:
    """`function` over slices of `rows` rows in threads, its results concatenated; slices are multiples of `step`."""
    workers = os.cpu_count() or 1
    size = max(step, -(-rows // (4 * workers * step)) * step)
    slices = [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
    with ThreadPoolExecutor(workers) as pool:
        return [np.concatenate(parts) for parts in zip(*pool.map(function, slices), strict=True)]


def check_none(output: str, measure: str, wrong: np.ndarray) -> Check:
    """No element of `wrong` is true; `measure` says what it would be."""
    at = tuple(int(i) for i in np.unravel_index(np.argmax(wrong), wrong.shape)) if wrong.any() else ()
    return Check(output, measure, int(np.count_nonzero(wrong)), 0, at)


def check_close(
    output: str, got: np.ndarray, expected: np.ndarray, limit: float, floor: float = float(np.finfo(np.float32).tiny)
) -> Check:
    """Every element within `limit` of the expected one, relatively; equal infinities and NaN are close.

    Args:
        floor: the least magnitude that errors are relative to.
    """
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    with np.errstate(all="ignore"):
        off = np.abs(got - expected) / np.maximum(np.abs(expected), floor)
    off[(got == expected) | ((got != got) & (expected != expected))] = 0
    at = tuple(int(i) for i in np.unravel_index(np.argmax(np.where(np.isnan(off), np.inf, off)), off.shape))
    return Check(output, "relative error", float(off[at]), limit, at, float(got[at]), float(expected[at]))


def check_codes(output: str, got: np.ndarray, expected: np.ndarray, limit: float = 1.0) -> list[Check]:
    """Codes (int8 or e4m3) are the expected ones or next to them, and at most the share `limit` is not equal."""
    steps = []
    for codes in (got, expected):
        bits = codes.view(np.uint8).astype(np.int16)
        if codes.dtype == np.int8:
            bits = codes.astype(np.int16)
        else:  # the largest number has 126, and NaN has 127 and a sign
            bits = np.where((bits & 0x7F) == 0x7F, 1000, np.where(bits & 0x80, -(bits & 0x7F), bits))
        steps.append(bits)
    apart = np.abs(steps[0] - steps[1])
    far, share = int((apart > 1).sum()), float((apart > 0).mean())
    worst = tuple(int(i) for i in np.unravel_index(np.argmax(apart), apart.shape)) if apart.any() else ()
    pair = _pair(got, expected, worst)
    return [
        Check(output, "codes further off than a neighbour", far, 0, worst, *pair),
        Check(output, "share of codes that differ", share, limit, worst, *pair),
    ]


def check_product(
    output: str, a: np.ndarray, b: np.ndarray, got: np.ndarray, dtype: str, rng: np.random.Generator, rows: int = 32
) -> list[Check]:
    """Check ``got [m, n] = a [m, k] · b [k, n]``: some rows in float64, and the whole by Freivalds' test.

    Rows: relative Frobenius error, and the largest error in units of the row's root mean square times the dtype's
    half ulp. Freivalds (1977): ``got · r`` against ``a · (b · r)`` for random signs r. Rounding alone moves a row's sum
    by a random walk of its elements' half ulps, so a row further off than eight of its deviations has a wrong element.
    """
    m = got.shape[0]
    picked = np.sort(rng.choice(m, min(rows, m), replace=False))
    exact = a[picked].astype(np.float64) @ b.astype(np.float64)
    some = got[picked].astype(np.float64)
    norm = np.linalg.norm(exact)
    frobenius = float(np.linalg.norm(some - exact) / norm) if norm else float(np.linalg.norm(some))
    rms = np.sqrt(np.mean(exact**2, axis=1, keepdims=True)) + 1e-30
    off = np.abs(some - exact) / (np.maximum(np.abs(exact), rms) * EPSILON[dtype])
    at = tuple(int(i) for i in np.unravel_index(np.argmax(np.where(np.isnan(off), np.inf, off)), off.shape))
    worst = (int(picked[at[0]]), at[1])

    signs = rng.choice(np.array([-1.0, 1.0]), got.shape[1])
    full = got.astype(np.float64)
    residual = np.abs(full @ signs - a.astype(np.float64) @ (b.astype(np.float64) @ signs))
    spread = np.linalg.norm(full, axis=1) * EPSILON[dtype] / np.sqrt(3) + 1e-30
    freivalds = residual / spread
    row = int(np.argmax(np.where(np.isnan(freivalds), np.inf, freivalds)))
    return [
        Check(output, "relative Frobenius error of sampled rows", frobenius, PRODUCT_LIMIT[dtype]),
        Check(
            output, "half ulps of the row's magnitude", float(off[at]), 4.0, worst, float(some[at]), float(exact[at])
        ),
        Check(output, "Freivalds residual in deviations", float(freivalds[row]), 8.0, (row,)),
    ]


def _pair(got: np.ndarray, expected: np.ndarray, index: tuple[int, ...]) -> tuple[float, float]:
    return (float(got[index]), float(expected[index])) if index else (0.0, 0.0)
