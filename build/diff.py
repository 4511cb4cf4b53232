"""What changed between two bundles: contracts, variants, code, size, toolchain.

Pure functions of their manifests' JSON. Things are matched as people mean them: operators by name; variants by config,
or by guard where another config took one over; a kernel's new code by the place in a program where it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kgen.build.routes import SM_COUNT, Route, moved, routes
from kgen.runtime.bundle import Bundle
from kgen.runtime.format import canonical
from kgen.runtime.format.manifest import to_json

Json = dict[str, Any]
Matches = list[tuple[int | None, int | None]]


@dataclass(frozen=True)
class Change:
    """A field, such as ``tensors.x.align``, that was added, removed or changed; the missing side is None."""

    kind: str
    field: str
    a: Any = None
    b: Any = None


@dataclass(frozen=True)
class VariantChange:
    """A variant, by its index in each bundle; `config` is the one that it has now, or had."""

    kind: str
    target: str
    config: Json
    a: int | None
    b: int | None
    changes: list[Change]


@dataclass(frozen=True)
class OperatorChange:
    """An operator: its contract's fields and, where both bundles have it, its variants."""

    kind: str
    name: str
    contract: list[Change]
    variants: list[VariantChange]


@dataclass(frozen=True)
class KernelChange:
    """A kernel, by its id in each bundle."""

    kind: str
    entry: str
    a: str | None
    b: str | None
    changes: list[Change]


@dataclass(frozen=True)
class Diff:
    """What changed from bundle A to B.

    Attributes:
        identical: their ids are equal. The sizes may differ then too, where one was packed lean.
        header: name, version, targets, least driver.
        operators, kernels: those that changed; `same` counts the others.
        routes: the workloads for which other code runs.
        evidence: files, by their sha256.
        size: bytes of the files, by kind and of all.
    """

    identical: bool
    header: list[Change]
    toolchain: list[Change]
    operators: list[OperatorChange]
    routes: list[Route]
    kernels: list[KernelChange]
    evidence: list[Change]
    size: list[Change]
    same: dict[str, int]


def diff(a: Bundle, b: Bundle, sm_count: int = SM_COUNT) -> Diff:
    """What changed from `a` to `b`; workloads are routed as on a device of `sm_count` multiprocessors."""
    old, new = to_json(a.manifest), to_json(b.manifest)
    operators = list(_operators(old["operators"], new["operators"]))
    kernels = list(_kernels(old, new))
    shared = {part: len(old[part].keys() & new[part].keys()) for part in ("operators", "kernels")}
    return Diff(
        identical=a.id == b.id,
        header=_compare_fields(old, new, "name", "version", "targets", "min_driver"),
        toolchain=compare(old["generator"], new["generator"]),
        operators=operators,
        routes=[route for route in routes(a.manifest, b.manifest, sm_count) if moved(route)],
        kernels=kernels,
        evidence=compare(*({name: e["sha256"] for name, e in side["evidence"].items()} for side in (old, new))),
        size=compare(sizes(a), sizes(b)),
        same={
            "operators": shared["operators"] - sum(item.kind == "changed" for item in operators),
            "kernels": shared["kernels"] - sum(item.a == item.b for item in kernels),
        },
    )


def compare(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> list[Change]:
    """The leaves in which two mappings differ, by their dotted paths."""
    changes: list[Change] = []
    for key in dict.fromkeys((*a, *b)):
        field = f"{prefix}{key}"
        if key not in b:
            changes.append(Change("removed", field, a=a[key]))
        elif key not in a:
            changes.append(Change("added", field, b=b[key]))
        elif isinstance(a[key], Mapping) and isinstance(b[key], Mapping):
            changes += compare(a[key], b[key], f"{field}.")
        elif a[key] != b[key]:
            changes.append(Change("changed", field, a[key], b[key]))
    return changes


def sizes(bundle: Bundle) -> dict[str, int]:
    """Bytes of a bundle's files by kind, and of all of them; evidence counts where the bundle carries it."""
    found = {"cubin": 0, "ptx": 0}
    for blob in bundle.manifest.blobs.values():
        found[blob.kind] += blob.size
    found["manifest"] = len(canonical.dumps(to_json(bundle.manifest)))
    found["evidence"] = sum(len(bundle.evidence(name) or b"") for name in bundle.manifest.evidence)
    return found | {"all": sum(found.values())}


def _compare_fields(a: Json, b: Json, *fields: str) -> list[Change]:
    return compare({field: a[field] for field in fields}, {field: b[field] for field in fields})


def _operators(old: Json, new: Json) -> Iterator[OperatorChange]:
    for name in sorted(old.keys() | new.keys()):
        contract = compare(_contract(old.get(name)), _contract(new.get(name)))
        if name not in new:
            yield OperatorChange("removed", name, contract, [])
        elif name not in old:
            yield OperatorChange("added", name, contract, [])
        elif (variants := list(_variants(old[name]["variants"], new[name]["variants"]))) or contract:
            yield OperatorChange("changed", name, contract, variants)


def _contract(operator: Json | None) -> Json:
    """An operator's fields without its variants, its tensors by name."""
    if operator is None:
        return {}
    tensors = {t["name"]: {key: value for key, value in t.items() if key != "name"} for t in operator["tensors"]}
    rest = {key: value for key, value in operator.items() if key not in ("variants", "tensors")}
    return rest | {"tensors": tensors, "order": list(tensors)}


def _variants(old: list[Json], new: list[Json]) -> Iterator[VariantChange]:
    matches = _match(old, new)
    in_order = sorted(j for i, j in matches if i is not None and j is not None)
    for rank, (i, j) in enumerate(matches):  # those in both come first
        a, b = None if i is None else old[i], None if j is None else new[j]
        changes = compare(_parts(a), _parts(b))
        if a and b and in_order[rank] != j:
            changes.append(Change("changed", "index", i, j))
        if changes:
            kind = "changed" if a and b else "removed" if a else "added"
            yield VariantChange(kind, (b or a)["target"], (b or a)["config"], i, j, changes)


def _match(old: list[Json], new: list[Json]) -> Matches:
    """Indices of what is one variant in both: of equal config, else of equal guard; None where there is none."""
    left, right = dict(enumerate(old)), dict(enumerate(new))
    found: Matches = []
    for field in ("config", "guard"):
        for i, a in list(left.items()):
            alike = (j for j, b in right.items() if (a["target"], a[field]) == (b["target"], b[field]))
            if (j := next(alike, None)) is not None:
                found.append((i, j))
                del left[i], right[j]
    return sorted(found) + [(i, None) for i in left] + [(None, j) for j in right]


def _parts(variant: Json | None) -> Json:
    """A variant with its program split, so that new code, another grid and the rest are different changes."""
    if variant is None:
        return {}
    program = variant["program"]
    steps = [{key: value for key, value in s.items() if key not in ("kernel", "grid")} for s in program["steps"]]
    return {
        "guard": variant["guard"],
        "config": variant["config"],
        "kernels": _launched(variant),
        "grids": [step["grid"] for step in program["steps"] if "kernel" in step],
        "workspace_bytes": program["workspace_bytes"],
        "steps": steps,
        "workspace": program["workspace"],
    }


def _launched(variant: Json) -> list[str]:
    return [step["kernel"] for step in variant["program"]["steps"] if "kernel" in step]


def _kernels(old: Json, new: Json) -> Iterator[KernelChange]:
    heirs = _heirs(old, new)
    for id, kernel in old["kernels"].items():
        heir = id if id in new["kernels"] else heirs.get(id)
        if heir is None:
            yield KernelChange("removed", kernel["entry"], id, None, compare(_facts(old, id), {}))
        elif (changes := compare(_facts(old, id), _facts(new, heir))) or heir != id:
            yield KernelChange("changed", new["kernels"][heir]["entry"], id, heir, changes)
    for id, kernel in new["kernels"].items():
        if id not in old["kernels"] and id not in heirs.values():
            yield KernelChange("added", kernel["entry"], None, id, compare({}, _facts(new, id)))


def _heirs(old: Json, new: Json) -> dict[str, str]:
    """Kernels that only A has -> those that only B has, and that run at the same place of the same variant."""
    found: dict[str, str] = {}
    for name in sorted(old["operators"].keys() & new["operators"].keys()):
        a, b = old["operators"][name]["variants"], new["operators"][name]["variants"]
        for i, j in _match(a, b):
            if i is None or j is None:
                continue
            for was, now in zip(_launched(a[i]), _launched(b[j]), strict=False):
                if was not in new["kernels"] and now not in old["kernels"] and now not in found.values():
                    found.setdefault(was, now)
    return found


def _facts(manifest: Json, id: str) -> Json:
    """A kernel's fields, with the sizes of its code and all its shared memory."""
    kernel = dict(manifest["kernels"][id])
    kernel["smem"] = kernel.pop("dynamic_smem") + kernel.pop("static_smem")
    return kernel | {f"{kind}_bytes": manifest["blobs"][kernel[kind]]["size"] for kind in ("cubin", "ptx")}
