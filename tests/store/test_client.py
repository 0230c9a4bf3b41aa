"""The embedded client: what was put comes back whole, or is a miss."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kbtp_core.client import MISSING, TOO_LARGE, Client
from kbtp_core.store.embedded import EmbeddedStore


def test_a_value_comes_back_whole_and_the_first_writer_wins() -> None:
    with Client.embedded(b"ns", ram_bytes=4096, block_bytes=1024) as client:
        assert client.put([b"a", b"a"], [b"first", b"second"]).tolist() == [True, False]
        buffer = np.zeros(1024, np.uint8)
        assert client.get([b"a", b"b"], [buffer, bytearray(8)]).tolist() == [5, MISSING]
        assert bytes(buffer[:5]) == b"first"
        assert client.exists([b"a", b"b"]).tolist() == [True, False]
        assert client.remove([b"a", b"b"]).tolist() == [True, False]
        assert client.get([b"a"], [buffer]).tolist() == [MISSING]


def test_namespaces_keep_values_apart() -> None:
    store = EmbeddedStore(4096, 1024)
    Client(b"one", store).put([b"k"], [b"1"])
    assert Client(b"two", store).exists([b"k"]).tolist() == [False]


def test_a_value_that_was_read_outlives_one_that_was_not() -> None:
    client = Client.embedded(b"ns", ram_bytes=2048, block_bytes=1024)
    client.put([b"read", b"unread"], [b"1", b"2"])
    client.get([b"read"], [bytearray(1)])
    client.put([b"new"], [b"3"])
    assert client.exists([b"read", b"unread", b"new"]).tolist() == [True, False, True]


def test_wrong_sizes_are_said() -> None:
    client = Client.embedded(b"ns", ram_bytes=2048, block_bytes=1024)
    with pytest.raises(ValueError, match="1 to 1024 octets, not 1025"):
        client.put([b"k"], [bytes(1025)])
    with pytest.raises(ValueError, match="1 keys, but 2 buffers"):
        client.put([b"k"], [b"1", b"2"])
    client.put([b"k"], [bytes(10)])
    assert client.get([b"k"], [bytearray(9)]).tolist() == [TOO_LARGE]


class AgainstAModel(RuleBasedStateMachine):
    """The store may forget; it may never answer with other bytes, or lose a block."""

    def __init__(self) -> None:
        super().__init__()
        self.store = EmbeddedStore(4 * 16, 16)
        self.model: dict[bytes, bytes] = {}

    @rule(key=st.integers(0, 9), value=st.binary(min_size=1, max_size=16))
    def put(self, key: int, value: bytes) -> None:
        name = bytes([key]) * 16
        if self.store.put(name, memoryview(value)):
            self.model[name] = value
        else:
            assert name in self.model

    @rule(key=st.integers(0, 9))
    def get(self, key: int) -> None:
        name, out = bytes([key]) * 16, bytearray(16)
        length = self.store.get_into(name, memoryview(out))
        if length >= 0:
            assert bytes(out[:length]) == self.model[name]

    @rule(key=st.integers(0, 9))
    def remove(self, key: int) -> None:
        name = bytes([key]) * 16
        if self.store.remove(name):
            del self.model[name]
        assert not self.store.has(name)

    @invariant()
    def blocks_are_whole(self) -> None:
        self.store.check_integrity()


TestAgainstAModel = AgainstAModel.TestCase
TestAgainstAModel.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
