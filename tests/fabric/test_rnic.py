"""Every operation of the software RNIC, in every size that cuts differently, between plain and scattered memory."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from kbtp_core.fabric.api import Access, CompletionFlag, CompletionStatus, FabricError, Op, WrFlag, terminate_code
from tests.fabric.world import ALL_REMOTE, End, Memory, Node, connect, node, pattern, request

SMALL_MULPDU = 68
SMALL_SIZES = [0, 1, 49, 50, 51, 53, 54, 55, 99, 100, 101, 107, 108, 109, 1000]
"""Around one and two segments of SMALL_MULPDU: 50 octets of payload untagged, 54 tagged."""
SIZES = [1, 2, 3, 4, 5, 4095, 61439, 61440, 61441, 61444, 61445, 122_880, 122_889, (1 << 20) + 1, (3 << 20) + 7]
"""Around one and two segments of the default size too."""
COUNTER_BITS = 1 << 63 | 1 << 31


def move(left: Node, right: Node, op: Op, size: int) -> None:
    """Move `size` octets by `op` between odd offsets; check both memories whole and the completions."""
    content = pattern(size + 8, size)
    is_read = op == Op.READ
    source = (right if is_read else left).memory(content, Access.REMOTE_READ if is_read else Access.NONE)
    sink_access = {Op.READ: Access.LOCAL_WRITE, Op.SEND: Access.LOCAL_WRITE, Op.WRITE: Access.REMOTE_WRITE}[op]
    sink = (left if is_read else right).memory(size + 8, sink_access)
    a, b = connect(left, right)
    if op == Op.SEND:
        b.receive_into(sink, size + 3, offset=5)
        a.post(request(op, source, size, offset=3, wr_id=77))
        assert b.expect(Op.RECEIVE).length == size
    elif op == Op.WRITE:
        b.receive_into(right.memory(4), 4)
        a.post(request(op, source, size, offset=3, to=(sink.stag, 5), wr_id=77), request(Op.SEND))
        b.expect(Op.RECEIVE)
    else:
        a.post(request(op, sink, size, offset=5, to=(source.stag, 3), wr_id=77))
    done = a.expect(op)
    assert (done.wr_id, done.length) == (77, size)
    assert sink.read() == bytes(5) + content[3 : 3 + size].tobytes() + bytes(3)
    assert source.read() == content.tobytes()


@pytest.mark.parametrize("size", SMALL_SIZES)
@pytest.mark.parametrize("op", [Op.SEND, Op.WRITE, Op.READ])
def test_any_size_arrives_whole_in_small_segments(op: Op, size: int) -> None:
    with node(mulpdu=SMALL_MULPDU) as left, node(mulpdu=SMALL_MULPDU) as right:
        move(left, right, op, size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", [Op.SEND, Op.WRITE, Op.READ])
def test_any_size_arrives_whole_in_large_segments(op: Op, size: int) -> None:
    with node() as left, node() as right:
        move(left, right, op, size)


@pytest.mark.parametrize("op", [Op.SEND, Op.WRITE, Op.READ])
def test_a_device_talks_to_itself(op: Op) -> None:
    with node() as device:
        move(device, device, op, 100_001)


@pytest.mark.parametrize("mulpdu", [SMALL_MULPDU, 1500, None])
@pytest.mark.parametrize("op", [Op.SEND, Op.WRITE, Op.READ])
def test_scattered_pages_are_one_run_of_offsets(op: Op, mulpdu: int | None) -> None:
    page_bytes, count = 272, 40
    aids = {} if mulpdu is None else {"mulpdu": mulpdu}
    with node(**aids) as left, node(**aids) as right:
        access = Access.LOCAL_WRITE | ALL_REMOTE
        content = pattern(page_bytes * count)
        here, there = left.scattered(content, page_bytes, access), right.scattered(content[::-1].copy(), page_bytes, access)
        a, b = connect(left, right)
        length = page_bytes * 30 + 1
        for offset_here, offset_there in ((page_bytes - 1, 0), (0, page_bytes * 5 + 7), (page_bytes * 9, 3)):
            source, sink = (there, here) if op == Op.READ else (here, there)
            at_source, at_sink = (offset_there, offset_here) if op == Op.READ else (offset_here, offset_there)
            expected = bytearray(sink.read())
            expected[at_sink : at_sink + length] = source.read(at_source, length)
            if op == Op.SEND:
                b.receive_into(there, length, offset=offset_there)
            a.post(request(op, here, length, offset=offset_here, to=(there.stag, offset_there)))
            a.expect(op)
            if op == Op.SEND:
                b.expect(Op.RECEIVE)
            else:
                flush_behind(a)
            assert sink.read() == bytes(expected)


def flush_behind(end: End) -> None:
    """Wait until the other side has delivered all that was written: a Read on the same stream is answered behind it."""
    end.post(request(Op.READ))
    end.expect(Op.READ)


def test_the_last_octet_of_the_last_page_can_be_written() -> None:
    with node() as left, node() as right:
        sink = right.scattered(pattern(3 * 64), 64, Access.REMOTE_WRITE)
        a, _ = connect(left, right)
        a.post(request(Op.WRITE, left.memory(b"e"), 1, to=(sink.stag, 3 * 64 - 1), flags=WrFlag.NONE))
        flush_behind(a)
        assert sink.read(3 * 64 - 1) == b"e"


def test_a_send_with_invalidate_ends_the_region_that_it_names() -> None:
    with node() as left, node() as right:
        target = right.memory(64, Access.REMOTE_WRITE | Access.REMOTE_INVALIDATE)
        inbox = right.memory(64)
        a, b = connect(left, right)
        b.receive_into(inbox, 32, count=2)
        a.post(request(Op.WRITE, left.memory(b"w"), 1, to=(target.stag, 0)))
        a.post(request(Op.SEND_SE_INVALIDATE, left.memory(b"bye"), 3, to=(target.stag, 0)))
        done = b.expect(Op.RECEIVE)
        assert (done.length, done.stag) == (3, target.stag)
        assert done.flags == CompletionFlag.INVALIDATED | CompletionFlag.SOLICITED
        assert not target.region.is_valid
        assert target.read(0, 2) == b"w\0"
        a.expect(Op.WRITE)
        a.expect(Op.SEND_SE_INVALIDATE)
        a.post(request(Op.WRITE, left.memory(b"x"), 1, to=(target.stag, 0)))
        assert b.drain()[-1].value == terminate_code(1, 1, 0)
        assert target.read(0, 2) == b"w\0"
        target.region.close()


def counter(device: Node, *words: int) -> Memory:
    return device.memory(struct.pack(f"={len(words)}Q", *words), Access.REMOTE_ATOMIC)


def word(memory: Memory, index: int = 0) -> int:
    return int(struct.unpack("=Q", memory.read(8 * index, 8))[0])


@pytest.mark.parametrize(
    ("bits", "old", "new"),
    [
        (2, 0x0000000000000000, 0x0000000100000010),
        (2, 0x0000000300000030, 0x0000000400000000),
        (2, 0xFFFFFFFF00000030, 0x0000000000000000),
        (10, 0x0000000500000050, 0x0000000600000060),
        (10, 0xFFFFFFFF00003FF0, 0x0000000000000000),
        (28, 0xFFFFFFFFFFFFFFF0, 0x0000000000000000),
    ],
)
def test_a_masked_fetch_add_moves_ticket_and_slot_each_in_its_field(bits: int, old: int, new: int) -> None:
    with node() as left, node() as right:
        target = counter(right, 1, old, 2)
        a, _ = connect(left, right)
        mask = COUNTER_BITS | 1 << bits + 3
        a.post(request(Op.FETCH_ADD, to=(target.stag, 8), operand=0x0000000100000010, mask=mask))
        assert a.expect(Op.FETCH_ADD).value == old
        assert [word(target, index) for index in range(3)] == [1, new, 2]


def add_by_bits(old: int, add: int, mask: int) -> int:
    """RFC 7306's loop: a carry moves up except out of a bit that the mask marks."""
    carry = total = 0
    for bit in range(64):
        bits = (old >> bit & 1) + (add >> bit & 1) + carry
        total |= (bits & 1) << bit
        carry = 0 if mask >> bit & 1 else bits >> 1
    return total


def test_fetch_add_equals_the_loop_of_rfc_7306_for_any_mask() -> None:
    generator = np.random.default_rng(5)
    with node() as left, node() as right:
        target = counter(right, 0)
        a, _ = connect(left, right)
        expected = 0
        for _ in range(200):
            add, mask = (int(value) for value in generator.integers(0, 1 << 64, 2, dtype=np.uint64))
            a.post(request(Op.FETCH_ADD, to=(target.stag, 0), operand=add, mask=mask))
            assert a.expect(Op.FETCH_ADD).value == expected
            expected = add_by_bits(expected, add, mask)
        assert word(target) == expected


def test_cmp_swap_swaps_the_masked_bits_only_if_the_masked_bits_match() -> None:
    with node() as left, node() as right:
        target = counter(right, 0x1122334455667788)
        a, _ = connect(left, right)

        def swap(compare: int, compare_mask: int) -> int:
            row = request(Op.CMP_SWAP, to=(target.stag, 0), compare=compare, compare_mask=compare_mask)
            row["operand"], row["mask"] = 0xAAAAAAAAAAAAAAAA, 0xFF00
            a.post(row)
            return a.expect(Op.CMP_SWAP).value

        assert swap(0x89, 0xFF) == 0x1122334455667788
        assert word(target) == 0x1122334455667788
        assert swap(0xFFFFFFFFFFFFFF88, 0xFF) == 0x1122334455667788
        assert word(target) == 0x112233445566AA88


def test_an_atomic_may_use_the_last_aligned_word_of_a_region() -> None:
    with node() as left, node() as right:
        target = counter(right, 7, 8)
        a, _ = connect(left, right)
        a.post(request(Op.FETCH_ADD, to=(target.stag, 8), operand=0))
        assert a.expect(Op.FETCH_ADD).value == 8


def test_an_immediate_carries_eight_octets_and_consumes_a_receive() -> None:
    with node() as left, node() as right:
        inbox = right.memory(16)
        a, b = connect(left, right)
        b.receive_into(inbox, 8, count=2)
        a.post(request(Op.IMMEDIATE, operand=0x0102030405060708), request(Op.IMMEDIATE_SE, operand=(1 << 64) - 1))
        first, second = b.expect(Op.RECEIVE_IMMEDIATE), b.expect(Op.RECEIVE_IMMEDIATE)
        assert (first.wr_id, first.value, first.flags) == (0, 0x0102030405060708, CompletionFlag(0))
        assert (second.wr_id, second.value, second.flags) == (1, (1 << 64) - 1, CompletionFlag.SOLICITED)


def test_an_unsignaled_request_completes_in_silence() -> None:
    with node() as left, node() as right:
        a, b = connect(left, right)
        b.receive_into(right.memory(8), 4, count=2)
        a.post(request(Op.SEND, flags=WrFlag.NONE, wr_id=1), request(Op.SEND, wr_id=2))
        assert a.expect(Op.SEND).wr_id == 2
        assert a.is_idle()


def test_local_memory_is_checked_before_anything_is_sent() -> None:
    with node() as left, node() as right:
        other_domain = left.fabric.alloc_pd()
        short, foreign, read_only = left.memory(8), left.memory(8, pd=other_domain), left.memory(8, Access.NONE)
        target = right.memory(64, ALL_REMOTE)
        for bad in (
            request(Op.WRITE, short, 9, to=(target.stag, 0)),
            request(Op.WRITE, short, 1, offset=8, to=(target.stag, 0)),
            request(Op.WRITE, short, 8, offset=(1 << 64) - 4, to=(target.stag, 0)),
            request(Op.SEND, foreign, 8),
            request(Op.READ, read_only, 8, to=(target.stag, 0)),
        ):
            a, _ = connect(left, right)
            a.post(bad)
            a.expect(Op(int(bad["op"][0])), CompletionStatus.LOCAL_PROTECTION)
        assert target.read() == bytes(64)


def test_a_work_request_that_means_nothing_is_refused_by_name() -> None:
    with node() as left, node() as right:
        a, _ = connect(left, right)
        for bad in (request(Op.RECEIVE), request(Op.DISCONNECTED)):
            with pytest.raises(FabricError):
                a.post(bad)
        with pytest.raises((FabricError, TypeError, ValueError)):
            a.qp.post_send(np.zeros(1, np.uint8))
        a.post(request(Op.WRITE))
        a.expect(Op.WRITE)
