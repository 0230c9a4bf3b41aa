"""The cases that trees.py goes through: what a page is made of, times how it is moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PLACES: Final = (
    ("layer_first", "direct"),
    ("page_first_direct", "direct"),
    ("layer_first", "kernel"),
    ("page_first", "kernel"),
    ("page_head", "kernel"),
)
"""Layout of the host pool and SGLang's io backend, as they go together."""


@dataclass(frozen=True)
class Case:
    model: str
    layout: str
    io: str
    interface: str

    @property
    def name(self) -> str:
        return f"{self.model}-{self.layout}-{self.io}-{self.interface}"


def _exists(model: str, layout: str) -> bool:
    """Whether SGLang has such pools."""
    if model == "mamba":
        return layout in ("page_first", "page_first_direct")
    return model != "mla" or layout != "page_head"


CASES: Final = [
    Case(model, layout, io, interface)
    for model in ("full", "swa", "mamba", "mla")
    for layout, io in PLACES
    if _exists(model, layout)
    for interface in ("v1", "generic")
]
