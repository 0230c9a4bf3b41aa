"""Messages of the keyed extension, octet for octet (docs/store-protocol.md)."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kbtp_core.errors import Malformed
from kbtp_core.protocol import keyed
from kbtp_core.protocol.keyed import KeyedOpcode
from kbtp_core.protocol.wire import DataDescriptor

HEAD = "00000000000000070000000000000000 00000000"  # after version, opcode and flags: request 7, no handle, generation or status
ID_A, ID_B = bytes(range(16)), bytes(range(16, 32))
IDS = np.frombuffer(ID_A + ID_B, np.uint8).reshape(2, 16)
TENANT = 0x6164AF84ACBC9ADE


def octets(text: str) -> bytes:
    return bytes.fromhex(text)


def items(kind: np.dtype[Any], *rows: tuple[Any, ...]) -> NDArray[Any]:
    out = np.zeros(len(rows), kind)
    for at, row in enumerate(rows):
        for name, value in zip(kind.names or (), row, strict=True):
            out[name][at] = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value
    return out


GOLDEN_REQUESTS: dict[str, tuple[keyed.KeyedRequest, str]] = {
    "lookup": (
        keyed.Lookup(7, TENANT, 5, IDS),
        f"0180 0000 {HEAD} 6164af84acbc9ade 00000005 00000002 {ID_A.hex()} {ID_B.hex()}",
    ),
    "get": (
        keyed.Get(7, TENANT, 5, 0xABCD, items(keyed.GET_ITEM, (ID_A, 0x10000, 4096, 0))),
        f"0190 0000 {HEAD} 6164af84acbc9ade 00000005 00000001 0000abcd 00000000 {ID_A.hex()} 0000000000010000 00001000 00000000",
    ),
    "publish": (
        keyed.Publish(7, TENANT, 1, items(keyed.PUBLISH_ITEM, (ID_A, 0x1122, 3, 0, 0xDEADBEEF))),
        f"0182 0000 {HEAD} 6164af84acbc9ade 00000001 00000001 {ID_A.hex()} 0000000000001122 0003 0000 deadbeef",
    ),
    "remove": (keyed.Remove(7, TENANT, IDS[:1]), f"0184 0000 {HEAD} 6164af84acbc9ade 00000001 {ID_A.hex()}"),
    "pin": (
        keyed.Pin(7, 1, 5000, items(keyed.PIN_ITEM, (0x1122, 3))),
        f"0186 0000 {HEAD} 00000001 00001388 00000001 0000000000001122 0003",
    ),
    "load_range": (
        keyed.LoadRange(7, 0x1122, 3, DataDescriptor(0xABCD, 0x10000, 1024), offset=4096, length=512),
        "0188 0000 0000000000000007 0000000000001122 0003 0000 00001000 00000200 0000abcd 0000000000010000 00000400",
    ),
    "namespace": (keyed.SetNamespace(7, TENANT, 0x55, 60), f"018a 0000 {HEAD} 6164af84acbc9ade 0000000000000055 0000003c 00000000"),
    "remove_namespace": (keyed.RemoveNamespace(7, TENANT, 0x55), f"018c 0000 {HEAD} 6164af84acbc9ade 0000000000000055"),
    "list": (keyed.List(7, TENANT, 0, 9, 100), f"018d 0000 {HEAD} 6164af84acbc9ade 0000000000000000 0000000000000009 00000064"),
}
GOLDEN_ANSWERS: dict[str, tuple[keyed.KeyedAnswer, str]] = {
    "lookup_result": (
        keyed.LookupResult(7, items(keyed.LOOKUP_ITEM, (0x1122, 3, 1, 1, 4096))),
        f"0181 0000 {HEAD} 00000001 0000000000001122 0003 01 01 00001000",
    ),
    "get_result": (
        keyed.GetResult(7, items(keyed.LOOKUP_ITEM, (0x1122, 3, 1, 4, 4096))),
        f"0191 0000 {HEAD} 00000001 0000000000001122 0003 01 04 00001000",
    ),
    "publish_result": (
        keyed.PublishResult(7, items(keyed.PUBLISH_RESULT, (5, 3, 0x1122))),
        f"0183 0000 {HEAD} 00000001 0005 0003 0000000000001122",
    ),
    "pin_result": (keyed.PinResult(7, np.array([0, 8], np.uint16)), f"0187 0000 {HEAD} 00000002 0000 0008"),
    "list_result": (
        keyed.ListResult(7, 10, items(keyed.LIST_ITEM, (ID_A, 4096, 1, 0, 0, 59))),
        f"018e 0000 {HEAD} 000000000000000a 00000001 {ID_A.hex()} 00001000 01 00 0000 0000003b",
    ),
}


@pytest.mark.parametrize("name", GOLDEN_REQUESTS)
def test_a_request_has_these_octets_and_is_read_back(name: str) -> None:
    message, text = GOLDEN_REQUESTS[name]
    assert message.encode() == octets(text)
    again = keyed.parse_keyed(octets(text))
    assert type(again) is type(message)
    assert again.encode() == octets(text)


@pytest.mark.parametrize("name", GOLDEN_ANSWERS)
def test_an_answer_has_these_octets_and_is_read_back(name: str) -> None:
    message, text = GOLDEN_ANSWERS[name]
    assert message.encode() == octets(text)
    again = keyed.parse_keyed_answer(octets(text))
    assert type(again) is type(message)
    assert again.encode() == octets(text)


@pytest.mark.parametrize("name", GOLDEN_REQUESTS)
def test_a_request_that_is_cut_or_too_long_is_malformed(name: str) -> None:
    whole = octets(GOLDEN_REQUESTS[name][1])
    for wrong in [whole[:end] for end in range(len(whole))] + [whole + b"\0"]:
        with pytest.raises(Malformed):
            keyed.parse_keyed(wrong)


@pytest.mark.parametrize("name", GOLDEN_ANSWERS)
def test_an_answer_that_is_cut_or_too_long_is_malformed(name: str) -> None:
    whole = octets(GOLDEN_ANSWERS[name][1])
    for wrong in [whole[:end] for end in range(len(whole))] + [whole + b"\0"]:
        with pytest.raises(Malformed):
            keyed.parse_keyed_answer(wrong)


@pytest.mark.parametrize(
    "text",
    [
        f"0180 0001 {HEAD} 6164af84acbc9ade 00000000 00000000",  # a flag of the header
        f"0280 0000 {HEAD} 6164af84acbc9ade 00000000 00000000",  # another version
        f"0180 0000 {HEAD} 6164af84acbc9ade 00000008 00000000",  # an undefined flag of LOOKUP
        f"0186 0000 {HEAD} 00000002 00000000 00000000",  # and of PIN
        f"0180 0000 {HEAD} 6164af84acbc9ade 00000000 10000000",  # a count that would wrap
        f"0181 0000 {HEAD} 00000000",  # an answer is no request
        f"018f 0000 {HEAD}",
        f"0190 0000 {HEAD} 6164af84acbc9ade 00000002 00000000 0000abcd 00000000",  # a GET has no PREFIX
    ],
)
def test_what_the_page_does_not_define_is_malformed(text: str) -> None:
    with pytest.raises(Malformed):
        keyed.parse_keyed(octets(text))


@given(st.binary(max_size=120).map(lambda tail: b"\x01" + tail), st.integers(0x80, 0x9F))
def test_any_octets_are_read_back_as_they_are_or_malformed(tail: bytes, opcode: int) -> None:
    data = bytes([1, opcode]) + tail
    for parse in (keyed.parse_keyed, keyed.parse_keyed_answer):
        try:
            message = parse(data)
        except Malformed:
            continue
        assert len(message.encode()) == len(data)


def test_a_message_has_as_many_items_as_fit_the_granted_inline_length() -> None:
    assert keyed.items_limit(KeyedOpcode.LOOKUP, 4096) == (4096 + 64 - 40) // 16 == 257
    assert keyed.items_limit(KeyedOpcode.PUBLISH, 4096) == (4096 + 64 - 40) // 32 == 128
    assert keyed.items_limit(KeyedOpcode.GET, 4096) == (4096 + 64 - 48) // 32 == 128
    assert keyed.items_limit(KeyedOpcode.LOOKUP, 0) == (128 - 40) // 16 == 5
    assert keyed.items_limit(KeyedOpcode.PUBLISH, 0) == (128 - 40) // 32 == 2


def test_an_answer_is_never_longer_than_a_message_may_be() -> None:
    for inline_bytes in (0, 100, 4096, 65536):
        limit = keyed.message_limit(inline_bytes)
        lookups, publishes, pins, lists = (
            keyed.items_limit(kind, inline_bytes) for kind in (KeyedOpcode.LOOKUP, KeyedOpcode.PUBLISH, KeyedOpcode.PIN, KeyedOpcode.LIST)
        )
        assert len(keyed.LookupResult(1, np.zeros(lookups, keyed.LOOKUP_ITEM)).encode()) <= limit
        assert len(keyed.PublishResult(1, np.zeros(publishes, keyed.PUBLISH_RESULT)).encode()) <= limit
        assert len(keyed.PinResult(1, np.zeros(pins, np.uint16)).encode()) <= limit
        assert len(keyed.ListResult(1, 0, np.zeros(lists, keyed.LIST_ITEM)).encode()) <= limit


def test_a_namespace_id_is_the_head_of_a_framed_hash() -> None:
    assert keyed.namespace_id(b"test/model") == int(hashlib.sha256(b"KBTPNS1\x0a\0\0\0\0\0\0\0test/model").hexdigest()[:16], 16)
    with pytest.raises(ValueError, match="empty"):
        keyed.namespace_id(b"")
