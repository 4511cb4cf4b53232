"""A bundle's code loaded on a device: its operators, plans and calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kgen.runtime.bind import Call, bind
from kgen.runtime.drivers import Attribute, Driver
from kgen.runtime.errors import ArgumentError, UnsupportedShape
from kgen.runtime.format.manifest import Kernel, Operator
from kgen.runtime.plan import Selection, select, select_each
from kgen.runtime.tensors import TensorRef, tensor_ref

if TYPE_CHECKING:
    from kgen.runtime.bundle import Bundle

DEFAULT_DYNAMIC_SMEM = 48 << 10  # bytes; more has to be asked for
PORTABLE_CLUSTER = 8
MAX_CALLS = 256  # bound calls that the one-liner keeps an operator


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
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._operators:
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
        for operator in self._operators.values():
            operator.forget_calls()
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
        if not self.context:
            raise ArgumentError(f"{self.bundle.path} was closed")
        ids = [launch.kernel for launch in selection.variant.program.launches]
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

    def plans(self, **dims: int) -> list[Plan]:
        """A plan for every variant that covers `dims`, not only the first: what tuning races. Raises as `plan` does."""
        each = select_each(self.operator, self._kernels.target, self._kernels.sm_count, dims)
        return [Plan(self._kernels, selection) for selection in each]

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
                self._calls.clear()
            self._calls[key] = call
        call(stream)

    def forget_calls(self) -> None:
        """Drop the bound calls that the one-liner keeps."""
        self._calls.clear()

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
