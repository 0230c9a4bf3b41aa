"""What every handle and generation may hold: the model that each loaded octet is judged by.

A `Life` is one life of a target, from its start to its crash or end. Each stored content is a repeated 8-octet word that no other store of
the life has, so that one wrong octet shows, and shows whose it is. The model believes no answer alone: the first observation (an answer to
a store, or a load) says which store a handle and generation holds, and every later one must agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from kbtp_core.protocol import next_generation

SMALLEST: Final = 16
PUBLISHED: Final = 96


class WrongRead(AssertionError):
    """Octets were loaded that the handle and generation asked for never held."""


@dataclass(eq=False, slots=True)
class Stored:
    """One store, from the moment it was sent (or, in a lent pool, one content of an engine's block)."""

    handle: int
    data: bytes
    order: int
    seals: bool
    is_alloc: bool
    generation: int = 0  # once observed
    has_failed: bool = False
    is_confirmed: bool = False


@dataclass
class Life:
    """One life of a target."""

    incarnation: int
    is_lent: bool
    published: list[tuple[int, int]] = field(default_factory=list)
    """Handles and generations that initiators talk about; some of them are gone."""
    stored: dict[bytes, Stored] = field(default_factory=dict)
    bindings: dict[tuple[int, int], Stored] = field(default_factory=dict)  # the ALLOC_STORE that bound it
    sealed: dict[tuple[int, int], Stored] = field(default_factory=dict)  # what a sealed block holds for good
    load_count: int = 0
    content_count: int = 0

    def content(self, length: int) -> bytes:
        """Octets that no other store of this life has."""
        self.content_count += 1
        word = (self.content_count * 0x9E37_79B9_7F4A_7C15 + self.incarnation & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little")
        return (word * (length // 8 + 1))[:length]

    def add(self, stored: Stored) -> Stored:
        self.stored[stored.data[:8]] = stored
        return stored

    def bound(self, stored: Stored, generation: int) -> None:
        """`stored` was seen to have bound its handle, with this generation."""
        key = (stored.handle, generation)
        if stored.generation not in (0, generation):
            raise WrongRead(f"handle {stored.handle}: one store has generations {stored.generation} and {generation}")
        if self.bindings.setdefault(key, stored) is not stored:
            raise WrongRead(f"handle {stored.handle}: two stores have bound generation {generation}")
        stored.generation = generation

    def loaded(self, handle: int, generation: int, data: bytes, *, is_sealed: bool) -> Stored:
        """A load was answered OK with these octets. Raises WrongRead."""
        self.load_count += 1
        stored = self.stored.get(data[:8])
        if stored is None or stored.data != data:
            said = "nobody stored" if stored is None else f"differ from the {len(stored.data)} stored under handle {stored.handle}"
            raise WrongRead(f"handle {handle} generation {generation}: {len(data)} octets that {said}: {data[:16].hex()}...")
        if stored.handle != handle or stored.has_failed:
            raise WrongRead(f"handle {handle} generation {generation}: octets of handle {stored.handle}, failed: {stored.has_failed}")
        if stored.is_alloc:
            self.bound(stored, generation)
        elif stored.generation != generation:
            raise WrongRead(f"handle {handle} generation {generation}: octets stored into generation {stored.generation}")
        if is_sealed and self.sealed.setdefault((handle, generation), stored) is not stored:
            raise WrongRead(f"handle {handle} generation {generation}: a sealed block has changed")
        return stored

    def publish(self, handle: int, generation: int) -> None:
        self.published.append((handle, generation))
        if len(self.published) > PUBLISHED:
            del self.published[0]

    def withdraw(self, handle: int, generation: int) -> None:
        if (handle, generation) in self.published:
            self.published.remove((handle, generation))

    def lend(self, handle: int, generation: int, data: bytes) -> None:
        """The engine has bound a handle of a lent pool to a block that holds `data`."""
        self.sealed[handle, generation] = Stored(handle, data, 0, True, True, generation)
        self.publish(handle, generation)

    def loaded_lent(self, handle: int, generation: int, data: bytes) -> None:
        self.load_count += 1
        held = self.sealed.get((handle, generation))
        if held is None or held.data[: len(data)] != data or not data:
            raise WrongRead(f"lent handle {handle} generation {generation}: wrong octets {data[:16].hex()}...")


def check_freed(generation: int, answered: int) -> None:
    """A FREE was answered OK."""
    if generation and answered != next_generation(generation):
        raise WrongRead(f"generation {generation} was freed and became {answered}")
