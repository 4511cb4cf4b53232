"""Opening a bundle and checking it against a device; `Bundle.load` loads it there."""

from __future__ import annotations

import os

from kgen.runtime import drivers
from kgen.runtime.drivers import Attribute, Driver
from kgen.runtime.errors import (
    ArchMismatch,
    DeviceLimit,
    DriverTooOld,
    FormatError,
    IntegrityError,
    KgenError,
)
from kgen.runtime.format import arch, canonical, container, parse
from kgen.runtime.format.manifest import Manifest
from kgen.runtime.kernels import Kernels


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
        try:
            manifest = parse.parse(head)
        except FormatError as error:
            raise FormatError(f"{path}: {error}") from None
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
            needs, has = version_text(self.manifest.min_driver), version_text(version)
            reasons.append(DriverTooOld(f"{self.path} needs CUDA driver {needs}; this is {has}"))
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


def _capability(driver: Driver, device: int) -> tuple[int, int]:
    return (
        driver.attribute(device, Attribute.COMPUTE_CAPABILITY_MAJOR),
        driver.attribute(device, Attribute.COMPUTE_CAPABILITY_MINOR),
    )


def version_text(number: int) -> str:
    """A driver's version as people write it: 13000 is 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}"
