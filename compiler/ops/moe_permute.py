"""moe_permute: rows of tokens copied to their experts' places, so that each expert's rows are neighbours.

Pairs (`kgen.compiler.ops.routing`) that are not absent are sorted by expert, an expert's by number: pair i gets row
``fwd_idx[i]`` of ``perm_h``, a copy of ``hidden_states[i // topk]``. Absent pairs have ``fwd_idx`` -1 and no row. Rows
from the number of pairs that are there on are undefined. ``true_sizes`` are the rows of each expert, ``true_offsets``
where they start, and ``expert_first_token_offset`` is that in int64, with the number of rows in all appended.

With `expert_map`, ids count over all `experts`, and ``expert_map[id]`` is the expert here, of `local_experts`; other
values (-1) say that it is elsewhere, and the pair is absent. Scales of the rows are copied with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Literal

import numpy as np

from kgen.compiler.ops import numerics, routing
from kgen.compiler.ops.contract import STRICT, Arrays, Check, Config, Dims, Operator, Work
from kgen.compiler.ops.scaling import Block, Group, Scale, scale_tensor
from kgen.runtime.format.expr import Expr, fold
from kgen.runtime.format.manifest import Tensor

WORD = 16  # bytes of a copy
DIRECT_PAIRS = 1 << 13  # beyond, comparing every pair with every other is hopeless
Elements = Literal["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8"]


@dataclass(frozen=True, kw_only=True)
class HiddenStates:
    """A row a token, ``[tokens, hidden]``; `scale` says what shares a scale, if they have any."""

    dtype: Elements
    scale: Scale | None = None
    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class MoePermute(Operator):
    """Copies rows to their experts."""

    hidden_states: HiddenStates
    expert_map: bool = False
    __pydantic_config__ = STRICT

    abi: ClassVar[int] = 1
    DIMS: ClassVar[dict[str, str]] = {
        "tokens": "tokens",
        "topk": "experts that a token goes to",
        "experts": "experts that ids count",
        "local_experts": "experts that are here",
        "hidden": "columns of a row",
    }
    RANGES: ClassVar[tuple[str, ...]] = ("tokens",)
    input_kinds: ClassVar[tuple[str, ...]] = routing.KINDS

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        yield from routing.problems(self)
        hidden, experts, local = map(self.static, ("hidden", "experts", "local_experts"))
        if self.row_bytes % WORD:
            least = WORD // numerics.itemsize(self.hidden_states.dtype)
            yield ("dims", "hidden"), f"{hidden} is not a multiple of {least}: rows are copied {WORD} bytes at a time"
        if not self.expert_map and local != experts:
            yield ("dims", "local_experts"), f"{local} is not experts ({experts}), which takes expert_map: true"
        scale = self.hidden_states.scale
        if scale == "tensor" or isinstance(scale, Block):
            yield ("hidden_states", "scale"), "rows share these scales: use channel or {group: g}, or leave it out"
        if isinstance(scale, Group) and (scale.dtype, scale.major) != ("float32", "row"):
            yield ("hidden_states", "scale"), "only float32 scales in row order are supported"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.static("hidden") * numerics.itemsize(self.hidden_states.dtype)

    @property
    def scales(self) -> int:
        """Scales of a row."""
        scale = self.hidden_states.scale
        return 0 if scale is None else 1 if scale == "channel" else -(-self.static("hidden") // scale.group)

    def tensors(self) -> tuple[Tensor, ...]:
        tokens, topk, hidden = self.extent("tokens"), self.static("topk"), self.static("hidden")
        experts, local, dtype = self.static("experts"), self.static("local_experts"), self.hidden_states.dtype
        rows = fold("*", tokens, topk)
        found = [
            self.tensor("hidden_states", "in", dtype, tokens, hidden),
            self.tensor("topk_ids", "in", "int32", tokens, topk),
        ]
        if self.expert_map:
            found.append(self.tensor("expert_map", "in", "int32", experts))
        if self.scales:
            found.append(scale_tensor("scale", "in", self.hidden_states.scale, tokens, hidden))
        found.append(self.tensor("perm_h", "out", dtype, rows, hidden))
        if self.scales:
            found.append(scale_tensor("perm_scale", "out", self.hidden_states.scale, rows, hidden))
        return (
            *found,
            self.tensor("true_offsets", "out", "int32", local),
            self.tensor("true_sizes", "out", "int32", local),
            self.tensor("expert_first_token_offset", "out", "int64", local + 1),
            self.tensor("fwd_idx", "out", "int32", rows),
        )

    def candidates(self) -> list[tuple[Expr, Config]]:
        direct = routing.few_tokens(self, DIRECT_PAIRS // self.static("topk"))
        sort = routing.many_tokens(self, 64)
        found = [(direct, _direct(threads, splits)) for threads in (256, 128, 512) for splits in self._splits(threads)]
        found += [
            (sort, _sorted(cluster, threads, copiers))
            for cluster in (8, 4, 16)
            for threads in (512, 1024)
            for copiers in (128, 256)
        ]
        return [(guard, config) for guard, config in found if guard != 0]

    def _splits(self, threads: int) -> list[int]:
        """Blocks that may share a row: half of their threads have something to copy."""
        return [splits for splits in (1, 2, 4, 8) if splits == 1 or self.row_bytes // WORD >= splits * threads // 2]

    def dispatch(self) -> list[tuple[Expr, Config]]:
        topk = self.static("topk")
        return routing.stages(
            self,
            (64, _direct(128, self._splits(128)[-1])),
            (DIRECT_PAIRS // 2 // topk, _direct(256, 1)),
            (16384 // topk, _sorted(8, 512, 128)),
            (None, _sorted(8, 1024, 128)),
        )

    def work(self, config: Config, dims: Dims) -> Work:
        """Of the copy; what comes before it is little."""
        full, row = self.full_dims(dims), self.row_bytes + 4 * self.scales
        splits, pairs = config.get("splits", 1), full["tokens"] * full["topk"]
        seen = 4 * pairs if config["form"] == "direct" else 4 * full["topk"]
        return Work(
            blocks=full["tokens"] * splits + 1,
            threads=config["threads"] if config["form"] == "direct" else config["copiers"],
            smem=4 * full["local_experts"],
            read=-(-row // splits) + seen,
            written=full["topk"] * (-(-row // splits) + 4) + 16 * full["local_experts"],
            flops=full["topk"],
            registers=64,
        )

    def inputs(self, dims: Dims, rng: np.random.Generator, kind: str) -> Arrays:
        full = self.full_dims(dims)
        found: Arrays = {}
        for tensor in self.tensors():
            shape = numerics.shape(tensor, full)
            if tensor.role != "in":
                continue
            if tensor.name == "topk_ids":
                found["topk_ids"] = routing.random_ids(rng, kind, shape, full["experts"])
            elif tensor.name == "expert_map":
                found["expert_map"] = self._random_map(rng, kind)
            else:
                dtype = numerics.numpy_dtype(tensor.dtype)  # of any bits
                found[tensor.name] = np.frombuffer(rng.bytes(prod(shape) * dtype.itemsize), dtype).reshape(shape)
        return found

    def _random_map(self, rng: np.random.Generator, kind: str) -> np.ndarray:
        """``uniform``: the first experts are here, as on the first of some ranks; otherwise any, in any order."""
        here = np.arange(self.static("local_experts"), dtype=np.int32)
        found = np.full(self.static("experts"), -1, np.int32)
        if kind == "uniform":
            found[: here.size] = here
        else:
            found[:] = rng.choice([-1, -(1 << 31), here.size, (1 << 31) - 1], found.size)
            found[rng.permutation(found.size)[: here.size]] = here
        return found

    def undefined(self, dims: Dims, inputs: Arrays) -> dict[str, Any]:
        """The rows that no pair has."""
        rest = slice(self._sorted(inputs).pairs.size, None)
        return {"perm_h": rest, "perm_scale": rest} if self.scales else {"perm_h": rest}

    def check(self, dims: Dims, inputs: Arrays, outputs: Arrays, rng: np.random.Generator) -> list[Check]:
        wanted = self.reference(inputs)
        found = {name: np.ascontiguousarray(outputs[name][: len(value)]) for name, value in wanted.items()}
        return [
            numerics.check_equal(name, found[name].reshape(-1).view(value.dtype).reshape(value.shape), value)
            for name, value in wanted.items()
        ]

    def near(self, dims: Dims, inputs: Arrays, outputs: Arrays, rng: np.random.Generator) -> list[Check]:
        """An expert's rows in any order: each pair's row, and the sizes."""
        wanted, ids = self.reference(inputs), outputs["fwd_idx"]
        found = np.where(ids < 0, -1, np.minimum(ids, max(0, len(wanted["perm_h"]) - 1)))
        own = np.searchsorted(wanted["true_offsets"] + wanted["true_sizes"], found, "right")
        right = np.searchsorted(wanted["true_offsets"] + wanted["true_sizes"], wanted["fwd_idx"], "right")
        there = wanted["fwd_idx"] >= 0
        rows = [outputs["perm_h"][found[there]], wanted["perm_h"][wanted["fwd_idx"][there]]]
        return [
            numerics.check_equal("fwd_idx", np.where(there, own, ids), np.where(there, right, -1)),
            numerics.check_equal("perm_h", *(np.ascontiguousarray(part).view(np.uint8) for part in rows)),
            numerics.check_none("fwd_idx", "rows of two pairs", np.bincount(found[there], minlength=1) > 1),
        ]

    def _sorted(self, inputs: Arrays) -> routing.Sorted:
        return routing.sort(self._local(inputs), self.static("local_experts"))

    def _local(self, inputs: Arrays) -> np.ndarray:
        """The routing table in ids of the experts here."""
        ids = inputs["topk_ids"]
        if not self.expert_map:
            return ids
        known = (ids >= 0) & (ids < self.static("experts"))
        return np.where(known, inputs["expert_map"][np.where(known, ids, 0)], -1)

    def reference(self, inputs: Arrays) -> Arrays:
        """Expected outputs; of the rows those that are defined, as bytes."""
        found, topk = self._sorted(inputs), self.static("topk")
        rows = np.full(inputs["topk_ids"].size, -1, np.int32)
        rows[found.pairs] = np.arange(found.pairs.size, dtype=np.int32)
        wanted: Arrays = {
            "true_offsets": found.offsets[:-1].astype(np.int32),
            "true_sizes": found.counts.astype(np.int32),
            "expert_first_token_offset": found.offsets.astype(np.int64),
            "fwd_idx": rows,
        }
        for source, target in (("hidden_states", "perm_h"), ("scale", "perm_scale")):
            if source in inputs:
                whole = np.ascontiguousarray(inputs[source]).reshape(len(inputs[source]), -1).view(np.uint8)
                wanted[target] = whole[found.pairs // topk]
        return wanted

    def edge_dims(self) -> list[dict[str, int]]:
        return routing.token_edges(self.dims["tokens"], self.static("topk") * self.static("hidden"))

    def flops(self, dims: Dims) -> int:
        return 0


def _direct(threads: int, splits: int) -> Config:
    """Every block finds its token's places by itself; a row is shared by `splits` of them."""
    return {"form": "direct", "threads": threads, "splits": splits}


def _sorted(cluster: int, threads: int, copiers: int) -> Config:
    """A cluster sorts the pairs, then a block of `copiers` threads copies each row."""
    return {"form": "sorted", "cluster": cluster, "threads": threads, "copiers": copiers}
