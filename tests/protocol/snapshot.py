"""Put a web of live objects back to where it was: for searches that try many steps from one state.

Copies would lose what ties the objects together, such as arrays that are views of one another. So every object stays, and what it
held is written back into it. Immutable values are not looked into.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Any

import numpy as np

_IMMUTABLE = frozenset({int, str, bytes, float, bool, type(None)})
_CONTAINERS = (list, dict, set, deque, bytearray)


class Snapshot:
    """All that `root` leads to, as it is now."""

    def __init__(self, root: object) -> None:
        self._arrays: list[tuple[np.ndarray, np.ndarray]] = []
        self._objects: list[tuple[Any, dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        seen: set[int] = set()
        waiting = [root]
        while waiting:
            value = waiting.pop()
            if type(value) in _IMMUTABLE or id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, np.ndarray):
                self._arrays.append((value, value.copy()))
            elif isinstance(value, _CONTAINERS):
                self._containers.append((value, value.copy()))
                waiting += value.values() if isinstance(value, dict) else () if isinstance(value, bytearray) else value
            elif hasattr(value, "__dict__") and not isinstance(value, (type, Enum)) and _is_ours(value):
                self._objects.append((value, dict(value.__dict__)))
                waiting += value.__dict__.values()

    def restore(self) -> None:
        """Write everything back."""
        for array, octets in self._arrays:
            array[...] = octets
        for value, fields in self._objects:
            value.__dict__.clear()
            value.__dict__.update(fields)
        for container, content in self._containers:
            container.clear()
            if isinstance(container, (list, deque, bytearray)):
                container.extend(content)
            else:
                container.update(content)


def _is_ours(value: object) -> bool:
    kind = type(value)
    is_frozen = getattr(kind, "__dataclass_params__", None) is not None and kind.__dataclass_params__.frozen
    return kind.__module__.startswith(("kbtp_core.", "tests.")) and not is_frozen
