"""The adapters of tests/perf/peers as far as they go without a GPU, and fetch.py on made-up wheels."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from perf import fetch

from kgen.build import peers
from kgen.compiler import ops
from kgen.compiler.ops import dequantize, gemm, quantize, scaling

FOLDER = Path(__file__).parents[1] / "perf" / "peers"
ADAPTERS = {module.__name__.removeprefix("kgen_peers_"): module for module in peers.load(FOLDER)}
GEMMS = {"torch_eager", "triton_matmul", "deepgemm", "vllm_cuda"}
QUANTIZERS = {"torch_compile", "vllm_cuda", "vllm_triton", "deepspeed"}
ROUTERS = {"vllm_moe", "sglang"}
FETCHED = {
    "deepgemm": "deep_gemm",
    "deepspeed": "deepspeed-0.19.8/csrc/quantization/quantize.cu",
    "vllm_cuda": "vllm/_C_stable_libtorch.abi3.so",
    "vllm_moe": "vllm/_moe_C_stable_libtorch.abi3.so",
    "sglang": "sgl_kernel/sm90/common_ops.abi3.so",
    "vllm_triton": "vllm/model_executor/layers/quantization/utils/int8_utils.py",
}


def make_gemm(m=33, n=72, k=136, dtype="bfloat16", major="k"):
    return gemm.Gemm(
        name="g",
        dims={"m": (m, m), "n": (n, n), "k": (k, k)},
        workloads={},
        a=gemm.A(dtype=dtype),
        b=gemm.B(dtype=dtype, major=major),
        out=gemm.Out(dtype=dtype),
    )


def make_quantize(dtype="bfloat16", k=100):
    return quantize.Quantize(
        name="q",
        dims={"m": (40, 40), "k": (k, k)},
        workloads={},
        x=quantize.X(dtype=dtype),
        q=quantize.Q(dtype="int8", scale="channel"),
    )


def contract_of(adapter):
    """A contract that the adapter can race."""
    if adapter == "deepspeed":
        return replace(make_quantize("float16", 64), q=quantize.Q(dtype="int4", scale=scaling.Group(group=32)))
    if adapter in QUANTIZERS:
        return make_quantize()
    if adapter in ROUTERS:
        return make_routing("moe_align")
    return make_gemm()


def torch_tensors(contract, inputs):
    """The contract's tensors on the CPU; outputs are empty."""
    torch = pytest.importorskip("torch")
    views = {}
    for tensor in contract.tensors():
        if tensor.name in inputs:
            raw = torch.from_numpy(inputs[tensor.name].copy().view(np.uint8))
            views[tensor.name] = raw.view(getattr(torch, tensor.dtype))
        else:
            views[tensor.name] = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
    return views


def failures(contract, inputs, outputs):
    """What the contract's check says against a peer's outputs."""
    dtypes = {tensor.name: tensor.dtype for tensor in contract.tensors()}
    arrays = {name: peers.to_numpy(value, dtypes[name]) for name, value in outputs.items()}
    checks = contract.check({}, inputs, arrays, np.random.default_rng(1))
    return [check for check in checks if not check.ok]


def test_adapters_import_neither_torch_nor_triton():
    code = (
        "import sys; from pathlib import Path; from kgen.build import peers\n"
        "sys.modules |= {'torch': None, 'triton': None}\n"
        "print(len(peers.load(Path(sys.argv[1]))))"
    )
    run = subprocess.run([sys.executable, "-c", code, str(FOLDER)], capture_output=True, text=True)
    assert run.stdout.strip() == str(len(ADAPTERS)), run.stderr


def test_every_adapter_is_tested():
    assert set(ADAPTERS) == GEMMS | QUANTIZERS | ROUTERS


@pytest.mark.parametrize("adapter", sorted((GEMMS ^ QUANTIZERS) | ROUTERS))
def test_nothing_for_other_families(adapter):
    foreign = make_gemm() if adapter in QUANTIZERS else make_quantize()
    assert list(ADAPTERS[adapter].peers(foreign, foreign.full_dims({}), {})) == []


@pytest.mark.parametrize("adapter", sorted(FETCHED))
def test_missing_files_are_named(adapter, monkeypatch, tmp_path):
    contract = contract_of(adapter)
    monkeypatch.delenv("KGEN_PEERS", raising=False)
    with pytest.raises(peers.Unavailable, match="KGEN_PEERS names no folder"):
        next(ADAPTERS[adapter].peers(contract, contract.full_dims({}), {}))
    monkeypatch.setenv("KGEN_PEERS", str(tmp_path))
    with pytest.raises(peers.Unavailable) as raised:
        next(ADAPTERS[adapter].peers(contract, contract.full_dims({}), {}))
    assert FETCHED[adapter] in str(raised.value) and str(tmp_path) in str(raised.value)


def test_deepgemm_takes_bfloat16_only():
    contract = make_gemm(dtype="float16")
    assert list(ADAPTERS["deepgemm"].peers(contract, contract.full_dims({}), {})) == []


@pytest.mark.parametrize(
    ("contract", "races"),
    [
        (make_gemm(16, 2112, 7168), True),
        (make_gemm(17, 2112, 7168), False),
        (make_gemm(16, 2112, 7168, major="n"), False),
        (make_gemm(16, 2112, 7168, dtype="float16"), False),
        (make_gemm(16, 4096, 7168), False),
    ],
    ids=["compiled", "too many rows", "n-major", "float16", "another n"],
)
def test_vllm_races_the_one_product_it_compiled(contract, races, monkeypatch):
    monkeypatch.delenv("KGEN_PEERS", raising=False)
    found = ADAPTERS["vllm_cuda"].peers(contract, contract.full_dims({}), {})
    if races:
        with pytest.raises(peers.Unavailable):
            next(found)
    else:
        assert list(found) == []


@pytest.mark.parametrize("major", ["k", "n"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_cublas_computes_the_contract(dtype, major):
    contract = make_gemm(dtype=dtype, major=major)
    inputs = contract.inputs({}, np.random.default_rng(0), "normal")
    tensors = torch_tensors(contract, inputs)
    tensors["out"].fill_(7)
    (peer,) = ADAPTERS["torch_eager"].peers(contract, contract.full_dims({}), tensors)
    peer.call()
    assert peer.name == "cublas" and not failures(contract, inputs, peer.outputs())
    assert (tensors["out"] == 7).all(), "the peer wrote kgen's own output"


@pytest.fixture
def eager(monkeypatch):
    """torch.compile gives back what inductor is given."""
    monkeypatch.setattr(pytest.importorskip("torch"), "compile", lambda function, **_: function)


def compiled(contract, kind):
    """What the contract says against torch-compile's outputs."""
    inputs = contract.inputs({}, np.random.default_rng(0), kind)
    (peer,) = ADAPTERS["torch_compile"].peers(contract, contract.full_dims({}), torch_tensors(contract, inputs))
    peer.call()
    return failures(contract, inputs, peer.outputs())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", quantize.Quantize.input_kinds)
def test_torch_compile_compiles_the_contract(dtype, kind, eager):
    assert not compiled(make_quantize(dtype), kind)


@pytest.mark.parametrize(
    "fields",
    [
        {"smooth": quantize.Smooth()},
        {"q": quantize.Q(dtype="float8_e4m3fn", scale="channel", amax_floor="1e-4")},
        {"q": quantize.Q(dtype="float8_e4m3fn", scale=scaling.Block(block=(128, 128)))},
    ],
    ids=["smooth", "floor", "block"],
)
def test_torch_compile_compiles_other_quantizations(fields, eager):
    assert not compiled(replace(make_quantize(), **fields), "normal")


@pytest.mark.parametrize(
    "scale",
    ["tensor", "channel", scaling.Group(group=32), scaling.Group(group=50), scaling.Block(block=(32, 16))],
    ids=["tensor", "channel", "ragged groups", "groups", "ragged blocks"],
)
def test_torch_compile_compiles_dequantize(scale, eager):
    contract = dequantize.Dequantize(
        name="d",
        dims={"m": (40, 40), "k": (100, 100)},
        workloads={},
        q=dequantize.Q(dtype="int8", scale=scale),
        x=dequantize.X(dtype="bfloat16"),
    )
    assert not compiled(contract, "special")


@pytest.mark.parametrize(
    ("fields", "called"),
    [
        ({}, ["dynamic_scaled_int8_quant"]),
        ({"smooth": quantize.Smooth()}, ["dynamic_scaled_int8_quant"]),
        ({"scale": "tensor"}, ["static_scaled_int8_quant"]),
        ({"scale": scaling.Group(group=50)}, ["per_token_group_quant_int8"]),
        ({"scale": scaling.Group(group=64)}, []),
        ({"scale": "tensor", "given": True}, ["static_scaled_int8_quant"]),
        ({"dtype": "float8_e4m3fn", "scale": "tensor", "given": True}, ["static_scaled_fp8_quant"]),
        ({"scale": scaling.Block(block=(128, 128))}, []),
        ({"dtype": "float8_e4m3fn"}, ["per_token_group_fp8_quant", "dynamic_per_token_scaled_fp8_quant"]),
        ({"dtype": "float8_e4m3fn", "scale": scaling.Group(group=50)}, ["per_token_group_fp8_quant"]),
        ({"dtype": "float8_e4m3fn", "scale": scaling.Group(group=50, dtype="float8_e8m0fnu")}, []),
        ({"before": "silu_and_mul", "scale": scaling.Group(group=20)}, ["silu_and_mul_per_block_quant"]),
        (
            {"before": "silu_and_mul", "scale": scaling.Group(group=20, major="column")},
            ["silu_and_mul_per_block_quant"],
        ),
        ({"before": "silu_and_mul"}, []),
        (
            {"before": "silu_and_mul", "dtype": "float8_e4m3fn", "scale": "tensor", "given": True},
            ["silu_and_mul_quant"],
        ),
        ({"before": "rms_norm", "scale": scaling.Group(group=20)}, ["rms_norm_per_block_quant"]),
        ({"before": "rms_norm"}, ["rms_norm_dynamic_per_token_quant"]),
        (
            {"before": "rms_norm", "dtype": "float8_e4m3fn", "scale": "tensor", "given": True},
            ["rms_norm_static_fp8_quant"],
        ),
    ],
)
def test_what_vllm_races(fields, called, monkeypatch):
    """By the names of its operators; on another machine they say whether they compute the same."""
    adapter, found = ADAPTERS["vllm_cuda"], []

    class Operators:
        def __getattr__(self, name):
            return lambda *_: found.append(name)

    monkeypatch.setattr(adapter, "operators", Operators)
    fields = dict(fields)
    own = {key: fields.pop(key, None) for key in ("smooth", "before")}
    contract = replace(make_quantize(), q=quantize.Q(**{"dtype": "int8", "scale": "channel"} | fields), **own)
    inputs = contract.inputs({}, np.random.default_rng(0), "normal")
    tensors = torch_tensors(contract, inputs)
    for peer in adapter.peers(contract, contract.full_dims({}), tensors):
        peer.call()
        assert not {id(value) for value in peer.outputs().values()} & {id(value) for value in tensors.values()}
    assert found == called


ROUTING = {
    "softmax": {"op": "moe_topk", "scoring": "softmax", "renormalize": False},
    "sigmoid": {"op": "moe_topk", "scoring": "sigmoid", "renormalize": True, "bias": True},
    "scaled": {"op": "moe_topk", "scoring": "sigmoid", "renormalize": True, "bias": True, "scaling_factor": "2.5"},
    "grouped": {
        "op": "moe_topk", "scoring": "sigmoid", "renormalize": True, "bias": True, "scaling_factor": "2.5",
        "groups": {"n_group": 4, "topk_group": 2},
    },
    "align": {"op": "moe_align"},
    "permute": {"op": "moe_permute", "expert_map": True},
    "permute with scales": {"op": "moe_permute", "expert_map": True, "scale": "channel"},
    "unpermute": {"op": "moe_unpermute"},
    "unpermute and add": {"op": "moe_unpermute", "residual": True},
}  # fmt: skip


def make_routing(op, scale=None, **fields):
    """A small contract of a routing family."""
    sizes = {"tokens": 5, "topk": 2, "experts": 16, "local_experts": 8, "hidden": 16, "block": 16}
    operand = {
        "moe_topk": {"logits": {"dtype": "float32"}},
        "moe_align": {"topk_ids": {"dtype": "int32"}},
        "moe_permute": {"hidden_states": {"dtype": "float32", "scale": scale}},
        "moe_unpermute": {"mm2": {"dtype": "float32"}},
    }[op]
    family = ops.family(op)
    return family.from_data("r", {dim: (sizes[dim],) * 2 for dim in family.DIMS}, {}, operand | fields)


@pytest.mark.parametrize(
    ("adapter", "name", "called"),
    [
        ("vllm_moe", "softmax", ["topk_softmax"]),
        ("vllm_moe", "sigmoid", ["topk_sigmoid"]),
        ("vllm_moe", "scaled", ["topk_sigmoid"]),
        ("vllm_moe", "grouped", ["grouped_topk"]),
        ("vllm_moe", "align", ["moe_align_block_size"]),
        ("vllm_moe", "permute", ["moe_permute"]),
        ("vllm_moe", "permute with scales", []),
        ("vllm_moe", "unpermute", ["moe_unpermute"]),
        ("vllm_moe", "unpermute and add", []),
        ("sglang", "softmax", ["topk_softmax"]),
        ("sglang", "sigmoid", ["topk_sigmoid"]),
        ("sglang", "scaled", ["kimi_k2_moe_fused_gate"]),
        ("sglang", "grouped", ["moe_fused_gate"]),
        ("sglang", "align", ["moe_align_block_size"]),
        ("sglang", "permute", []),
    ],
)
def test_who_races_routing(adapter, name, called, monkeypatch):
    """By the names of their operators; on another machine they say whether they compute the same."""
    found = []

    class Operators:
        def __getattr__(self, name):
            def call(*_):
                found.append(name)
                return [tensors[key].clone() for key in ("topk_weights", "topk_ids") if key in tensors]

            return call

    monkeypatch.setattr(ADAPTERS[adapter], "operators", Operators)
    contract = make_routing(**ROUTING[name])
    tensors = torch_tensors(contract, contract.inputs({}, np.random.default_rng(0), contract.input_kinds[0]))
    for peer in ADAPTERS[adapter].peers(contract, contract.full_dims({}), tensors):
        peer.call()
        assert {t.name for t in contract.tensors() if t.role == "out"} == peer.outputs().keys()
        assert not {value.data_ptr() for value in peer.outputs().values()} & {t.data_ptr() for t in tensors.values()}
    assert found == called


@pytest.mark.parametrize(
    ("scale", "tile", "scales"),
    [
        ("tensor", (10, 70), (1, 1)),
        ("channel", (1, 70), (10, 1)),
        (scaling.Group(group=32), (1, 32), (10, 3)),
        (scaling.Block(block=(4, 32)), (4, 32), (3, 3)),
    ],
    ids=["tensor", "channel", "group", "block"],
)
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_eager_quantization_by_a_plain_loop(scale, tile, scales, dtype):
    torch = pytest.importorskip("torch")
    adapter = ADAPTERS["torch_compile"]
    assert scaling.tile(scale, 10, 70) == tile
    x = np.random.default_rng(2).standard_normal((10, 70), dtype=np.float32)
    x[:4, :32] = 0
    codes, got = adapter.quantize(torch.from_numpy(x), None, tile, getattr(torch, dtype), 0.0)
    assert tuple(got.shape) == scales
    limit = np.float32(quantize.MOST[dtype])
    for i, j in np.ndindex(*scales):
        part = np.s_[i * tile[0] : (i + 1) * tile[0], j * tile[1] : (j + 1) * tile[1]]
        amax = np.abs(x[part]).max()
        expected = amax / limit if amax > 0 else np.float32(1)
        assert got[i, j].item() == expected
        quotients = torch.from_numpy(np.clip(x[part] / expected, -limit, limit))
        rounded = quotients.round() if dtype == "int8" else quotients
        assert torch.equal(codes[part].float(), rounded.to(getattr(torch, dtype)).float())


def test_deepspeed_needs_nvcc(monkeypatch, tmp_path):
    adapter = ADAPTERS["deepspeed"]
    source = tmp_path / FETCHED["deepspeed"]
    source.parent.mkdir(parents=True)
    source.touch()
    monkeypatch.setenv("KGEN_PEERS", str(tmp_path))
    monkeypatch.setattr(adapter.shutil, "which", lambda name: None)
    with pytest.raises(peers.Unavailable, match="nvcc is neither"):
        adapter.build()
    monkeypatch.setattr(adapter.shutil, "which", lambda name: "false")
    with pytest.raises(peers.Unavailable, match="nvcc: "):
        adapter.build()


def test_single_modules_of_vllm_load_with_stand_ins(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "triton", type(sys)("triton"))
    monkeypatch.setitem(sys.modules, "triton.language", type(sys)("triton.language"))
    (tmp_path / "one.py").write_text(
        "from vllm.platforms import current_platform\n"
        "from vllm.triton_utils import tl, triton\n"
        "NAMES = triton.__name__, tl.__name__, current_platform.is_rocm()\n"
    )
    monkeypatch.setenv("KGEN_PEERS", str(tmp_path))
    module = ADAPTERS["vllm_triton"].load("one.py")
    assert module.NAMES == ("triton", "triton.language", False)
    assert "vllm.platforms" not in sys.modules


@pytest.fixture
def wheel(tmp_path):
    """A wheel as fetch.py would have downloaded it."""
    path = tmp_path / "lib-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as made:
        for name in ("lib/sub/a.so", "lib/sub/b.py", "lib/c.py", "lib-1.0.dist-info/licenses/LICENSE"):
            made.writestr(name, name)
        made.writestr("lib/sub/", "")
    return path


def test_a_part_is_what_its_patterns_match(wheel):
    part = fetch.Part("lib==1.0", ("lib/sub/*.so", "lib/c.py"), root="lib/")
    assert fetch.select(part, wheel) == {
        "sub/a.so": b"lib/sub/a.so",
        "c.py": b"lib/c.py",
        "licenses/lib==1.0/LICENSE": b"lib-1.0.dist-info/licenses/LICENSE",
    }


def test_a_pattern_without_a_file_is_an_error(wheel):
    with pytest.raises(ValueError, match=r"lib-1.0-py3-none-any.whl holds no lib/d\*"):
        fetch.select(fetch.Part("lib==1.0", ("lib/c.py", "lib/d*")), wheel)


def test_a_source_archive_is_read_alike(tmp_path):
    path = tmp_path / "lib-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as made:
        for name in ("lib-1.0/csrc/a.cu", "lib-1.0/LICENSE", "lib-1.0/lib/LICENSE"):
            info = tarfile.TarInfo(name)
            info.size = len(name)
            made.addfile(info, io.BytesIO(name.encode()))
    part = fetch.Part("lib==1.0", ("lib-1.0/csrc/*",), source=True)
    assert set(fetch.select(part, path)) == {"lib-1.0/csrc/a.cu", "licenses/lib==1.0/LICENSE"}


def test_what_is_fetched_unpacks(wheel, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fetch, "ARCHIVES", {"mine": [fetch.Part("lib==1.0", ("lib/*",))]})
    monkeypatch.setattr(fetch, "download", lambda part, folder: wheel)
    fetch.fetch(["mine"], tmp_path / "archives", tmp_path)
    assert "mine.tar.xz" in capsys.readouterr().out
    first = (tmp_path / "archives" / "mine.tar.xz").read_bytes()
    fetch.fetch(["mine"], tmp_path / "archives", tmp_path)
    assert (tmp_path / "archives" / "mine.tar.xz").read_bytes() == first
    fetch.unpack(tmp_path / "archives", tmp_path / "target")
    assert (tmp_path / "target" / "lib" / "sub" / "a.so").read_text() == "lib/sub/a.so"


def test_unpacking_stays_inside_the_target(tmp_path):
    with tarfile.open(tmp_path / "bad.tar.xz", "w:xz") as made:
        made.addfile(tarfile.TarInfo("../outside"))
    with pytest.raises(tarfile.OutsideDestinationError):
        fetch.unpack(tmp_path, tmp_path / "target")


def test_an_unknown_archive_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["fetch.py", "deepgem", "--to", str(tmp_path)])
    with pytest.raises(SystemExit):
        fetch.main()
    assert "no archive is named deepgem; there are deepgemm," in capsys.readouterr().err
