"""Emptying the L2 cache."""

from __future__ import annotations

from kgen.runtime.drivers import Attribute, Driver


class Flush:
    """Fills a buffer of twice the L2's size, which leaves nothing else in it.

    Attributes:
        nbytes: of the memset, by which its record is known.
    """

    def __init__(self, driver: Driver, device: int):
        self.nbytes = 2 * driver.attribute(device, Attribute.L2_CACHE_SIZE)
        self._driver = driver
        self._address = driver.allocate(self.nbytes)

    def on(self, stream: int):
        """A prepared launch of the memset on `stream`."""
        return self._driver.memset_launcher(self._address, 0, self.nbytes, stream)

    def close(self) -> None:
        if self._address:
            self._driver.free(self._address)
            self._address = 0
