"""The executor and the software target, given the same messages, answer the same octets and leave the same memory (draft section 8)."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import numpy as np
import pytest

from kbtp_core.protocol.constants import Flag, Opcode
from kbtp_core.protocol.wire import AllocStore, Bind, CompletionDescriptor, DataDescriptor, Free, Load, Store
from tests.executor.twins import BASE, BLOCK, Connection, Side, make_side

WORLDS = int(os.environ.get("KBTP_DIFFERENTIAL_WORLDS", "200"))
STEPS = 250
SLOT = 3 * BLOCK  # of an initiator's memory, one for each request
MEMORY = (STEPS + 2) * SLOT
HANDLES, BLOCKS = 12, 12
STAG = 0x77


class Twins:
    """One random world, on both sides at once.

    Every operation ends before the next message, or (`is_busy`) many are under way. In a busy world blocks come from the ring in an order
    that neither side promises, so each session keeps to its own handles, has a block for each, and block offsets are not compared.
    """

    def __init__(self, seed: int, *, is_busy: bool) -> None:
        self.random = random.Random(seed)
        self.is_busy = is_busy
        domains = frozenset({"a"}) if self.random.random() < 0.5 else None
        self.sides = [make_side(BLOCKS, HANDLES, has_executor=native, trust_domains=domains) for native in (False, True)]
        for side in self.sides:
            for number in range(2):
                octets = np.random.default_rng(seed * 2 + number).integers(1, 256, MEMORY, np.uint8)
                side.connect(HANDLES // 2 if is_busy else 4, HANDLES // 2, octets, trust_domain="a")
        self.request_count = 0
        self.log: list[str] = []

    @property
    def soft(self) -> Side:
        return self.sides[0]

    @property
    def native_count(self) -> int:
        return sum(connection.native_count for connection in self.sides[1].connections)

    def run(self) -> None:
        for step in range(STEPS):
            number = int(self.random.random() * 2)
            if not self.is_busy:
                self._on_both(number, lambda connection, message=self._message(number): connection.send(message))  # type: ignore[misc]
                self._on_both(number, _finish_everything)
                if step % 10 == 0:
                    self.compare()
            elif self.random.random() < 0.6:
                self._on_both(number, lambda connection, message=self._message(number): connection.send(message))  # type: ignore[misc]
            else:
                self._on_both(number, _finish_everything if self.random.random() < 0.2 else _finish_oldest)
        for number in range(2):
            self._on_both(number, _finish_everything)
        self.compare()
        for number in range(2):
            self._on_both(number, Connection.disconnect)
        for side in self.sides:
            side.target.check_integrity()

    def compare(self) -> None:
        """Nothing is under way: all that was answered, and all memory, octet by octet."""
        trace = "\n".join(self.log[-12:])
        soft, native = self.sides
        for ours, theirs in zip(soft.connections, native.connections, strict=True):
            assert self._answers(ours) == self._answers(theirs), trace
            assert ours.memory.tobytes() == theirs.memory.tobytes(), trace
        ours, theirs = soft.target, native.target
        if self.is_busy:
            for name in ("flags", "generation", "data_length"):
                assert ours.table.entries[name].tolist() == theirs.table.entries[name].tolist(), trace
            assert _contents(soft) == _contents(native), trace
        else:
            assert ours.table.entries.tobytes() == theirs.table.entries.tobytes(), trace
            assert soft.memory.tobytes() == native.memory.tobytes(), trace
            for ring in ("slots", "counters"):
                assert getattr(ours.pool.ring, ring).tobytes() == getattr(theirs.pool.ring, ring).tobytes(), trace  # type: ignore[union-attr]
        for side in self.sides:
            side.target.check_integrity()

    def _answers(self, connection: Connection) -> list[tuple[bytes, int | None]]:
        answers = [(data[:32] if self.is_busy else data, stag) for data, stag in connection.answers]
        return sorted(answers, key=lambda answer: (answer[0][4:12], answer[0]))

    def _on_both(self, number: int, step: Callable[[Connection], None]) -> None:
        for side in self.sides:
            step(side.connections[number])

    # Messages --------------------------------------------------------------------------------------------------------

    def _message(self, number: int) -> bytes:
        """Mostly sound requests, and every kind of unsound one."""
        random = self.random
        request_id = self._request_id()
        handle = BASE + (random.randrange(HANDLES // 2) + number * HANDLES // 2 if self.is_busy else random.randrange(-1, HANDLES + 1))
        kind = self._kind(handle)
        generation = 0 if random.random() < 0.6 else self._generation(handle)
        length = random.randrange(0, BLOCK + 2 if self.is_busy else 2 * BLOCK + 3) if random.random() < 0.15 else BLOCK
        data = DataDescriptor(STAG, request_id * SLOT, length)
        if kind == "load":
            flags = self._flags(Flag.INVALIDATE, Flag.ALLOW_UNSEALED)
            message = Load(request_id, handle, generation, data, flags, self._record(flags)).encode()
        elif kind == "free":
            flags = self._flags()
            message = Free(request_id, handle, generation, flags, self._record(flags)).encode()
        elif kind == "bind":
            message = Bind(request_id, handle, generation, 0, 1, 0).encode()
        elif kind == "noise":
            message = random.randbytes(random.randrange(0, 60))
            message = bytes([1, random.randrange(3, 9)]) + message if random.random() < 0.5 else message
        else:
            make = Store if kind == "store" else AllocStore
            if random.random() < 0.5:
                inline = random.randbytes(length)
                flags = self._flags(Flag.SEAL) | Flag.INLINE
                message = make(request_id, handle, generation, DataDescriptor(0, 0, length), flags, self._record(flags), inline).encode()
            else:
                flags = self._flags(Flag.SEAL, Flag.INVALIDATE)
                message = make(request_id, handle, generation, data, flags, self._record(flags)).encode()
        if random.random() < (0.0 if self.is_busy else 0.05):  # anything may be wrong with a message
            at = random.randrange(len(message) + 1)
            message = message[:at] if random.random() < 0.5 else message[:at] + random.randbytes(1) + message[at + 1 :]
        if message[1:2] in (bytes([Opcode.HELLO]), bytes([Opcode.GOODBYE])):
            message = message[:1] + bytes([Opcode.LOAD]) + message[2:]
        self.log.append(f"{number}: {message[:40].hex()}")
        return message

    def _kind(self, handle: int) -> str:
        """Most often what the handle is ready for."""
        if not self.is_busy and self.random.random() < 0.04:  # answered at once, whatever is under way
            return self.random.choice(("bind", "noise"))
        index = self.soft.target.table.index_of(handle)
        if index is None or self.random.random() < 0.3:
            return self.random.choice(("load", "store", "alloc", "free"))
        entry = self.soft.target.table.entry(index)
        if not entry.is_valid:
            return "alloc"
        return self.random.choice(("load", "free") if entry.is_sealed else ("load", "store", "store", "free"))

    def _request_id(self) -> int:
        self.request_count += 1
        return self.request_count

    def _flags(self, *choices: Flag) -> int:
        flags = sum(flag for flag in choices if self.random.random() < 0.4)
        return flags | (Flag.RECORD if self.random.random() < 0.01 and not self.is_busy else 0)

    def _record(self, flags: int) -> CompletionDescriptor | None:
        return CompletionDescriptor(STAG, MEMORY - 24) if flags & Flag.RECORD else None

    def _generation(self, handle: int) -> int:
        index = self.soft.target.table.index_of(handle)
        current = 1 if index is None else self.soft.target.table.entry(index).generation
        return current if self.random.random() < 0.8 else max(0, current - 1)


def _finish_oldest(connection: Connection) -> None:
    if connection.operations:
        connection.finish_one()


def _finish_everything(connection: Connection) -> None:
    for _ in range(10_000):
        if not connection.operations:
            return
        connection.finish_one()
    raise AssertionError("operations without end")


def _contents(side: Side) -> list[bytes | None]:
    """What each handle names."""
    entries = [side.target.table.entry(index) for index in range(HANDLES)]
    return [side.memory[e.block_offset : e.block_offset + e.data_length].tobytes() if e.is_valid else None for e in entries]


@pytest.mark.parametrize("is_busy", [False, True], ids=["one at a time", "many under way"])
@pytest.mark.parametrize("first", range(0, WORLDS, 100))
def test_both_answer_the_same_and_leave_the_same_memory(first: int, is_busy: bool) -> None:
    native = total = 0
    for seed in range(first, min(first + 100, WORLDS)):
        twins = Twins(seed, is_busy=is_busy)
        try:
            twins.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        native += twins.native_count
        total += twins.request_count
    assert native > total // 4, "hardly anything ran natively: this proves nothing"
