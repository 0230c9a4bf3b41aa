"""How many octets each tenant may keep on this node, and how many it has.

A quota file has one line a tenant: 16 hexadecimal digits (the tenant's id) or the tenant's name, then octets. `#` starts a comment,
and the name `*` stands for every tenant that is not listed. A line that can't be read refuses the whole file.

Rules: a limit holds for all disks of a node together, counts octets that are committed or being written, and binds only what comes
after it was set: a tenant that is over it keeps what it has and gets no more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kbtp_core import _native
from kbtp_core.errors import ConfigError
from kbtp_core.store.identity import tenant_id

UNLIMITED = 2**64 - 1


class QuotaTable:
    """Limits and usage of tenants, shared by all engines of a node. Any thread."""

    def __init__(self, path: Path | None = None, default_limit: int = UNLIMITED) -> None:
        """`default_limit` is for tenants that a file does not name, unless it has a line for `*`. Raises ConfigError for a file that can't
        be read."""
        self.ledger = _native.TenantLedger()
        self._path = path
        self._usual_limit = default_limit
        self.set({}, default_limit)
        if path is not None:
            self.reload()

    def reload(self) -> None:
        """Read the file again; what can't be read changes nothing. Raises ConfigError."""
        if self._path is None:
            return
        try:
            text = self._path.read_text("utf-8")
        except OSError as error:
            raise ConfigError(f"quota file {self._path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"quota file {self._path} is no text: {error}; write lines `TENANT OCTETS`") from None
        self.set(*parse_quotas(text, str(self._path), self._usual_limit))

    def set(self, limits: Mapping[int, int], default_limit: int = UNLIMITED) -> None:
        """Replace all limits: tenant ids to octets, and what holds for the others."""
        self.limits: dict[int, int] = dict(limits)
        self.default_limit = default_limit
        self.ledger.set_limits(np.array(list(limits), np.uint64), np.array(list(limits.values()), np.uint64), default_limit)

    def limit(self, tenant: int) -> int:
        """Octets that a tenant may have."""
        return self.limits.get(tenant, self.default_limit)

    def usage(self) -> dict[int, int]:
        """Octets that each tenant has, those being written among them."""
        return self.ledger.usage()

    @property
    def refused_count(self) -> int:
        """Puts that were refused because of a quota."""
        return self.ledger.refused_count


def tenant_named(text: str) -> int:
    """The id of a tenant that an operator names: by 16 hexadecimal digits, its id, or by its name."""
    return int(text, 16) if re.fullmatch("[0-9a-f]{16}", text) else tenant_id(text.encode())


def parse_quotas(text: str, name: str = "quotas", default_limit: int = UNLIMITED) -> tuple[dict[int, int], int]:
    """Limits by tenant id, and the default. Raises ConfigError naming the line."""
    limits: dict[int, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].rsplit(maxsplit=1)
        if not words:
            continue
        if len(words) != 2 or not words[1].isascii() or not words[1].isdigit() or int(words[1]) > UNLIMITED:
            raise ConfigError(f"{name}, line {number}: {line.strip()!r} is no '<tenant id or name> <octets>'")
        tenant, octets = words[0].strip(), int(words[1])
        if tenant == "*":
            default_limit = octets
            continue
        key = tenant_named(tenant)
        if key in limits:
            raise ConfigError(f"{name}, line {number}: tenant {tenant} was listed before")
        limits[key] = octets
    return limits, default_limit
