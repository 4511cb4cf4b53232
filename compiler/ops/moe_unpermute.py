"""moe_unpermute: a token's rows, weighted and summed.

``out[t] = scaling_factor · Σ_j topk_weights[t, j] · mm2[fwd_idx[t · topk + j]]``, summed in float32 in ascending j and
rounded once; ``shared_out[t]`` (of experts that every token goes to) and then ``residual[t]`` are added before that.
A pair whose ``fwd_idx`` is outside of mm2's rows (-1) contributes nothing, and its row is not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from kgen.compiler.ops import numerics, routing
from kgen.compiler.ops.contract import STRICT, Arrays, Check, Config, Dims, Operator, Work
from kgen.runtime.format.expr import Expr, fold
from kgen.runtime.format.manifest import Tensor

VECTOR = 16  # bytes of a load
SUM_ERROR = 2.0**-21  # of the sum of magnitudes, for a float32 sum of at most 16 + 2 terms


@dataclass(frozen=True, kw_only=True)
class Mm2:
    """The experts' outputs, ``[tokens · topk, hidden]``: the first rows of what may be a longer tensor."""

    dtype: Literal["bfloat16", "float16", "float32"]
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class MoeUnpermute(Operator):
    """Sums a token's rows. `shared_out` and `residual` are further inputs in mm2's dtype, ``[tokens, hidden]``."""

    mm2: Mm2
    shared_out: bool = False
    residual: bool = False
    scaling_factor: str = "1"
    __pydantic_config__ = STRICT

    abi: ClassVar[int] = 1
    DIMS: ClassVar[dict[str, str]] = {
        "tokens": "tokens",
        "topk": "experts that a token goes to",
        "hidden": "columns of a row",
    }
    RANGES: ClassVar[tuple[str, ...]] = ("tokens",)
    input_kinds: ClassVar[tuple[str, ...]] = ("normal", "absent", "wild", "heavy")

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        yield from routing.problems(self)
        yield from routing.bad_factor(self.scaling_factor)
        vector = VECTOR // numerics.itemsize(self.mm2.dtype)
        if self.static("hidden") % vector:
            yield ("dims", "hidden"), f"{self.static('hidden')} is not a multiple of {vector}, the elements of a load"

    def tensors(self) -> tuple[Tensor, ...]:
        tokens, topk, hidden = self.extent("tokens"), self.static("topk"), self.static("hidden")
        rows, dtype = fold("*", tokens, topk), self.mm2.dtype
        added = [
            self.tensor(name, "in", dtype, tokens, hidden) for name in ("shared_out", "residual") if self._has(name)
        ]
        return (
            self.tensor("mm2", "in", dtype, rows, hidden),
            self.tensor("topk_weights", "in", "float32", tokens, topk),
            self.tensor("fwd_idx", "in", "int32", rows),
            *added,
            self.tensor("out", "out", dtype, tokens, hidden),
        )

    def _has(self, name: str) -> bool:
        return getattr(self, name)

    def candidates(self) -> list[tuple[Expr, Config]]:
        words = self.static("hidden") * numerics.itemsize(self.mm2.dtype) // VECTOR
        return [
            (1, {"form": "gather", "threads": threads, "words": each})
            for each in (1, 2, 4)
            for threads in (128, 64, 256)
            if each == 1 or threads * each <= words
        ]

    def dispatch(self) -> list[tuple[Expr, Config]]:
        return self.candidates()[:1]

    def work(self, config: Config, dims: Dims) -> Work:
        full, size = self.full_dims(dims), numerics.itemsize(self.mm2.dtype)
        tokens, topk, hidden = full["tokens"], full["topk"], full["hidden"]
        share = config["threads"] * config["words"] * VECTOR // size  # columns of a block
        return Work(
            blocks=tokens * -(-hidden // share),
            threads=config["threads"],
            smem=0,
            read=(topk + self.shared_out + self.residual) * share * size + 8 * topk,
            written=share * size,
            flops=2 * topk * share,
            registers=min(255, 32 + config["words"] * (4 * topk + 8)),
        )

    def inputs(self, dims: Dims, rng: np.random.Generator, kind: str) -> Arrays:
        """Every row is some pair's. ``absent``: but for every third. ``wild``: and those have any int32.

        Rows that no pair has are NaN.
        """
        full = self.full_dims(dims)
        rows = full["tokens"] * full["topk"]
        found = {
            t.name: numerics.random(rng, "heavy" if kind == "heavy" else "normal", numerics.shape(t, full), t.dtype)
            for t in self.tensors()
            if t.role == "in" and t.name != "fwd_idx"
        }
        found["topk_weights"] = np.abs(found["topk_weights"])
        index = rng.permutation(rows).astype(np.int32)
        if kind in ("absent", "wild"):
            gone = rng.random(rows) < 0.3
            found["mm2"][index[gone]] = np.nan
            outside = rng.choice([-1, rows, -(1 << 31), (1 << 31) - 1], rows) if kind == "wild" else -1
            index = np.where(gone, outside, index).astype(np.int32)
        return found | {"fwd_idx": index}

    def check(self, dims: Dims, inputs: Arrays, outputs: Arrays, rng: np.random.Generator) -> list[Check]:
        """Within half an ulp of the exact sum, and what the float32 sum may be off."""
        return self._close(inputs, outputs, 1.0)

    def near(self, dims: Dims, inputs: Arrays, outputs: Arrays, rng: np.random.Generator) -> list[Check]:
        """Within two ulp."""
        return self._close(inputs, outputs, 4.0)

    def _close(self, inputs: Arrays, outputs: Arrays, limit: float) -> list[Check]:
        exact, magnitude = self.reference(inputs)
        got = outputs["out"].astype(np.float64)
        allowed = numerics.EPSILON[self.mm2.dtype] * np.abs(exact) + SUM_ERROR * magnitude + np.finfo(np.float32).tiny
        off = np.abs(got - exact) / allowed
        at = tuple(int(i) for i in np.unravel_index(np.argmax(np.where(np.isnan(off), np.inf, off)), off.shape))
        error = "error in what rounding allows"
        return [Check("out", error, float(off[at]), limit, at, float(got[at]), float(exact[at]))]

    def reference(self, inputs: Arrays) -> tuple[np.ndarray, np.ndarray]:
        """The sums in float64, and the sums of their terms' magnitudes."""
        topk, mm2 = self.static("topk"), inputs["mm2"]
        index = inputs["fwd_idx"].reshape(-1, topk)

        def part(rows: slice) -> tuple[np.ndarray, np.ndarray]:
            exact = np.zeros((rows.stop - rows.start, mm2.shape[1]))
            magnitude = np.zeros(exact.shape)
            for j in range(topk):
                there = (index[rows, j] >= 0) & (index[rows, j] < len(mm2))
                weights = inputs["topk_weights"][rows, j].astype(np.float64) * float(self.scaling_factor)
                term = mm2[np.where(there, index[rows, j], 0)].astype(np.float64) * weights[:, None]
                term[~there] = 0
                exact += term
                magnitude += np.abs(term)
            for name in ("shared_out", "residual"):
                if name in inputs:
                    exact += inputs[name][rows]
                    magnitude += np.abs(inputs[name][rows].astype(np.float64))
            return exact, magnitude

        exact, magnitude = numerics.by_rows(part, len(index))
        return exact, magnitude

    def edge_dims(self) -> list[dict[str, int]]:
        return routing.token_edges(self.dims["tokens"], self.static("topk") * self.static("hidden"))

    def flops(self, dims: Dims) -> int:
        full = self.full_dims(dims)
        return 2 * full["tokens"] * full["topk"] * full["hidden"]
