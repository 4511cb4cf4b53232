"""moe_align: pairs by expert, each expert's padded to whole blocks, as a product with one expert a block wants them.

``sorted_token_ids`` holds the numbers of the pairs (`kgen.compiler.ops.routing`) of expert 0, then of expert 1, …, an
expert's in ascending order and padded to a multiple of `block` with ``tokens · topk``. An expert without pairs has no
block. ``num_tokens_post_pad`` is the length of all that; the rest is padding too. ``expert_ids`` has the expert of each
block, and -1 for those past the last.
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

BLOCKS = (16, 32, 64, 128, 256)


@dataclass(frozen=True, kw_only=True)
class TopkIds:
    """The routing table, ``[tokens, topk]``."""

    dtype: Literal["int32"]
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class MoeAlign(Operator):
    """Sorts pairs by expert into padded blocks."""

    topk_ids: TopkIds
    __pydantic_config__ = STRICT

    abi: ClassVar[int] = 1
    DIMS: ClassVar[dict[str, str]] = {
        "tokens": "tokens",
        "topk": "experts that a token goes to",
        "experts": "experts",
        "block": "rows of a block",
    }
    RANGES: ClassVar[tuple[str, ...]] = ("tokens",)
    input_kinds: ClassVar[tuple[str, ...]] = routing.KINDS

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        yield from routing.problems(self)
        if self.static("block") not in BLOCKS:
            allowed = ", ".join(map(str, BLOCKS))
            yield ("dims", "block"), f"{self.static('block')} is not supported; allowed: {allowed}"

    def capacity(self) -> Expr:
        """Length of ``sorted_token_ids``: what the pairs take, wherever they go, and one expert's padding more."""
        padding = (self.static("experts") + 1) * (self.static("block") - 1)
        return fold("+", fold("*", self.extent("tokens"), self.static("topk")), padding)

    def tensors(self) -> tuple[Tensor, ...]:
        capacity = self.capacity()
        return (
            self.tensor("topk_ids", "in", self.topk_ids.dtype, self.extent("tokens"), self.static("topk")),
            self.tensor("sorted_token_ids", "out", "int32", capacity),
            self.tensor("expert_ids", "out", "int32", fold("ceildiv", capacity, self.static("block"))),
            self.tensor("num_tokens_post_pad", "out", "int32", 1, align=4),
        )

    def candidates(self) -> list[tuple[Expr, Config]]:
        return [(1, _cluster(cluster, threads)) for cluster in (8, 1, 2, 4, 16) for threads in (256, 512, 1024)]

    def dispatch(self) -> list[tuple[Expr, Config]]:
        pairs = self.static("topk")
        return routing.stages(
            self, (2048 // pairs, _cluster(1, 256)), (16384 // pairs, _cluster(8, 512)), (None, _cluster(8, 1024))
        )

    def work(self, config: Config, dims: Dims) -> Work:
        full, cluster = self.full_dims(dims), config["cluster"]
        traffic = self.traffic(dims)
        return Work(
            blocks=cluster,
            threads=config["threads"],
            smem=4 * full["experts"] * (config["threads"] // 32 + 4),
            read=-(-traffic.read // cluster),
            written=-(-traffic.written // cluster),
            flops=full["tokens"] * full["topk"],
            registers=40,
        )

    def inputs(self, dims: Dims, rng: np.random.Generator, kind: str) -> Arrays:
        full = self.full_dims(dims)
        return {"topk_ids": routing.random_ids(rng, kind, (full["tokens"], full["topk"]), full["experts"])}

    def check(self, dims: Dims, inputs: Arrays, outputs: Arrays, rng: np.random.Generator) -> list[Check]:
        wanted = self.reference(dims, inputs)
        return [numerics.check_equal(name, outputs[name], value) for name, value in wanted.items()]

    def near(self, dims: Dims, inputs: Arrays, outputs: Arrays, rng: np.random.Generator) -> list[Check]:
        """An expert's pairs in any order, and anything behind the last block."""
        wanted = self.reference(dims, inputs)
        length, block = int(wanted["num_tokens_post_pad"][0]), self.static("block")
        owner = np.repeat(wanted["expert_ids"][: length // block], block).astype(np.int64)
        most = inputs["topk_ids"].size + 1
        found, expected = (np.sort(owner * most + ids["sorted_token_ids"][:length]) for ids in (outputs, wanted))
        return [
            numerics.check_equal("num_tokens_post_pad", outputs["num_tokens_post_pad"], wanted["num_tokens_post_pad"]),
            numerics.check_equal(
                "expert_ids", outputs["expert_ids"][: length // block], wanted["expert_ids"][: length // block]
            ),
            numerics.check_equal("sorted_token_ids", found, expected),
        ]

    def reference(self, dims: Dims, inputs: Arrays) -> Arrays:
        """Expected outputs."""
        full, block = self.full_dims(dims), self.static("block")
        capacity, blocks = (numerics.shape(t, full)[0] for t in self.tensors()[1:3])
        pairs, counts = routing.sort(inputs["topk_ids"], full["experts"])
        padded = -(-counts // block) * block
        starts = np.cumsum(padded) - padded
        ids = np.full(capacity, full["tokens"] * full["topk"], np.int32)
        ids[np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(pairs.size)] = pairs
        experts = np.full(blocks, -1, np.int32)
        experts[: padded.sum() // block] = np.repeat(np.arange(full["experts"]), padded // block)
        return {
            "sorted_token_ids": ids,
            "expert_ids": experts,
            "num_tokens_post_pad": np.array([padded.sum()], np.int32),
        }

    def edge_dims(self) -> list[dict[str, int]]:
        return routing.token_edges(self.dims["tokens"], self.static("topk"))

    def flops(self, dims: Dims) -> int:
        full = self.full_dims(dims)
        return full["tokens"] * full["topk"]


def _cluster(cluster: int, threads: int) -> Config:
    return {"form": "cluster", "cluster": cluster, "threads": threads}
