"""Fixtures: stand-ins for kernels on the fake driver."""

from __future__ import annotations

from typing import Any

import products
import pytest
from products import K, N
from stand_ins import STAND_INS, memory


@pytest.fixture
def device(fake):
    """Runs a launch as the stand-in of its entry's name. Tests may change the stand-ins."""
    stand_ins = dict(STAND_INS)

    def launch(call: dict[str, Any]) -> None:
        a, b, out, rows = (int.from_bytes(param, "little") for param in call["params"])
        stand_ins[call["entry"]](memory(a, rows, K), memory(b, N, K), memory(out, rows, N))

    for name in stand_ins:
        fake.register(name, [8, 8, 8, 4])
    fake.on_launch(launch)
    return stand_ins


@pytest.fixture
def bundle(tmp_path):
    """A bundle with an operator for each stand-in."""
    return products.write(tmp_path / "made by hand.kgen", map(products.contract, STAND_INS))
