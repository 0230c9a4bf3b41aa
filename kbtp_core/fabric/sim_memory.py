"""Registered memory of a simulated device: access checks as the software RNIC makes them, and octets that may turn into 0xDD.

A region belongs to one protection domain. `look_up` says why it may not be used, so that the Terminate that follows names the same
code as on a wire.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from kbtp_core.fabric.api import Access, FabricError, terminate_code

if TYPE_CHECKING:
    from kbtp_core.fabric.sim import SimFabric

GARBAGE: Final = 0xDD
"""What memory holds whose content is undefined."""

_WRITES: Final = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC


class Fault(Enum):
    """Why memory may not be used; with the Terminate codes of a tagged message, and of a Read or atomic request."""

    UNKNOWN = (terminate_code(1, 1, 0), terminate_code(0, 1, 0))
    BOUNDS = (terminate_code(1, 1, 1), terminate_code(0, 1, 1))
    FOREIGN = (terminate_code(1, 1, 2), terminate_code(0, 1, 3))
    WRAP = (terminate_code(1, 1, 3), terminate_code(0, 1, 4))
    RIGHT = (terminate_code(1, 1, 0), terminate_code(0, 1, 2))

    def __init__(self, tagged: int, request: int) -> None:
        self.tagged = tagged
        self.request = request


class SimRegion:
    """See `fabric.api.Region`."""

    __slots__ = ("_owner", "_page_bytes", "_pages", "access", "domain", "is_valid", "length", "stag")

    def __init__(self, domain: SimDomain, stag: int, pages: list[memoryview], access: Access, owner: object) -> None:
        self.domain = domain
        self.stag = stag
        self.access = int(access)
        self.is_valid = True
        self._pages = pages
        self._page_bytes = len(pages[0])
        self.length = self._page_bytes * len(pages)
        self._owner = owner

    def close(self) -> None:
        """Nothing is ever in the middle of a copy when this is called: an event is whole, so the fence is just this."""
        if self.is_valid:
            self.is_valid = False
            del self.domain.device.regions[self.stag]
            self._pages, self._owner = [], None

    def read(self, offset: int, length: int) -> bytes:
        if len(self._pages) == 1:
            return bytes(self._pages[0][offset : offset + length])
        return b"".join(bytes(piece) for piece in self._pieces(offset, length))

    def write(self, offset: int, data: bytes) -> None:
        if len(self._pages) == 1:
            self._pages[0][offset : offset + len(data)] = data
            return
        at = 0
        for piece in self._pieces(offset, len(data)):
            piece[:] = data[at : at + len(piece)]
            at += len(piece)

    def fill_with_garbage(self, offset: int, length: int) -> None:
        self.write(offset, bytes([GARBAGE]) * length)

    def _pieces(self, offset: int, length: int) -> Iterator[memoryview]:
        while length:
            page, start = divmod(offset, self._page_bytes)
            size = min(length, self._page_bytes - start)
            yield self._pages[page][start : start + size]
            offset, length = offset + size, length - size


class SimDomain:
    """See `fabric.api.ProtectionDomain`."""

    def __init__(self, device: SimFabric) -> None:
        self.device = device

    def register(self, memory: Any, access: Access) -> SimRegion:
        octets = memory.reshape(-1).view(np.uint8).data if isinstance(memory, np.ndarray) else memoryview(memory)
        if not octets.c_contiguous or isinstance(memory, np.ndarray) and not memory.flags.c_contiguous:
            raise FabricError("only C-contiguous memory can be registered: pass a contiguous array, or its pages with register_pages")
        octets = octets.cast("B")
        if octets.readonly and access & _WRITES:
            raise FabricError(f"cannot register {type(memory).__name__} of {octets.nbytes} octets for {access!r}: it is read-only")
        return self._add([octets], access, memory)

    def register_pages(self, addresses: NDArray[np.uint64], page_bytes: int, access: Access, owner: object) -> SimRegion:
        pages = np.ascontiguousarray(addresses, np.uint64).reshape(-1).tolist()
        if not pages or page_bytes <= 0:
            raise FabricError(f"cannot register {len(pages)} pages of {page_bytes} octets: at least one page of one octet is needed")
        views = [memoryview((ctypes.c_uint8 * page_bytes).from_address(address)).cast("B") for address in pages]
        return self._add(views, access, owner)

    def look_up(self, stag: int, offset: int, length: int, right: int) -> SimRegion | Fault:
        """The region if `length` octets at `offset` may be used with `right` by a queue pair of this domain, else why not."""
        region = self.device.regions.get(stag)
        if region is None:
            return Fault.UNKNOWN
        if region.domain is not self:
            return Fault.FOREIGN
        if right & ~region.access:
            return Fault.RIGHT
        if offset + length > region.length:
            return Fault.WRAP if offset + length > 1 << 64 else Fault.BOUNDS
        return region

    def close(self) -> None:
        for region in [region for region in self.device.regions.values() if region.domain is self]:
            region.close()

    def _add(self, pages: list[memoryview], access: Access, owner: object) -> SimRegion:
        region = SimRegion(self, self.device.next_stag(), pages, access, owner)
        self.device.regions[region.stag] = region
        return region
