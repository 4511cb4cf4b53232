"""`kgen verify` on the kernels of the shipped specs, run on the CPU by tests/host. Needs g++ and the compiler.

One operator of each kind; KGEN_HOST_ALL=1 takes every operator, which from empty caches is some five minutes.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import host
import numpy as np
import pytest

pytest.importorskip("tilelang", reason="the compiler's dependencies are not installed: pip install 'kgen[compiler]'")

from kgen.build import arena, pipeline
from kgen.build.cache import Cache, default_root
from kgen.build.publish import publish
from kgen.build.records import Records
from kgen.build.verify import Point, verify
from kgen.compiler import spec
from kgen.compiler.ops.contract import Operator
from kgen.runtime import Bundle

pytestmark = pytest.mark.skipif(not host.compiler(), reason="needs g++")

SPECS = Path(__file__).parents[2] / "specs"
SIZES = (1, 5, 33)  # rows or tokens
CHOSEN = {
    "quantize": (
        "fp8_channel_float32_k128", "fp8_block128_float16_k4099", "fp8_group128_rows_bfloat16_k7168",
        "fp8_group128_ue8m0_columns_bfloat16_k7168", "fp8_silu_and_mul_row_bfloat16_k2048",
        "fp8_silu_and_mul_ue8m0_row_bfloat16_k2048", "fp8_ue8m0_row_bfloat16_k4096",
        "fp8_rms_norm_group128_columns_bfloat16_k7168", "fp8_rms_norm_given_float16_k4096",
        "int8_given_bfloat16_k4096", "int8_channel_float16_k4099", "int8_tensor_float16_k4099",
        "int8_group128_float16_k4099", "smooth_int8_channel_bfloat16_k2880", "smooth_int8_channel_float16_k4099",
        "int4_group64_float16_k4096", "int4_group4096_float16_k4096",
    ),
    "dequantize": (
        "fp8_block128_bfloat16_k7168", "int4_group128_float16_k4096", "int8_channel_float16_k4099",
        "int8_tensor_float32_k4099",
    ),
    "moe_routing": (
        "topk_softmax_e128", "topk_sigmoid_e384", "topk_deepseek_v3_bfloat16", "topk_kimi_k2_float32",
        "topk_qwen3_float32", "align_e384_block64", "align_e256_block16", "permute_e128_h3072",
        "permute_e128_ep2_h7168", "permute_e256_h7168_fp8", "unpermute_h3072", "unpermute_h7168_shared",
    ),
}  # fmt: skip
MORE = {"moe_align": (300, 2100), "moe_permute": (600,)}  # where another variant runs
OUT_OF_SCOPE = {"gemm": "wgmma and tensor maps"}  # families, and what the translator lacks for them


@cache
def operators(name: str) -> tuple[Operator, ...]:
    every = os.environ.get("KGEN_HOST_ALL") == "1"
    loaded = [op for op in spec.load(SPECS / f"{name}.yaml").operators if op.family() not in OUT_OF_SCOPE]
    return tuple(op for op in loaded if every or op.name in CHOSEN[name])


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The operators of a spec, loaded on the host driver."""
    opened = []
    code = default_root() / "host"
    code.mkdir(parents=True, exist_ok=True)
    records = Records.load(SPECS / "records")

    @cache
    def load(name: str):
        chosen = replace(spec.load(SPECS / f"{name}.yaml"), operators=operators(name))
        built = pipeline.build(chosen, Cache(default_root()), jobs=os.cpu_count() or 1, records=records)
        path = tmp_path_factory.mktemp("shipped") / f"{name}.kgen"
        publish(built.files, path)
        bundle = Bundle.open(path)
        texts = {bytes(bundle.blob(kernel.ptx)).decode() for kernel in bundle.manifest.kernels.values()}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda text: host.build(text, code), sorted(texts, key=len, reverse=True)))
        opened.append(bundle.load(driver=host.HostDriver(bundle, code, guard=arena.GUARD)))
        return opened[-1]

    yield load
    for each in opened:
        each.close()


@pytest.mark.parametrize(
    ("name", "operator"),
    [pytest.param(name, op, id=f"{name}-{op.name}") for name in CHOSEN for op in operators(name)],
)
def test_an_operator_does_what_its_contract_says(kernels, name, operator):
    (dim,) = (dim for dim, (least, most) in operator.dims.items() if least < most)
    sizes = [*SIZES, *MORE.get(operator.family(), ())]
    todo = [Point(operator, None, {dim: size}, kind) for size in sizes for kind in operator.input_kinds]
    with np.errstate(all="ignore"):
        cases = list(verify(kernels(name), todo, 1))
    assert len(cases) == len(sizes) * len(operator.input_kinds)
    assert {str(case.point): case.failures for case in cases if case.failures} == {}


def test_every_chosen_operator_is_shipped():
    for name, chosen in CHOSEN.items():
        assert {*chosen} <= {op.name for op in operators(name)}
