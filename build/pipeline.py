"""Build a spec: lower and compile every variant in parallel, through the cache, into a manifest and its blobs."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib import import_module, metadata
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from kgen.build import picks, workers
from kgen.build.cache import Cache
from kgen.build.coverage import check_coverage
from kgen.build.digest import source_digest
from kgen.build.records import Records
from kgen.build.toolchain import Code, Report, Toolchain
from kgen.compiler import ops
from kgen.compiler.kernel import KernelSource, Lowered
from kgen.compiler.model import H200, prune
from kgen.compiler.ops.contract import Config, Operator
from kgen.runtime.errors import BuildError, KgenError
from kgen.runtime.format import canonical, manifest
from kgen.runtime.format.expr import Expr
from kgen.runtime.format.manifest import DEVICE_SYMBOLS

if TYPE_CHECKING:  # workers need no YAML
    from kgen.compiler.spec import Spec


@dataclass(frozen=True)
class Request:
    """One program to build: plain data, so that a worker can rebuild it from nothing."""

    family: str
    dims: dict[str, tuple[int, int]]
    attrs: dict[str, Any]
    config: Config
    target: str
    front_end: str
    cache: str

    @classmethod
    def of(cls, operator: Operator, config: Config, target: str, front_end: str, cache: Cache) -> Request:
        return cls(operator.family(), operator.dims, operator.attrs(), config, target, front_end, str(cache.root))

    @cached_property
    def key(self) -> str:
        """What the lowered program depends on, and nothing else: no names of instances, no paths, no times."""
        return canonical.sha256(
            canonical.dumps(
                {
                    "family": self.family,
                    "dims": {dim: list(ends) for dim, ends in self.dims.items()},
                    "attrs": self.attrs,
                    "config": self.config,
                    "toolchain": self.toolchain().fingerprint(self.target),
                    "source": source_digest(f"kgen.compiler.kernels.{self.family}"),
                }
            )
        )

    def toolchain(self) -> Toolchain:
        return Toolchain(self.front_end)

    def symbols(self) -> set[str]:
        return {*self.dims, *DEVICE_SYMBOLS}


class Planned(NamedTuple):
    """A variant to be: `request` makes its program."""

    operator: Operator
    target: str
    guard: Expr
    request: Request


@dataclass(frozen=True)
class Built:
    """A finished bundle in memory.

    Attributes:
        files: by name, the manifest among them.
        dropped: of a build of candidates, a line about each that did not build.
        stale: a sentence about each frozen pick that was measured on other code.
    """

    manifest: manifest.Manifest
    files: dict[str, bytes]
    dropped: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return canonical.sha256(self.files["manifest.json"])


def build(
    spec: Spec,
    cache: Cache,
    *,
    jobs: int,
    front_end: str = "nvrtc",
    records: Records | None = None,
    candidates: bool = False,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Built:
    """Build `spec`.

    Args:
        jobs: processes at a time.
        records: what was measured before. Tuning entries of an operator's contract decide which of its configs run
            where; entries of kernels in this bundle become evidence.
        candidates: make a bundle for tuning instead: the variants are those that the model finds worth measuring, the
            most promising first, and one that does not build is dropped.
        progress: called with (programs done, programs in all, the operator just finished).

    Raises:
        BuildError: a program does not build, or an operator's guards leave a hole. Names every operator that failed.
    """
    records = records or Records({})
    plan: list[Planned] = []
    for operator in spec.operators:
        choices = prune(operator, H200) if candidates else picks.dispatch(operator, records)
        check_coverage(operator.name, operator.dims, [guard for guard, _ in choices], holes_only=candidates)
        for target in spec.targets:
            plan += [
                Planned(operator, target, guard, Request.of(operator, config, target, front_end, cache))
                for guard, config in choices
            ]
    failed = _make_missing(plan, cache, jobs, progress)
    broken = [(item, failed[item.request.key]) for item in plan if item.request.key in failed]
    if broken and not candidates:
        raise BuildError("\n".join(f"{item.operator.name} {item.request.config}: {why}" for item, why in broken))
    kept = [item for item in plan if item.request.key not in failed]
    dropped = [f"{item.operator.name} {item.request.config}: {_in_a_line(why)}" for item, why in broken]
    if dropped:
        _check_what_is_left(spec, kept, dropped)
    built = _assemble(spec, kept, cache, records)
    if candidates:
        return replace(built, dropped=tuple(dropped))
    stale = [picks.stale(operator, records, built.manifest.operators[operator.name]) for operator in spec.operators]
    return replace(built, stale=tuple(chain.from_iterable(stale)))


def _make_missing(
    plan: list[Planned], cache: Cache, jobs: int, progress: Callable[[int, int, str], None]
) -> dict[str, str]:
    """Make the programs that the cache lacks; what went wrong with those that failed, by key."""
    wanted = {item.request.key: item for item in plan}
    missing = [item for key, item in wanted.items() if not _is_built(item.request, key, cache)]
    done = len(wanted) - len(missing)
    progress(done, len(wanted), "cache")
    failed: dict[str, str] = {}
    for index, error in workers.run(make, [item.request for item in missing], jobs):
        item = missing[index]
        done += 1
        progress(done, len(wanted), item.operator.name)
        if isinstance(error, KgenError):
            failed[item.request.key] = str(error)
    return failed


def _in_a_line(failure: str) -> str:
    """The first line of `failure`; of a traceback what was raised."""
    first, *rest = failure.splitlines()
    if first.startswith("Traceback"):
        return next((line for line in rest if not line.startswith(" ")), first)
    return first


def _check_what_is_left(spec: Spec, kept: list[Planned], dropped: list[str]) -> None:
    """Raise where the candidates that did build leave a hole."""
    for operator in spec.operators:
        for target in spec.targets:
            guards = [i.guard for i in kept if (i.operator.name, i.target) == (operator.name, target)]
            try:
                check_coverage(operator.name, operator.dims, guards, holes_only=True)
            except BuildError as error:
                raise BuildError("\n".join((str(error), *dropped))) from None


def make(request: Request) -> None:
    """Lower and compile one program into the cache (in a worker process)."""
    cache, toolchain = Cache(request.cache), request.toolchain()
    module = import_module(f"kgen.compiler.kernels.{request.family}")
    lower = import_module("kgen.compiler.lower").lower
    operator = ops.family(request.family).from_data("", request.dims, {}, request.attrs)
    lowered = lower(module.program(operator, request.config), request.target, toolchain.fingerprint(request.target))
    for id, kernel in lowered.kernels.items():
        if cache.get("kernels", id) is None:
            cache.put("kernels", id, _encode(toolchain.compile(kernel, request.target)))
    cache.put("programs", request.key, canonical.dumps(lowered.to_json()))


def _is_built(request: Request, key: str, cache: Cache) -> bool:
    lowered = _load(request, key, cache)
    return lowered is not None and all(cache.get("kernels", id) is not None for id in lowered.kernels)


def _load(request: Request, key: str, cache: Cache) -> Lowered | None:
    content = cache.get("programs", key)
    return None if content is None else Lowered.from_json(json.loads(content), request.symbols())


def _encode(code: Code) -> bytes:
    report = asdict(code.report)
    return json.dumps(
        {"cubin": base64.b64encode(code.cubin).decode(), "ptx": code.ptx.decode(), "report": report}
    ).encode()


def _decode(content: bytes) -> Code:
    value = json.loads(content)
    return Code(base64.b64decode(value["cubin"]), value["ptx"].encode(), Report(**value["report"]))


def _assemble(spec: Spec, plan: list[Planned], cache: Cache, records: Records) -> Built:
    blobs: dict[str, manifest.Blob] = {}
    kernels: dict[str, manifest.Kernel] = {}
    files: dict[str, bytes] = {}
    evidence: dict[str, bytes] = {}

    def blob(content: bytes, kind: str) -> str:
        sha = canonical.sha256(content)
        blobs[sha] = manifest.Blob(sha, kind, len(content))
        files[blobs[sha].path] = content
        return sha

    def add(id: str, source: KernelSource, target: str) -> None:
        code = _decode(cache.get("kernels", id))
        kernels[id] = manifest.Kernel(
            id=id,
            entry=source.entry,
            params=source.params,
            block=source.block,
            cluster=source.cluster,
            dynamic_smem=source.dynamic_smem,
            pdl=source.pdl,
            cooperative=source.cooperative,
            target=target,
            cubin=blob(code.cubin, "cubin"),
            ptx=blob(code.ptx, "ptx"),
            **asdict(code.report),
        )
        evidence[f"sources/{id}.cu"] = source.source.encode()

    variants: dict[str, list[manifest.Variant]] = {operator.name: [] for operator in spec.operators}
    for operator, target, guard, request in plan:
        lowered = _load(request, request.key, cache)
        for id, source in lowered.kernels.items():
            if id not in kernels:
                add(id, source, target)
        variants[operator.name].append(manifest.Variant(target, guard, request.config, lowered.program))
    operators = {
        operator.name: manifest.Operator(
            name=operator.name,
            op=operator.family(),
            abi=operator.abi,
            dims=operator.dims,
            attrs=operator.attrs(),
            tensors=operator.tensors(),
            variants=tuple(variants[operator.name]),
            workloads=operator.workloads,
        )
        for operator in spec.operators
    }
    if known := records.of(kernels):
        evidence["records/records.json"] = known.dumps()
    built = manifest.Manifest(
        name=spec.name,
        version=spec.version,
        targets=spec.targets,
        min_driver=Toolchain.MIN_DRIVER,
        generator={"kgen": metadata.version("kgen"), **plan[0].request.toolchain().versions()},
        blobs=blobs,
        kernels=kernels,
        operators=operators,
        evidence={name: manifest.Evidence(canonical.sha256(data), len(data)) for name, data in evidence.items()},
    )
    head = canonical.dumps(manifest.to_json(built))
    files |= {f"evidence/{name}": data for name, data in evidence.items()}
    files |= {"manifest.json": head, "manifest.sha256": canonical.sha256(head).encode() + b"\n"}
    return Built(built, files)
