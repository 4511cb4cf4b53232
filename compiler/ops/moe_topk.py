"""moe_topk: which experts a token goes to, and with what weights.

A logit that is NaN counts as the least finite float32, an infinite one as the finite one of its sign nearest to it: so
everything below is defined for every input. Scores are float32: softmax over a token's logits, or the sigmoid of each.
Experts are selected by score, or by score + bias (DeepSeek-V3's correction bias) where there is one; the weights are
scores, without bias. They come in descending order of what selected them; of equals, the lower id is first, and
without a bias equality is that of the logits. `renormalize` divides a token's weights by their sum (where that is 0, by
1), and `scaling_factor` multiplies them.

With `groups`, experts come in `n_group` runs of neighbours, and only those of the `topk_group` best runs are selected
from. A run is as good as its best expert, or with a bias as the sum of its best two (DeepSeek-V3).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from kgen.compiler.ops import numerics, routing
from kgen.compiler.ops.contract import STRICT, Arrays, Check, Config, Dims, Operator, Work
from kgen.runtime.format.expr import Expr
from kgen.runtime.format.manifest import Tensor

MOST = float(np.finfo(np.float32).max)
NEAR = 1e-6  # of a score in float32; what decides between two experts may be off by as much
MAX_EXPERTS = 512  # 16 a lane


@dataclass(frozen=True, kw_only=True)
class Logits:
    """The router's output, ``[tokens, experts]``."""

    dtype: Literal["bfloat16", "float16", "float32"]
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Grouped selection: `n_group` runs of neighbouring experts, of which the best `topk_group` are selected from."""

    n_group: int
    topk_group: int
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class MoeTopk(Operator):
    """Selects `topk` of a token's experts."""

    logits: Logits
    scoring: Literal["softmax", "sigmoid"]
    renormalize: bool
    bias: bool = False
    groups: Groups | None = None
    scaling_factor: str = "1"
    __pydantic_config__ = STRICT

    abi: ClassVar[int] = 1
    DIMS: ClassVar[dict[str, str]] = {"tokens": "tokens", "experts": "experts", "topk": "experts that a token goes to"}
    RANGES: ClassVar[tuple[str, ...]] = ("tokens",)
    input_kinds: ClassVar[tuple[str, ...]] = ("normal", "ties", "heavy", "special", "infinities", "numberless")

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        experts, topk = self.static("experts"), self.static("topk")
        if experts > MAX_EXPERTS:
            yield ("dims", "experts"), f"{experts} is more than {MAX_EXPERTS}"
        if topk > min(experts, routing.MAX_TOPK):
            yield (
                ("dims", "topk"),
                f"{topk} is more than {min(experts, routing.MAX_TOPK)}, the experts there are or {routing.MAX_TOPK}",
            )
        yield from routing.bad_factor(self.scaling_factor)
        if self.groups:
            n_group, kept = self.groups.n_group, self.groups.topk_group
            if not 1 <= n_group <= 32 or experts % n_group:
                yield ("groups", "n_group"), f"{n_group} is not a divisor of experts ({experts}) up to 32"
            elif not 1 <= kept <= n_group:
                yield ("groups", "topk_group"), f"{kept} is not in 1..{n_group}"
            elif topk > kept * (experts // n_group):
                yield ("dims", "topk"), f"{topk} is more than the {kept * (experts // n_group)} experts of the groups"
            elif self.bias and experts // n_group < 2:
                yield ("groups", "n_group"), f"{n_group} leaves one expert a group, and a bias takes the sum of two"

    @property
    def grouped(self) -> bool:
        """Whether some groups are not selected from."""
        return self.groups is not None and self.groups.topk_group < self.groups.n_group

    def tensors(self) -> tuple[Tensor, ...]:
        tokens, experts, topk = map(self.extent, ("tokens", "experts", "topk"))
        bias = (self.tensor("bias", "in", "float32", experts),) if self.bias else ()
        return (
            self.tensor("logits", "in", self.logits.dtype, tokens, experts),
            *bias,
            self.tensor("topk_weights", "out", "float32", tokens, topk),
            self.tensor("topk_ids", "out", "int32", tokens, topk),
        )

    def candidates(self) -> list[tuple[Expr, Config]]:
        return [(1, {"form": "warp", "warps": warps}) for warps in (4, 1, 2, 8)]

    def dispatch(self) -> list[tuple[Expr, Config]]:
        return self.candidates()[:1]

    def work(self, config: Config, dims: Dims) -> Work:
        full, warps = self.full_dims(dims), config["warps"]
        experts, topk = full["experts"], full["topk"]
        return Work(
            blocks=-(-full["tokens"] // warps),
            threads=32 * warps,
            smem=4 * experts * warps if self.grouped else 0,
            read=warps * experts * numerics.itemsize(self.logits.dtype) + 4 * experts * self.bias,
            written=warps * topk * 8,
            flops=warps * 4 * experts,
            registers=40 + experts // 16,
        )

    def inputs(self, dims: Dims, rng: np.random.Generator, kind: str) -> Arrays:
        """``ties``: few distinct logits. ``numberless``: NaN and infinities alone."""
        full = self.full_dims(dims)
        logits, *bias = (t for t in self.tensors() if t.role == "in")
        shape, dtype = numerics.shape(logits, full), logits.dtype
        if kind == "ties":
            x = (rng.integers(0, 3, shape) / 4).astype(numerics.numpy_dtype(dtype))
        elif kind == "numberless":
            x = rng.choice(np.array([np.nan, -np.inf, np.inf], np.float32), shape, p=[0.5, 0.45, 0.05])
            x[::2] = np.nan
            x = x.astype(numerics.numpy_dtype(dtype))
        else:
            x = numerics.random(rng, kind, shape, dtype)
        found = {"logits": x}
        if bias:
            found["bias"] = (rng.standard_normal(full["experts"]) * 0.1).astype(np.float32)
        return found

    def check(self, dims: Dims, inputs: Arrays, outputs: Arrays, rng: np.random.Generator) -> list[Check]:
        """Ids are the reference's, where float32 decides nothing; else each is as good as the last one must be."""
        if not self.bias:
            wanted = self.reference(inputs)["topk_ids"]
            ids = [numerics.check_equal("topk_ids", outputs["topk_ids"], wanted)]
        else:
            ids = [numerics.check_none("topk_ids", "picks that are not among the best", self._worse(inputs, outputs))]
        return [*ids, *self._check_weights(inputs, outputs, 2e-6)]

    def near(self, dims: Dims, inputs: Arrays, outputs: Arrays, rng: np.random.Generator) -> list[Check]:
        """Picks in any order, those of equals any of them; weights to 1e-3, as ops are compared across libraries."""
        worse = self._worse(inputs, outputs, tolerance=1e-4, ordered=False)
        ids = numerics.check_none("topk_ids", "picks that are not among the best", worse)
        return [ids, *self._check_weights(inputs, outputs, 1e-3)]

    def _check_weights(self, inputs: Arrays, outputs: Arrays, limit: float) -> list[Check]:
        """Against the scores of what was picked; ids out of range have been reported."""
        ids = np.clip(outputs["topk_ids"], 0, self.static("experts") - 1)
        wanted = self.weights(self.scores(inputs), ids)
        return [numerics.check_close("topk_weights", outputs["topk_weights"], wanted, limit, floor=1e-20)]

    def scores(self, inputs: Arrays) -> np.ndarray:
        """float64, ``[tokens, experts]``."""
        logits = finite(inputs["logits"])
        with np.errstate(over="ignore", under="ignore"):
            if self.scoring == "sigmoid":
                return 1 / (1 + np.exp(-logits))
            powers = np.exp(logits - logits.max(axis=1, keepdims=True))
            return powers / powers.sum(axis=1, keepdims=True)

    def weights(self, scores: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """float64, ``[tokens, topk]``, of the picks `ids`."""
        picked = np.take_along_axis(scores, ids.astype(np.int64), axis=1)
        if self.renormalize:
            total = picked.sum(axis=1, keepdims=True)
            picked = picked / np.where(total > 0, total, 1)
        return picked * float(self.scaling_factor)

    def selection(self, inputs: Arrays) -> np.ndarray:
        """What experts are selected by, ``[tokens, experts]``: the logits, which order them as their scores do."""
        return finite(self.scores(inputs) + inputs["bias"]) if self.bias else finite(inputs["logits"])

    def reference(self, inputs: Arrays) -> Arrays:
        """Expected outputs, `topk_weights` in float64."""
        values = self.selection(inputs)
        if self.grouped:
            by_group = self._group_values(values)
            kept = np.argsort(-by_group, axis=1, kind="stable")[:, : self.groups.topk_group]
            allowed = np.zeros(by_group.shape, bool)
            np.put_along_axis(allowed, kept, True, axis=1)
            values = np.where(self._spread(allowed), values, -np.inf)
        ids = np.argsort(-values, axis=1, kind="stable")[:, : self.static("topk")].astype(np.int32)
        return {"topk_ids": ids, "topk_weights": self.weights(self.scores(inputs), ids)}

    def _group_values(self, values: np.ndarray) -> np.ndarray:
        """How good each group is, ``[tokens, n_group]``."""
        best = np.sort(values.reshape(len(values), self.groups.n_group, -1), axis=2)
        return best[:, :, -2:].sum(axis=2) if self.bias else best[:, :, -1]

    def _spread(self, groups: np.ndarray) -> np.ndarray:
        """A value a group as a value an expert."""
        return np.repeat(groups, self.static("experts") // self.groups.n_group, axis=1)

    def _worse(self, inputs: Arrays, outputs: Arrays, tolerance: float = NEAR, ordered: bool = True) -> np.ndarray:
        """Which picks cannot be right, ``[tokens, topk]``.

        Out of range, picked before, of a group that is not among the best, further than `tolerance` below the last of
        the experts that must be picked, or (if `ordered`) that far above the pick before it.
        """
        ids, experts, topk = outputs["topk_ids"].astype(np.int64), self.static("experts"), self.static("topk")
        bad = (ids < 0) | (ids >= experts)
        ids = np.where(bad, 0, ids)
        for j in range(1, topk):
            bad[:, j] |= (ids[:, :j] == ids[:, j : j + 1]).any(axis=1)
        values = self.selection(inputs) if self.bias else self.scores(inputs)
        sure = np.ones(values.shape, bool)
        if self.grouped:
            by_group = self._group_values(values)
            last = np.sort(by_group, axis=1)[:, -self.groups.topk_group, None]
            bad |= np.take_along_axis(self._spread(by_group < last - 2 * tolerance), ids, axis=1)
            sure = self._spread(by_group > last + 2 * tolerance)
            in_group = ids // (experts // self.groups.n_group)
            used = np.zeros(by_group.shape, bool)
            np.put_along_axis(used, in_group, True, axis=1)
            bad |= (used.sum(axis=1) > self.groups.topk_group)[:, None]
        picked = np.take_along_axis(values, ids, axis=1)
        must = np.sort(np.where(sure, values, -np.inf), axis=1)[:, -topk, None]
        bad |= picked < must - tolerance
        if ordered:
            bad[:, 1:] |= picked[:, 1:] > picked[:, :-1] + tolerance
        return bad

    def edge_dims(self) -> list[dict[str, int]]:
        return routing.token_edges(self.dims["tokens"], self.static("experts"))

    def flops(self, dims: Dims) -> int:
        full = self.full_dims(dims)
        return 4 * full["tokens"] * full["experts"]


def finite(x: np.ndarray) -> np.ndarray:
    """x in float64, with NaN as the least finite float32 and infinities as the largest of their sign."""
    return np.clip(np.nan_to_num(x.astype(np.float64), nan=-MOST, posinf=MOST, neginf=-MOST), -MOST, MOST)
