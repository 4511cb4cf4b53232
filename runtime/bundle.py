"""Opening a bundle, checking it against a device, loading it there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from kgen.runtime import drivers
from kgen.runtime.bind import Call, bind
from kgen.runtime.drivers import Attribute, Driver
from kgen.runtime.errors import (
    ArchMismatch,
    ArgumentError,
    DeviceLimit,
    DriverTooOld,
    FormatError,
    IntegrityError,
    KgenError,
    UnsupportedShape,
)
from kgen.runtime.format import arch, canonical, container, parse
from kgen.runtime.format.manifest import Kernel, Manifest, Operator
from kgen.runtime.plan import Selection, select
from kgen.runtime.tensors import TensorRef, tensor_ref

DEFAULT_DYNAMIC_SMEM = 48 << 10  # bytes; more has to be asked for
PORTABLE_CLUSTER = 8
MAX_CALLS = 256  # bound calls that the one-liner keeps an operator


class Bundle:
    """A bundle's manifest and code, verified. Touches no GPU until `check` or `load`."""

    def __init__(self, path: str, id: str, manifest: Manifest, files: dict[str, memoryview]):
        self.path, self.id, self.manifest, self._files = path, id, manifest, files

    @classmethod
    def open(cls, path: str | os.PathLike[str], expect: str | None = None) -> Bundle:
        """Read and verify the bundle at `path` (a ``.kgen`` file or a directory).

        Args:
            expect: the id that it must have, ``sha256:<hex>``.

        Raises:
            IntegrityError: the id is not the expected one, or some file does not match its hash.
            FormatError: it is not a well-formed bundle.
            OSError: it cannot be read.
        """
        files = container.read(path)
        head = bytes(files[container.MANIFEST])
        id = f"sha256:{canonical.sha256(head)}"
        if expect is not None and expect != id:
            raise IntegrityError(f"{path}: this bundle is {id}, not the expected {expect}")
        if bytes(files.get("manifest.sha256", b"")) != id.removeprefix("sha256:").encode() + b"\n":
            raise IntegrityError(f"{path}: manifest.json does not match manifest.sha256; fetch the bundle again")
        manifest = parse.parse(head)
        hashes = {blob.path: (sha, blob.size) for sha, blob in manifest.blobs.items()}
        evidence = {f"evidence/{name}": (e.sha256, e.size) for name, e in manifest.evidence.items()}
        for name, content in files.items():
            if name in (container.MANIFEST, "manifest.sha256"):
                continue
            expected = hashes.get(name) or evidence.get(name)
            if expected is None:
                raise FormatError(f"{path}: {name} is not in the manifest")
            if (canonical.sha256(content), len(content)) != expected:
                raise IntegrityError(f"{path}: {name} is damaged: its sha256 does not match; fetch the bundle again")
        for name in hashes:
            if name not in files:
                raise IntegrityError(f"{path}: {name} is missing; fetch the bundle again")
        return cls(os.fspath(path), id, manifest, files)

    def blob(self, sha256: str) -> memoryview:
        """The bytes of a cubin or PTX."""
        return self._files[self.manifest.blobs[sha256].path]

    def evidence(self, name: str) -> bytes | None:
        """An evidence file, such as ``sources/<kernel id>.cu``; None where the bundle was packed lean."""
        content = self._files.get(f"evidence/{name}")
        return None if content is None else bytes(content)

    def check(self, device: int = 0, *, driver: Driver | None = None, allow_ptx: bool = False) -> list[KgenError]:
        """Every reason why the bundle would not run on `device`; empty where it would. Loads nothing.

        Raises:
            DriverNotFound, DriverError: there is no usable driver or no such device.
        """
        driver = driver or drivers.open()
        reasons: list[KgenError] = []
        version = driver.version()
        if version < self.manifest.min_driver:
            reasons.append(
                DriverTooOld(
                    f"{self.path} needs CUDA driver {_version(self.manifest.min_driver)}; this is {_version(version)}"
                )
            )
        target, _ = self._target(driver, device, allow_ptx)
        if target is None:
            reasons.append(
                ArchMismatch(
                    f"{self.path} holds code for {', '.join(self.manifest.targets)}; device {device} "
                    f"({driver.device_name(device)}) is sm_{''.join(map(str, _capability(driver, device)))}"
                )
            )
        limit = driver.attribute(device, Attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        clusters = driver.attribute(device, Attribute.CLUSTER_LAUNCH)
        for kernel in self.manifest.kernels.values():
            if kernel.target != target:
                continue
            need = kernel.dynamic_smem + kernel.static_smem
            if need > limit:
                reasons.append(
                    DeviceLimit(
                        f"{kernel.entry} needs {need} bytes of shared memory a block; device {device} has {limit}"
                    )
                )
            if kernel.cluster != (1, 1, 1) and not clusters:
                reasons.append(DeviceLimit(f"{kernel.entry} needs thread block clusters; device {device} has none"))
        return reasons

    def load(
        self, device: int = 0, *, driver: Driver | None = None, lazy: bool = False, allow_ptx: bool = False
    ) -> Kernels:
        """Load the bundle's code on `device`.

        Args:
            driver: from `kgen.runtime.drivers.open`; by default whichever is installed.
            lazy: load an operator's code at its first plan instead of now; that plan then takes milliseconds.
            allow_ptx: where no cubin fits, let the driver compile the PTX (seconds, at load time).

        Raises:
            ArchMismatch, DriverTooOld, DeviceLimit: the first of `check`'s reasons.
            DriverNotFound, DriverError: the driver is missing or refuses the code.
        """
        driver = driver or drivers.open()
        for reason in self.check(device, driver=driver, allow_ptx=allow_ptx):
            raise reason
        target, ptx = self._target(driver, device, allow_ptx)
        return Kernels(self, driver, device, target, ptx, lazy)

    def _target(self, driver: Driver, device: int, allow_ptx: bool) -> tuple[str | None, bool]:
        """The target to use on `device`, and whether as PTX."""
        capability = _capability(driver, device)
        target = arch.best(self.manifest.targets, *capability)
        if target is None and allow_ptx:
            return arch.best(self.manifest.targets, *capability, ptx=True), True
        return target, False


class Kernels(Mapping[str, "LoadedOperator"]):
    """The operators of a bundle, loaded on a device: by name as items, or as attributes where the name allows it."""

    def __init__(self, bundle: Bundle, driver: Driver, device: int, target: str, ptx: bool, lazy: bool):
        self.bundle, self.driver, self.device, self.target, self._ptx = bundle, driver, device, target, ptx
        self.sm_count = driver.attribute(device, Attribute.MULTIPROCESSOR_COUNT)
        self.context = driver.retain(device)
        self._activated = not driver.current()
        if self._activated:
            self.activate()
        self._libraries: dict[str, int] = {}
        self._functions: dict[str, tuple[Kernel, int]] = {}
        self._operators = {name: LoadedOperator(self, op) for name, op in bundle.manifest.operators.items()}
        try:
            if not lazy:
                for kernel in bundle.manifest.kernels.values():
                    if kernel.target == target:
                        self._function(kernel)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> LoadedOperator:
        try:
            return self._operators[name]
        except KeyError:
            raise KeyError(
                f"{self.bundle.path} has no operator {name!r}; it has {', '.join(self._operators)}"
            ) from None

    def __getattr__(self, name: str) -> LoadedOperator:
        if name.startswith("_") or name not in self._operators:
            raise AttributeError(f"{self.bundle.path} has no operator {name!r}; it has {', '.join(self._operators)}")
        return self._operators[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._operators)

    def __len__(self) -> int:
        return len(self._operators)

    def activate(self) -> None:
        """Make the device's context the calling thread's current one, which launches need. `load` does so where the
        thread has none; torch does so by itself; other threads of a server without torch call this once."""
        self.driver.set_current(self.context)

    def close(self) -> None:
        """Unload the code and release the device's context; bound calls must not be used afterwards."""
        if not self.context:
            return
        with self.driver.using(self.context):
            for library in self._libraries.values():
                self.driver.unload_library(library)
        self._libraries.clear()
        self._functions.clear()
        if self._activated and self.driver.current() == self.context:
            self.driver.set_current(0)
        self.driver.release(self.device)
        self.context = 0

    def __enter__(self) -> Kernels:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def functions(self, selection: Selection) -> dict[str, tuple[Kernel, int]]:
        """Kernel and CUfunction of each launch of the selected program, loaded where they are not yet."""
        ids = [step.kernel for step in selection.variant.program.steps if hasattr(step, "kernel")]
        return {id: self._functions.get(id) or self._function(self.bundle.manifest.kernels[id]) for id in ids}

    def _function(self, kernel: Kernel) -> tuple[Kernel, int]:
        driver = self.driver
        sha = kernel.ptx if self._ptx else kernel.cubin
        with driver.using(self.context):
            if sha not in self._libraries:
                self._libraries[sha] = driver.load_library(self.bundle.blob(sha))
            function = driver.function(driver.kernel(self._libraries[sha], kernel.entry))
            if kernel.dynamic_smem > DEFAULT_DYNAMIC_SMEM:
                driver.set_max_dynamic_smem(function, kernel.dynamic_smem)
            x, y, z = kernel.cluster
            if x * y * z > PORTABLE_CLUSTER:
                driver.set_nonportable_cluster(function)
        self._functions[kernel.id] = (kernel, function)
        return self._functions[kernel.id]


class LoadedOperator:
    """An operator of a loaded bundle."""

    def __init__(self, kernels: Kernels, operator: Operator):
        self._kernels, self.operator = kernels, operator
        self._calls: dict[Any, Call] = {}

    def plan(self, **dims: int) -> Plan:
        """Choose the program for `dims`: a value for each range dim.

        Raises:
            UnsupportedShape: a dim is missing or outside its declared range.
        """
        return Plan(self._kernels, select(self.operator, self._kernels.target, self._kernels.sm_count, dims))

    def __call__(self, *, stream: Any, workspace: Any = None, **tensors: Any) -> None:
        """Plan, bind and launch in one go, through a small cache of bound calls keyed by addresses and shapes.

        Raises:
            ArgumentError, UnsupportedShape: the tensors do not fit the contract.
            DriverError: the driver refused a launch.
        """
        refs = {name: tensor_ref(f"{self.operator.name}: {name}", value) for name, value in tensors.items()}
        space = None if workspace is None else tensor_ref("workspace", workspace)
        key = tuple((name, ref[:4]) for name, ref in refs.items()), space and space[:4]
        call = self._calls.get(key)
        if call is None:
            call = self.plan(**self._infer(refs)).bind(workspace=workspace, **tensors)
            call.forget_tensors()  # the caller's tensors live as long as this call; the cache must not keep them
            if len(self._calls) >= MAX_CALLS:
                self._calls.pop(next(iter(self._calls)))
            self._calls[key] = call
        call(stream)

    def _infer(self, refs: Mapping[str, TensorRef]) -> dict[str, int]:
        """Range dims from the tensors' shapes."""
        found: dict[str, int] = {}
        for tensor in self.operator.tensors:
            ref = refs.get(tensor.name)
            if ref is not None and len(ref.shape) == len(tensor.shape):
                for symbol, extent in zip(tensor.shape, ref.shape, strict=True):
                    if isinstance(symbol, str):
                        found.setdefault(symbol, extent)
        missing = [dim for dim in self.operator.range_dims if dim not in found]
        if missing:
            raise UnsupportedShape(
                f"{self.operator.name}: {missing[0]} is not the extent of any tensor: use plan({missing[0]}=…).bind(…)"
            )
        return {dim: found[dim] for dim in self.operator.range_dims}


class Plan:
    """A program chosen for some dims; `bind` it to tensors to call it.

    Attributes:
        workspace_bytes: device memory that a call needs besides its tensors; a bound call owns it while it runs.
    """

    def __init__(self, kernels: Kernels, selection: Selection):
        self._kernels, self.selection = kernels, selection
        self.workspace_bytes = selection.workspace_bytes
        self._functions = kernels.functions(selection)

    def explain(self) -> str:
        """Which variant runs, and why the others do not."""
        return self.selection.explain()

    def bind(self, *, workspace: Any = None, **tensors: Any) -> Call:
        """Check the tensors and prepare the launches; not inside a graph capture.

        Args:
            workspace: at least `workspace_bytes` bytes, aligned to 256. Calls that never run at the same time may share
                one, unless the program has locks: those bytes must stay this call's own.

        Raises:
            ArgumentError: and its subclasses: unknown or missing tensor, dtype, shape, strides, alignment, device,
                overlap, too small a workspace.
        """
        if not self._kernels.context:
            raise ArgumentError(f"{self._kernels.bundle.path} was closed")
        driver = self._kernels.driver
        with driver.using(self._kernels.context):
            return bind(self.selection, self._functions, driver, self._kernels.device, tensors, workspace)


def _capability(driver: Driver, device: int) -> tuple[int, int]:
    return (
        driver.attribute(device, Attribute.COMPUTE_CAPABILITY_MAJOR),
        driver.attribute(device, Attribute.COMPUTE_CAPABILITY_MINOR),
    )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
