"""Python functions on numpy arrays in place of kernels: a right one and wrong ones, for the fake driver."""

from __future__ import annotations

import ctypes
from itertools import count
from typing import Any

import numpy as np
import products
from click.testing import CliRunner, Result

from kgen.build.cli import main

N, K = products.N, products.K
TURN = count()


def memory(address: int, *shape: int) -> np.ndarray:
    """Device memory as float16, writable."""
    nbytes = 2 * int(np.prod(shape))
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), np.float16).reshape(shape)


def product(a, b):
    return (a.astype(np.float32) @ b.astype(np.float32).T).astype(np.float16)


def right(a, b, out):
    out[...] = product(a, b)


def off_by_one_row(a, b, out):
    out[...] = np.roll(product(a, b), 1, axis=0)


def wrong_scale(a, b, out):
    out[...] = product(a, b) * np.float16(1.03)


def unwritten_tail(a, b, out):
    whole = len(a) // 16 * 16
    out[:whole] = product(a, b)[:whole]


def race(a, b, out):
    right(a, b, out)
    toward = np.float16(100 if next(TURN) % 2 else -100)
    out[-1, 5] = np.nextafter(out[-1, 5], toward)  # each as right as rounding may be, but never the same twice


def out_of_bounds(a, b, out):
    right(a, b, out)
    memory(out.ctypes.data + out.nbytes, 8)[:] = 0


def changes_input(a, b, out):
    right(a, b, out)
    a[0, 2] = 7


STAND_INS = {
    kernel.__name__: kernel
    for kernel in (right, off_by_one_row, wrong_scale, unwritten_tail, race, out_of_bounds, changes_input)
}


def verify(*args: Any) -> Result:
    """``kgen verify``."""
    return CliRunner().invoke(main, ["verify", *map(str, args)])
