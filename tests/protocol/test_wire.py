"""Messages as octets: golden encodings, and that no octets make the parser fail in any way but Malformed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbtp_core.errors import Malformed
from kbtp_core.protocol.auth import is_proved, proved
from kbtp_core.protocol.constants import Flag, Opcode, Status
from kbtp_core.protocol.hello import DirectAccess, Hello, HelloAck
from kbtp_core.protocol.wire import (
    COMPLETION,
    HEADER,
    RECORD,
    REQUEST,
    AllocStore,
    Bind,
    Completion,
    CompletionDescriptor,
    DataDescriptor,
    Free,
    Goodbye,
    Header,
    Load,
    Message,
    Store,
    Unknown,
    decode_completions,
    decode_records,
    encode_frees,
    encode_record,
    encode_requests,
    parse,
)

DATA = DataDescriptor(0xABCD0001, 0x1122334455667788, 0x1000)
RECORD_SLOT = CompletionDescriptor(0xABCD0002, 0x20)
GOLDEN: list[tuple[Message, str]] = [
    (
        Load(0x0102030405060708, 0x1112131415161718, 0x2122, DATA, Flag.INVALIDATE),
        "01030008 0102030405060708 1112131415161718 21220000 abcd0001 1122334455667788 00001000",
    ),
    (
        Load(1, 2, 3, DATA, Flag.RECORD | Flag.ALLOW_UNSEALED, RECORD_SLOT),
        "01030014 0000000000000001 0000000000000002 00030000 abcd0001 1122334455667788 00001000 abcd0002 0000000000000020 00000000",
    ),
    (
        Store(1, 2, 0, DataDescriptor(0, 0, 3), Flag.INLINE | Flag.SEAL, None, b"abc"),
        "01040003 0000000000000001 0000000000000002 00000000 00000000 0000000000000000 00000003 616263",
    ),
    (
        AllocStore(1, 2, 0, DATA, Flag.NONE),
        "01050000 0000000000000001 0000000000000002 00000000 abcd0001 1122334455667788 00001000",
    ),
    (Free(9, 2, 4), "01060000 0000000000000009 0000000000000002 00040000"),
    (
        Bind(1, 2, 0, 0x01020304, 64, 0x1000, Flag.SEAL),
        "01070002 0000000000000001 0000000000000002 00000000 01020304 00000040 0000000000001000",
    ),
    (
        Completion(1, 2, 3, Status.STALE_GENERATION),
        "01080000 0000000000000001 0000000000000002 00030008 00000000 00000000 0000000000000000",
    ),
    (
        Completion(1, 2, 3, Status.OK, 0x40, 0x2000),
        "01080000 0000000000000001 0000000000000002 00030000 00000040 00000000 0000000000002000",
    ),
    (Goodbye(0, Status.SHUTTING_DOWN), "01090000 0000000000000000 0000000000000000 0000000f"),
    (
        Hello(5, 0x0A0B0C0D0E0F0001, 0x21, 4096, 10, 20, 30, 40, bytes(range(16)), "kv", "é"),
        "01010000 0000000000000005 0000000000000000 00000000 00000021 00001000 0000000a 00000014 0000001e 00000028"
        "0a0b0c0d0e0f0001 000102030405060708090a0b0c0d0e0f 0002 6b76 0002 c3a9 0000",
    ),
    (
        HelloAck(5, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, DirectAccess(*range(12, 23)), bytes(16), "t", bytes(range(32))),
        "01020000 0000000000000005 0000000000000000 00000000 00000001 00000002 00000003 00000004 0000000000000005 00000006"
        "0000000000000007 00000008 00000009 0000000a 000000000000000b 0000000c 0000000d 000000000000000e 0000000f"
        "0000000000000010 00000011 00000012 0000000000000013 00000014 00000015 0000000000000016"
        "00000000000000000000000000000000 0001 74 0020 000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
    ),
    (
        Hello(1, 1, client_name="", trust_domain="x", proof=bytes(range(32))),
        "01010000 0000000000000001 0000000000000000 00000000" + "00" * 24 + "0000000000000001" + "00" * 16 + "0000 0001 78 0020"
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
    ),
    (Unknown(Header(0x80, 77), b"xyz"), "01800000 000000000000004d 0000000000000000 00000000 78797a"),
]


@pytest.mark.parametrize(("message", "octets"), GOLDEN)
def test_a_message_has_exactly_these_octets_and_comes_back_from_them(message: Message, octets: str) -> None:
    expected = bytes.fromhex(octets)
    assert message.encode() == expected
    assert parse(expected) == message


@pytest.mark.parametrize(("dtype", "size"), [(HEADER, 24), (REQUEST, 40), (COMPLETION, 40), (RECORD, 24)])
def test_array_formats_have_the_sizes_of_the_draft(dtype: np.dtype[np.void], size: int) -> None:
    assert dtype.itemsize == size


u16, u32, u64 = (st.integers(0, (1 << bits) - 1) for bits in (16, 32, 64))
names = st.text(max_size=60)
nonces = st.binary(min_size=16, max_size=16)
proofs = st.sampled_from([b"", bytes(range(32))])
data_descriptors = st.builds(DataDescriptor, u32, u64, u32)
slots = st.builds(CompletionDescriptor, u32, u64)


def with_record(cls: type[Load] | type[Store], allowed: Flag) -> st.SearchStrategy[Message]:
    def build(request_id: int, handle: int, generation: int, data: DataDescriptor, bits: int, slot: CompletionDescriptor) -> Message:
        flags = Flag(bits & allowed)
        return cls(request_id, handle, generation, data, flags, slot if flags & Flag.RECORD else None)

    return st.builds(build, u64, u64, u16, data_descriptors, st.integers(0, 31), slots)


def inline(cls: type[Store]) -> st.SearchStrategy[Message]:
    def build(request_id: int, handle: int, data: bytes, seal: bool) -> Message:
        flags = Flag.INLINE | (Flag.SEAL if seal else Flag.NONE)
        return cls(request_id, handle, 0, DataDescriptor(0, 0, len(data)), flags, None, data)

    return st.builds(build, u64, u64, st.binary(max_size=50), st.booleans())


messages: st.SearchStrategy[Message] = st.one_of(
    with_record(Load, Flag.RECORD | Flag.INVALIDATE | Flag.ALLOW_UNSEALED),
    with_record(Store, Flag.SEAL | Flag.RECORD | Flag.INVALIDATE),
    with_record(AllocStore, Flag.SEAL | Flag.RECORD | Flag.INVALIDATE),
    inline(Store),
    inline(AllocStore),
    st.builds(Free, u64, u64, u16),
    st.builds(lambda i, slot: Free(i, 1, 2, Flag.RECORD, slot), u64, slots),
    st.builds(Bind, u64, u64, u16, u32, u32, u64, st.sampled_from([Flag.NONE, Flag.SEAL])),
    st.builds(Completion, u64, u64, u16, u16, u32, u64, u32),
    st.builds(Goodbye, u64, u16),
    st.builds(Hello, u64, st.integers(1, (1 << 64) - 1), u32, u32, u32, u32, u32, u32, nonces, names, names, proofs),
    st.builds(HelloAck, u64, u16, u32, u32, u32, u32, u64, u32, u64, u32, u32, u32, u64, nonce=nonces, target_name=names, proof=proofs),
    st.builds(lambda opcode, i, body: Unknown(Header(opcode, i), body), st.integers(10, 255), u64, st.binary(max_size=40)),
)


@given(messages)
def test_every_message_comes_back_from_its_octets(message: Message) -> None:
    assert parse(message.encode()) == message


@given(st.binary(max_size=700))
def test_any_octets_parse_to_a_message_or_are_malformed(octets: bytes) -> None:
    check_parse(octets)


@settings(max_examples=300)
@given(messages, st.data())
def test_a_mutated_message_parses_to_a_message_or_is_malformed(message: Message, data: st.DataObject) -> None:
    octets = bytearray(message.encode())
    kind = data.draw(st.sampled_from(["flip", "cut", "grow", "opcode"]))
    if kind == "flip":
        octets[data.draw(st.integers(0, len(octets) - 1))] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del octets[data.draw(st.integers(0, len(octets) - 1)) :]
    elif kind == "grow":
        octets += data.draw(st.binary(min_size=1, max_size=40))
    else:
        octets[1] = data.draw(st.integers(0, 10))
    check_parse(bytes(octets))


def check_parse(octets: bytes) -> None:
    try:
        message = parse(octets)
    except Malformed:
        return
    assert parse(message.encode()) == message


HELLO_HEAD, ACK_HEAD = Hello(1, 1).encode()[:72], HelloAck(1).encode()[:156]


@pytest.mark.parametrize(
    ("octets", "why"),
    [
        (b"", "a message of 0 octets is shorter than the header of 24"),
        (bytes(23), "a message of 23 octets is shorter than the header of 24"),
        (Load(1, 2, 3, DATA).encode() + b"x", "LOAD of 41 octets, expected 40"),
        (Load(1, 2, 3, DATA).encode()[:-1], "LOAD of 39 octets is shorter than 40"),
        (Store(1, 2, 3, DATA).encode()[:24], "STORE of 24 octets is shorter than 40"),
        (AllocStore(1, 2, 3, DATA).encode() + b"x", "ALLOC_STORE of 41 octets, expected 40"),
        (Load(1, 2, 3, DATA, Flag.RECORD, RECORD_SLOT).encode()[:-1], "LOAD of 55 octets has no room for its completion descriptor"),
        (Free(1, 2, 3, Flag.RECORD, RECORD_SLOT).encode()[:24], "FREE of 24 octets has no room for its completion descriptor"),
        (Free(1, 2, 3, Flag.RECORD, RECORD_SLOT).encode() + b"x", "FREE of 41 octets, expected 40"),
        (Store(1, 2, 0, DataDescriptor(0, 0, 4), Flag.INLINE, None, b"abc").encode(), "inline length 4, but 3 octets arrived"),
        (
            Store(1, 2, 0, DataDescriptor(1, 0, 3), Flag.INLINE, None, b"abc").encode(),
            "an inline store must have a zero STag and a zero Tagged Offset",
        ),
        (
            Store(1, 2, 0, DataDescriptor(0, 1, 3), Flag.INLINE, None, b"abc").encode(),
            "an inline store must have a zero STag and a zero Tagged Offset",
        ),
        (
            Store(1, 2, 0, DataDescriptor(0, 0, 1), Flag.INLINE | Flag.INVALIDATE, None, b"x").encode(),
            "an inline store names no STag that INVALIDATE could mean",
        ),
        (Load(1, 2, 3, DATA, Flag.SEAL).encode(), "LOAD with undefined flags 0x0002"),
        (Load(1, 2, 3, DATA, Flag(0x20)).encode(), "LOAD with undefined flags 0x0020"),
        (Free(1, 2, 3, Flag.INVALIDATE).encode(), "FREE with undefined flags 0x0008"),
        (Header(Opcode.GOODBYE, 1, flags=0x8001).encode(), "GOODBYE with undefined flags 0x8001"),
        (Bind(1, 2, 0, 3, 4, 5).encode()[:-1], "BIND of 39 octets, expected 40"),
        (Header(Opcode.COMPLETION, 1).encode(), "COMPLETION of 24 octets, expected 40"),
        (Header(Opcode.GOODBYE, 1).encode() + b"\0", "GOODBYE of 25 octets, expected 24"),
        (HELLO_HEAD[:-1], "HELLO of 71 octets is shorter than its fixed part"),
        (HELLO_HEAD, "the message ends before the length of its client name"),
        (HELLO_HEAD + b"\0", "the message ends before the length of its client name"),
        (HELLO_HEAD + b"\0\2a", "the message ends inside its client name"),
        (HELLO_HEAD + b"\0\1a\0", "the message ends before the length of its trust domain"),
        (HELLO_HEAD + b"\0\1a\0\3bc", "the message ends inside its trust domain"),
        (HELLO_HEAD + b"\0\0\0\0", "the message ends before the length of its proof"),
        (Hello(1, 0).encode(), "HELLO with incarnation zero"),
        (Hello(1, 1).encode() + b"x", "1 octets after the proof"),
        (HELLO_HEAD + b"\0\0\0\0\0\5" + bytes(5), "a proof of 5 octets, expected 0 or 32"),
        (
            HELLO_HEAD + b"\0\1\xff" + b"\0\0\0\0",
            "the client name is no UTF-8: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
        ),
        (HELLO_HEAD + b"\1\0" + b"a" * 256 + b"\0\0\0\0", "a client name of 256 octets is longer than 255"),
        (HELLO_HEAD + b"\0\0\1\0" + b"a" * 256 + b"\0\0", "a trust domain of 256 octets is longer than 255"),
        (ACK_HEAD[:-1], "HELLO_ACK of 155 octets is shorter than its fixed part"),
        (ACK_HEAD, "the message ends before the length of its target name"),
        (ACK_HEAD + b"\1\0" + b"a" * 256 + b"\0\0", "a target name of 256 octets is longer than 255"),
        (ACK_HEAD + b"\0\0\0\x20" + bytes(31), "the message ends inside its proof"),
    ],
)
def test_a_malformed_message_says_what_is_wrong_with_it(octets: bytes, why: str) -> None:
    with pytest.raises(Malformed) as refused:
        parse(octets)
    assert str(refused.value) == why


def test_a_record_flag_and_a_descriptor_go_together() -> None:
    for message in (Load(7, 2, 3, DATA, Flag.RECORD), Load(7, 2, 3, DATA, Flag.NONE, RECORD_SLOT)):
        with pytest.raises(ValueError, match=r"^LOAD 7: the RECORD flag and a completion descriptor go together$"):
            message.encode()


def test_a_name_or_a_proof_that_does_not_fit_is_not_sent() -> None:
    longest = Hello(1, 1, client_name="é" * 127 + "x")
    assert len(longest.encode()) == 78 + 255
    assert parse(longest.encode()) == longest
    with pytest.raises(ValueError, match=r"^a name of 256 octets is longer than 255: b'a{40}'\.\.\.$"):
        Hello(1, 1, client_name="a" * 256).encode()
    with pytest.raises(ValueError, match=r"^a proof has 0 or 32 octets, not 31$"):
        HelloAck(1, proof=bytes(31)).encode()


def test_a_message_of_another_version_keeps_its_request_id() -> None:
    message = parse(Header(Opcode.LOAD, 99, version=2).encode())
    assert message == Unknown(Header(Opcode.LOAD, 99, version=2))


def test_reserved_octets_are_ignored_on_receipt() -> None:
    octets = bytearray(Load(1, 2, 3, DATA).encode())
    octets[22:24] = b"\xff\xff"  # the Status of a request
    assert parse(bytes(octets)) == Load(1, 2, 3, DATA)


def test_a_batch_of_requests_has_the_octets_of_its_messages() -> None:
    ids, handles = np.arange(3, dtype=np.uint64) + 5, np.array([7, 1 << 63, 9], np.uint64)
    generations = np.array([0, 65535, 2], np.uint16)
    offsets, lengths = np.array([0, 1 << 40, 64], np.uint64), np.array([1, 2, 3], np.uint32)
    raw = encode_requests(Opcode.LOAD, ids, handles, generations, 0xABCD0001, offsets, lengths, Flag.INVALIDATE)
    for i in range(3):
        data = DataDescriptor(0xABCD0001, int(offsets[i]), int(lengths[i]))
        assert raw[i].tobytes() == Load(5 + i, int(handles[i]), int(generations[i]), data, Flag.INVALIDATE).encode()
    frees = encode_frees(ids, handles, generations)
    assert frees[1].tobytes() == Free(6, 1 << 63, 65535).encode()


def test_a_batch_of_completions_is_decoded_or_refused_as_a_whole() -> None:
    good = [Completion(i, 10 + i, 2, i, 64, 4096 * i).encode() for i in range(3)]
    decoded = decode_completions(np.frombuffer(b"".join(good), np.uint8).reshape(3, 40))
    assert decoded["request_id"].tolist() == [0, 1, 2]
    assert decoded["block_offset"].tolist() == [0, 4096, 8192]
    bad = [*good, Load(1, 2, 3, DATA).encode()]
    with pytest.raises(Malformed, match="message 3 of 4"):
        decode_completions(np.frombuffer(b"".join(bad), np.uint8).reshape(4, 40))


def test_completion_records_have_the_fields_of_their_completions() -> None:
    completions = [Completion(7 << 32, 100, 5, 0, 64, 1 << 40), Completion(7 << 32 | 1, 101, 65535, 18)]
    octets = b"".join(encode_record(completion) for completion in completions)
    assert octets[:24].hex() == "0000000700000000" + "0000" + "0005" + "00000040" + "0000010000000000"
    decoded = decode_records(np.frombuffer(octets, np.uint8).reshape(2, 24))
    assert [decoded[name].tolist() for name in ("request_id", "status", "generation", "data_length", "block_offset")] == [
        [7 << 32, 7 << 32 | 1],
        [0, 18],
        [5, 65535],
        [64, 0],
        [1 << 40, 0],
    ]
    assert (decoded["handle"].tolist(), decoded["checksum"].tolist()) == ([0, 0], [0, 0])
    with pytest.raises(Malformed, match=r"^completion records of 40 octets, expected 24$"):
        decode_records(np.zeros((1, 40), np.uint8))


def test_a_proof_is_the_hmac_of_the_message_before_it_and_the_peers_nonce() -> None:
    hello = proved(Hello(1, 2, trust_domain="d"), b"N" * 16, b"secret")
    # HMAC-SHA-256("secret", 77 octets of HELLO + 16 of nonce), made with the openssl command line
    assert hello.proof.hex() == "b7db2cf7a41c0ed2058fd687479c277d6e29a1e7d5598324f67c225b554f41e1"
    octets = hello.encode()
    assert is_proved(octets, b"N" * 16, b"secret")
    assert not is_proved(octets, b"M" * 16, b"secret")
    assert not is_proved(octets, b"N" * 16, b"other")
    assert not is_proved(Hello(1, 2, trust_domain="d").encode(), b"N" * 16, b"secret")
    changed = bytearray(octets)
    changed[30] ^= 1
    assert not is_proved(bytes(changed), b"N" * 16, b"secret")
