"""The contracts' own arithmetic: references against plain loops, and checks that catch what they should."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from offers import check_offers

from kgen.compiler import ops
from kgen.compiler.ops import gemm, numerics, quantize, scaling
from kgen.runtime.format.expr import evaluate


def make_gemm(major="k", dtype="bfloat16"):
    return gemm.Gemm(
        name="g",
        dims={"m": (1, 300), "n": (64, 64), "k": (128, 128)},
        workloads={},
        a=gemm.A(dtype=dtype),
        b=gemm.B(dtype=dtype, major=major),
        out=gemm.Out(dtype=dtype),
    )


def make_quantize(dtype="float32", k=37):
    return quantize.Quantize(
        name="q",
        dims={"m": (1, 300), "k": (k, k)},
        workloads={},
        x=quantize.X(dtype=dtype),
        q=quantize.Q(dtype="int8", scale="channel"),
    )


def test_families_are_found_by_their_modules():
    assert (
        ops.names() == ["dequantize", "gemm", "moe_align", "moe_permute", "moe_topk", "moe_unpermute", "quantize"]
        and ops.family("gemm") is gemm.Gemm
    )
    with pytest.raises(KeyError):
        ops.family("numerics")


@pytest.mark.parametrize("major", ["k", "n"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", gemm.Gemm.input_kinds)
def test_a_right_product_passes(major, dtype, kind):
    contract, rng = make_gemm(major, dtype), np.random.default_rng(1)
    inputs = contract.inputs({"m": 77}, rng, kind)
    b = inputs["b"].T if major == "k" else inputs["b"]
    exact = inputs["a"].astype(np.float64) @ b.astype(np.float64)
    checks = contract.check({"m": 77}, inputs, {"out": exact.astype(inputs["a"].dtype)}, rng)
    assert all(check.ok for check in checks), checks


@pytest.mark.parametrize(
    "damage",
    [
        lambda out: out.__setitem__((5, 7), 0),
        lambda out: out.__setitem__((5, 7), np.nan),
        lambda out: out.__setitem__(slice(None), np.roll(out, 1, axis=0)),
        lambda out: out.__setitem__(slice(None), out * ml_dtypes.bfloat16(1.03)),
        lambda out: out.__setitem__((-1, slice(None)), out[-2]),
        lambda out: out.__setitem__((slice(None), slice(48, 64)), 0),
    ],
    ids=["an element", "a NaN", "rows off by one", "a wrong scale", "the last row", "an unwritten tail"],
)
def test_a_wrong_product_is_caught(damage):
    contract, rng = make_gemm(), np.random.default_rng(2)
    for _ in range(5):
        inputs = contract.inputs({"m": 300}, rng, "normal")
        out = (inputs["a"].astype(np.float64) @ inputs["b"].T.astype(np.float64)).astype(ml_dtypes.bfloat16)
        damage(out)
        assert not all(check.ok for check in contract.check({"m": 300}, inputs, {"out": out}, rng))


def test_ties_really_tie():
    x = numerics.random(np.random.default_rng(5), "ties", (64, 128), "float32")
    quotients = x / (np.max(np.abs(x), axis=1, keepdims=True) / np.float32(127))
    assert np.mean(np.abs(quotients - np.trunc(quotients)) == 0.5) > 0.3


def test_contracts_survive_the_manifest():
    from kgen.runtime.format.manifest import Operator

    for contract in (make_gemm("n", "float16"), make_quantize()):
        op = type(contract).__module__.rpartition(".")[2]
        stored = Operator("g", op, 1, contract.dims, contract.attrs(), contract.tensors(), (), {})
        rebuilt = ops.family(op).from_manifest(stored._replace(name=contract.name))
        assert rebuilt == contract and rebuilt.digest() == contract.digest()


def test_a_digest_is_about_what_is_computed():
    contract = make_gemm()
    assert re.fullmatch("[0-9a-f]{16}", contract.digest())
    assert replace(contract, name="other", workloads={"w": {"m": 5}}).digest() == contract.digest()
    others = [make_gemm("n"), make_gemm(dtype="float16"), replace(contract, dims={**contract.dims, "m": (1, 301)})]
    digests = {c.digest() for c in (contract, *others, make_quantize(), make_quantize("float16"), make_quantize(k=38))}
    assert len(digests) == 7


def test_traffic():
    assert make_gemm().traffic({"m": 3}) == (2 * 128 * (3 + 64), 2 * 3 * 64)
    traffic = make_quantize("float16", k=37).traffic({"m": 10})
    assert traffic == (2 * 370, 370 + 40) and traffic.total == 1150

    class InPlace(quantize.Quantize):
        def tensors(self):
            return (self.tensor("x", "inout", "float32", "m", 8),)

    contract = InPlace(**{field: getattr(make_quantize(), field) for field in ("name", "dims", "workloads", "x", "q")})
    assert contract.traffic({"m": 2}) == (64, 64)


def test_what_the_shipped_specs_offer():
    pytest.importorskip("pydantic")
    from kgen.compiler.spec import load

    for path in sorted((Path(__file__).parents[2] / "specs").glob("*.yaml")):
        for contract in load(path).operators:
            check_offers(contract)


@pytest.mark.parametrize("n", [8, 64, 136, 192, 200, 1100, 4096])
def test_what_gemm_offers(n):
    contract = replace(make_gemm(), dims={"m": (1, 2000), "n": (n, n), "k": (128, 128)})
    check_offers(contract)
    configs = [config for _, config in contract.candidates()]
    assert all(config["tile_n"] < max(n, 65) + 64 for config in configs)
    small = [config for guard, config in contract.candidates() if evaluate(guard, {"m": 512})]
    assert {config["raster"] for config in small} == {8}, "four row tiles: no other order of walking them"


@pytest.mark.parametrize(
    ("scale", "shape", "strides"),
    [
        ("tensor", (1,), (1,)),
        ("channel", ("m",), (1,)),
        (scaling.Group(group=128), ("m", 33), (33, 1)),
        (scaling.Group(group=128, major="column", dtype="float8_e8m0fnu"), ("m", 33), (1, ["align", "m", 16])),
        (scaling.Block(block=(128, 128)), (["ceildiv", "m", 128], 33), (33, 1)),
        (
            scaling.Block(block=(128, 128), major="column"),
            (["ceildiv", "m", 128], 33),
            (1, ["align", ["ceildiv", "m", 128], 4]),
        ),
    ],
)
def test_scales(scale, shape, strides):
    """k = 4,099: the last group holds 3 columns."""
    tensor = scaling.scale_tensor("scale", "out", scale, "m", 4099)
    assert (tensor.shape, tensor.strides) == (shape, strides)
    assert tensor.dtype == getattr(scale, "dtype", "float32")
