"""The contracts of MoE routing: references against plain loops, and checks that catch what they should."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from offers import check_offers

from kgen.compiler.ops import moe_align, moe_permute, moe_topk, moe_unpermute, routing
from kgen.compiler.ops.scaling import Group

TOKENS = 37


def rng():
    return np.random.default_rng(3)


def topk_of(experts=24, topk=4, dtype="float32", **fields):
    dims = {"tokens": (1, 300), "experts": (experts, experts), "topk": (topk, topk)}
    fields = {"scoring": "sigmoid", "renormalize": True} | fields
    return moe_topk.MoeTopk(name="t", dims=dims, workloads={}, logits=moe_topk.Logits(dtype=dtype), **fields)


def align_of(experts=10, block=16):
    dims = {"tokens": (1, 300), "topk": (3, 3), "experts": (experts, experts), "block": (block, block)}
    return moe_align.MoeAlign(name="a", dims=dims, workloads={}, topk_ids=moe_align.TopkIds(dtype="int32"))


def permute_of(local=10, dtype="bfloat16", scale=None, **fields):
    dims = {
        "tokens": (1, 300),
        "topk": (3, 3),
        "experts": (10, 10),
        "local_experts": (local, local),
        "hidden": (32, 32),
    }
    rows = moe_permute.HiddenStates(dtype=dtype, scale=scale)
    return moe_permute.MoePermute(name="p", dims=dims, workloads={}, hidden_states=rows, **fields)


def unpermute_of(dtype="bfloat16", **fields):
    dims = {"tokens": (1, 300), "topk": (3, 3), "hidden": (40, 40)}
    return moe_unpermute.MoeUnpermute(name="u", dims=dims, workloads={}, mm2=moe_unpermute.Mm2(dtype=dtype), **fields)


CONTRACTS = {
    "topk": topk_of(),
    "topk of few": topk_of(dtype="bfloat16", scoring="softmax", renormalize=False, experts=5, topk=5),
    "biased": topk_of(bias=True, scaling_factor="2.5"),
    "grouped": topk_of(bias=True, groups=moe_topk.Groups(n_group=6, topk_group=2)),
    "grouped without bias": topk_of(
        dtype="float16", scoring="softmax", groups=moe_topk.Groups(n_group=4, topk_group=2)
    ),
    "align": align_of(),
    "align of one": align_of(experts=1, block=64),
    "permute": permute_of(),
    "permute a part": permute_of(local=4, expert_map=True, dtype="float8_e4m3fn", scale=Group(group=16)),
    "permute scaled rows": permute_of(dtype="int8", scale="channel"),
    "unpermute": unpermute_of(),
    "unpermute and add": unpermute_of("float16", shared_out=True, residual=True, scaling_factor="0.5"),
}
EVERY = pytest.mark.parametrize("contract", CONTRACTS.values(), ids=CONTRACTS.keys())


def right(contract, inputs):
    """Outputs as the contract's own reference has them, in the dtypes of its tensors."""
    if isinstance(contract, moe_align.MoeAlign):
        return contract.reference({"tokens": len(inputs["topk_ids"])}, inputs)
    if isinstance(contract, moe_topk.MoeTopk):
        wanted = contract.reference(inputs)
        return wanted | {"topk_weights": wanted["topk_weights"].astype(np.float32)}
    if isinstance(contract, moe_unpermute.MoeUnpermute):
        return {"out": contract.reference(inputs)[0].astype(inputs["mm2"].dtype)}
    outputs = contract.reference(inputs)
    for source, target in (("hidden_states", "perm_h"), ("scale", "perm_scale")):
        if target in outputs:  # whole, with anything in the rows that no pair has
            rows = np.full((inputs["topk_ids"].size, *inputs[source].shape[1:]), 77).astype(inputs[source].dtype)
            found = outputs[target]
            rows[: len(found)] = found.reshape(-1).view(rows.dtype).reshape(-1, *rows.shape[1:])
            outputs[target] = rows
    return outputs


@EVERY
def test_what_is_offered(contract):
    check_offers(contract)
    assert not list(contract.problems())


@EVERY
def test_the_reference_passes_and_damage_does_not(contract):
    for kind in contract.input_kinds:
        inputs = contract.inputs({"tokens": TOKENS}, rng(), kind)
        outputs = right(contract, inputs)
        undefined = contract.undefined({"tokens": TOKENS}, inputs)
        for checks in (contract.check, contract.near):
            found = checks({"tokens": TOKENS}, inputs, outputs, rng())
            assert all(check.ok for check in found), (kind, found)
        for name, output in outputs.items():
            defined = np.ones(len(output), bool)
            if name in undefined:
                defined[undefined[name]] = False
            if not defined.any():
                continue
            at = int(rng().choice(np.flatnonzero(defined)))
            damaged = output.copy()
            damaged[at] = damaged[at] + np.ones((), output.dtype) if output.dtype.kind in "iu" else -7
            checks = contract.check({"tokens": TOKENS}, inputs, outputs | {name: damaged}, rng())
            assert not all(check.ok for check in checks), (kind, name, at)


@pytest.mark.parametrize("kind", routing.KINDS)
def test_sorting_against_a_loop(kind):
    ids = routing.random_ids(rng(), kind, (TOKENS, 3), 10)
    bins = [[i for i, id in enumerate(ids.reshape(-1)) if id == expert] for expert in range(10)]
    found = routing.sort(ids, 10)
    assert found.pairs.tolist() == [i for pairs in bins for i in pairs] and found.counts.tolist() == [
        len(pairs) for pairs in bins
    ]
    assert found.offsets.tolist() == [sum(map(len, bins[:e])) for e in range(11)]


def test_kinds_of_routing():
    ids = {kind: routing.random_ids(rng(), kind, (500, 8), 64) for kind in routing.KINDS}
    inside = {kind: ((table >= 0) & (table < 64)).mean() for kind, table in ids.items()}
    assert inside["uniform"] == inside["one_expert"] == 1 and inside["absent"] == 0
    assert 0.9 < inside["skewed"] < 1 and 0.4 < inside["wild"] < 0.7
    assert len(np.unique(ids["one_expert"])) == 1
    assert {-1, 64, -(1 << 31), (1 << 31) - 1} <= set(ids["absent"].reshape(-1))


def test_align_against_a_loop():
    contract = align_of(experts=5, block=16)
    ids = np.array([[0, 0, 3], [0, 9, -1], [3, 0, 0]] * 4, np.int32)
    found = contract.reference({"tokens": 12}, {"topk_ids": ids})
    zeros = [i for i in range(36) if ids.reshape(-1)[i] == 0]
    threes = [i for i in range(36) if ids.reshape(-1)[i] == 3]
    assert found["sorted_token_ids"].tolist() == [*zeros, *[36] * 12, *threes, *[36] * (36 + 6 * 15 - 40)]
    assert found["num_tokens_post_pad"].tolist() == [48]
    assert found["expert_ids"].tolist() == [0, 0, 3, *[-1] * 5]


def test_topk_against_a_loop():
    contract = topk_of(bias=True, groups=moe_topk.Groups(n_group=6, topk_group=2), scaling_factor="2.5")
    inputs = contract.inputs({"tokens": TOKENS}, rng(), "normal")
    found = contract.reference(inputs)
    for logits, ids, weights in zip(inputs["logits"], found["topk_ids"], found["topk_weights"], strict=True):
        scores = 1 / (1 + np.exp(-logits.astype(float)))
        biased = scores + inputs["bias"]
        best = sorted(range(6), key=lambda g: -sum(sorted(biased[4 * g : 4 * g + 4])[-2:]))[:2]
        wanted = sorted((e for g in best for e in range(4 * g, 4 * g + 4)), key=lambda e: -biased[e])[:4]
        assert ids.tolist() == wanted
        assert weights == pytest.approx(2.5 * scores[wanted] / scores[wanted].sum())


def test_topk_of_what_is_no_number():
    contract = topk_of(experts=4, topk=3, scoring="softmax", renormalize=False)
    logits = np.array([[np.nan, np.nan, np.nan, np.nan], [1, np.nan, np.inf, -np.inf]], np.float32)
    found = contract.reference({"logits": logits})
    assert found["topk_ids"].tolist() == [[0, 1, 2], [2, 0, 1]]
    assert found["topk_weights"].tolist() == [[0.25, 0.25, 0.25], [1, 0, 0]]


def test_another_library_may_order_differently_but_not_pick_worse():
    contract = topk_of(scoring="softmax", dtype="bfloat16")
    inputs = contract.inputs({"tokens": TOKENS}, rng(), "ties")
    outputs = right(contract, inputs)
    turned = {name: np.ascontiguousarray(output[:, ::-1]) for name, output in outputs.items()}
    assert all(check.ok for check in contract.near({"tokens": TOKENS}, inputs, turned, rng()))
    assert not all(check.ok for check in contract.check({"tokens": TOKENS}, inputs, turned, rng()))
    worst = np.argmin(inputs["logits"].astype(np.float32), axis=1)[:, None]
    ids = np.concatenate([outputs["topk_ids"][:, :-1], worst.astype(np.int32)], axis=1)
    assert not contract.near({"tokens": TOKENS}, inputs, outputs | {"topk_ids": ids}, rng())[0].ok


def test_rows_in_another_order_within_an_expert_are_near():
    contract = permute_of()
    inputs = contract.inputs({"tokens": TOKENS}, rng(), "uniform")
    outputs = right(contract, inputs)
    i, j = outputs["fwd_idx"].argsort()[outputs["true_offsets"][2] + np.arange(2)]  # two pairs of an expert
    swapped = {name: output.copy() for name, output in outputs.items()}
    swapped["fwd_idx"][[i, j]] = outputs["fwd_idx"][[j, i]]
    swapped["perm_h"][swapped["fwd_idx"][[i, j]]] = inputs["hidden_states"][np.array([i, j]) // 3]
    assert all(check.ok for check in contract.near({"tokens": TOKENS}, inputs, swapped, rng()))
    assert not all(check.ok for check in contract.check({"tokens": TOKENS}, inputs, swapped, rng()))
    both = outputs["fwd_idx"].copy()
    both[i] = both[j]
    assert not all(check.ok for check in contract.near({"tokens": TOKENS}, inputs, outputs | {"fwd_idx": both}, rng()))


def test_a_sum_is_rounded_once():
    contract = unpermute_of()
    inputs = contract.inputs({"tokens": TOKENS}, rng(), "normal")
    index = inputs["fwd_idx"].reshape(TOKENS, 3)
    terms = inputs["topk_weights"][:, :, None] * inputs["mm2"][index].astype(np.float32)
    often = np.zeros((TOKENS, 40), ml_dtypes.bfloat16)
    for j in range(3):
        often = (often.astype(np.float32) + terms[:, j]).astype(ml_dtypes.bfloat16)
    assert not contract.check({"tokens": TOKENS}, inputs, {"out": often}, rng())[0].ok
    once = terms.sum(axis=1).astype(ml_dtypes.bfloat16)
    assert contract.check({"tokens": TOKENS}, inputs, {"out": once}, rng())[0].ok


@pytest.mark.parametrize(
    ("contract", "field", "words"),
    [
        (topk_of(experts=600), "experts", "more than 512"),
        (topk_of(experts=5, topk=6), "topk", "more than 5"),
        (topk_of(scaling_factor="2,5"), "scaling_factor", "no number in quotes"),
        (topk_of(groups=moe_topk.Groups(n_group=5, topk_group=2)), "n_group", "not a divisor of experts"),
        (topk_of(groups=moe_topk.Groups(n_group=6, topk_group=7)), "topk_group", "1..6"),
        (topk_of(topk=5, groups=moe_topk.Groups(n_group=6, topk_group=1)), "topk", "4 experts of the groups"),
        (topk_of(bias=True, groups=moe_topk.Groups(n_group=24, topk_group=4)), "n_group", "sum of two"),
        (align_of(experts=1025), "experts", "more than 1024"),
        (align_of(block=24), "block", "allowed: 16, 32"),
        (permute_of(local=4), "local_experts", "expert_map: true"),
        (permute_of(dtype="int8", scale="tensor"), "scale", "rows share"),
        (unpermute_of(scaling_factor="x"), "scaling_factor", "no number in quotes"),
    ],
)
def test_problems_name_the_field_and_the_fix(contract, field, words):
    ((path, sentence),) = contract.problems()
    assert path[-1] == field and words in sentence
