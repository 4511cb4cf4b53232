"""What a measurement must say of the device it was made on: its name, its clocks, what held them back."""

from __future__ import annotations

from typing import Any

from kgen.runtime.drivers import Attribute, Driver

_PCI_BUS, _PCI_DEVICE, _PCI_DOMAIN = 33, 34, 50  # CU_DEVICE_ATTRIBUTE_PCI_…_ID


def facts(driver: Driver, device: int) -> dict[str, int]:
    """Fields for a record: multiprocessors, and the newest CUDA version that the driver supports."""
    return {"sm_count": driver.attribute(device, Attribute.MULTIPROCESSOR_COUNT), "driver": driver.version()}


class Clocks:
    """Samples the SM clock (MHz) and the reasons that hold it down, through NVML.

    NVML numbers devices by PCI order whatever CUDA_VISIBLE_DEVICES says, so the device is found by its PCI address.
    """

    def __init__(self, driver: Driver, device: int):
        from cuda.bindings import nvml

        self._nvml = nvml
        nvml.init_v2()
        bus, slot, domain = (driver.attribute(device, a) for a in (_PCI_BUS, _PCI_DEVICE, _PCI_DOMAIN))
        self._handle = nvml.device_get_handle_by_pci_bus_id_v2(f"{domain:08x}:{bus:02x}:{slot:02x}.0")
        self.mhz: list[int] = []
        self.reasons: set[str] = set()

    def sample(self) -> None:
        """Read both now."""
        nvml = self._nvml
        self.mhz.append(nvml.device_get_clock_info(self._handle, nvml.ClockType.CLOCK_SM))
        bits = nvml.device_get_current_clocks_event_reasons(self._handle)
        for reason in nvml.ClocksEventReasons:
            if bits & reason.value and not reason.name.endswith("GPU_IDLE"):
                self.reasons.add(reason.name.partition("_REASON_")[2].lower())

    def take(self) -> dict[str, Any]:
        """Fields for a record of what was sampled since the last `take`."""
        fields = {"sm_mhz": [min(self.mhz), max(self.mhz)] if self.mhz else [], "throttled": sorted(self.reasons)}
        self.mhz, self.reasons = [], set()
        return fields
