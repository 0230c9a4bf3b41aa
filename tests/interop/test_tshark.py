"""An independent reader for what this stack sends: real tshark, given captures of every message there is, both ways.

Each capture must have a good CRC in every FPDU and no gap in any number (`check`), and nothing that tshark complains of; the tests
look at the fields that are left.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kbtp_core.fabric.api import Access, CompletionFlag, Op, QueueLimits
from kbtp_core.fabric.softrnic import SoftRnic
from kbtp_core.protocol import Flag
from kbtp_core.protocol.constants import Opcode as Kbtp
from tests.fabric.pcap import packets, streams
from tests.fabric.peer import closing, dial, listening
from tests.fabric.wire import Enhanced, Opcode, Segment, StartUp, Terminate, Untagged, send, write
from tests.fabric.world import End, Memory, Node, node, pattern, request
from tests.interop.tshark import Seen, check, look
from tests.session.conftest import BLOCK, World, buffer, soon

pytestmark = pytest.mark.interop

RIGHTS = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
LIMITS = QueueLimits(ird=4, ord=3)


@dataclass
class Side:
    """One end of a connection, with memory that the other may use and two regions that it may invalidate."""

    node: Node
    end: End
    shared: Memory
    inbox: Memory
    spare: list[Memory]

    @classmethod
    def of(cls, device: Node, end: End) -> Side:
        spare = [device.memory(64, Access.REMOTE_WRITE | Access.REMOTE_INVALIDATE) for _ in range(2)]
        side = cls(device, end, device.memory(pattern(2 << 20), RIGHTS), device.memory(1 << 20), spare)
        end.receive_into(side.inbox, 1 << 16, count=16)
        return side


def join(active: Node, passive: Node, host: str = "127.0.0.1") -> tuple[Side, Side]:
    """Two connected ends; an empty Write is the first frame."""
    if passive.listener is None:
        passive.listener = passive.fabric.listen(host, 0, passive.cq)
    left = active.create_qp(LIMITS)
    left.qp.connect(host, passive.listener.address[1])
    right = passive.serve(LIMITS)
    sides = Side.of(active, left), Side.of(passive, right)
    right.qp.accept()
    left.expect(Op.CONNECTED)
    left.post(request(Op.WRITE))
    left.expect(Op.WRITE)
    right.expect(Op.CONNECTED)
    return sides


def say_everything(a: Side, b: Side, size: int) -> None:
    """One request of every kind from `a` to `b`, those that carry data with `size` octets."""
    to, local = (b.shared.stag, 16), a.shared
    requests = [
        request(Op.SEND, local, size),
        request(Op.SEND_SE, local, size),
        request(Op.WRITE, local, size, to=to),
        request(Op.SEND_INVALIDATE, local, size, to=(b.spare[0].stag, 0)),
        request(Op.READ, local, size, to=to),
        request(Op.FETCH_ADD, to=to, operand=0x1122334455667788, mask=1 << 63 | 1 << 31),
        request(Op.CMP_SWAP, to=to, operand=0xA1, mask=0xFF, compare=0xB2, compare_mask=0xFFFF),
        request(Op.IMMEDIATE, operand=0x0102030405060708),
        request(Op.IMMEDIATE_SE, operand=0x1112131415161718),
        request(Op.SEND_SE_INVALIDATE, local, size, to=(b.spare[1].stag, 0)),
    ]
    a.end.post(*requests)
    for posted in requests:
        a.end.expect(Op(int(posted["op"][0])))
    arrived = [b.node.next_done(b.end.qp.number) for _ in range(6)]
    assert sum(done.op == Op.RECEIVE_IMMEDIATE for done in arrived) == 2
    assert sum(bool(done.flags & CompletionFlag.INVALIDATED) for done in arrived) == 2


def part(a: Side, b: Side) -> None:
    a.end.qp.close()
    a.end.drain()
    b.end.drain()


def check_everything(seen: Seen, first: str, a: Side, b: Side) -> None:
    """Both sides said everything; `first` is the address of `a`."""
    for source, other in ((first, b), (next(f.source for f in seen.fpdus if f.source != first), a)):
        said = [fpdu for fpdu in seen.fpdus if fpdu.source == source]
        ends = Counter(fpdu.opcode for fpdu in said if fpdu.is_last)
        first_write = source == first
        assert ends == {0: 1 + first_write, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1, 8: 1, 9: 1, 10: 2, 11: 2}
        of = {opcode: [fpdu for fpdu in said if fpdu.opcode == opcode] for opcode in ends}
        assert {fpdu["rdma.inval_stag"] for fpdu in of[4]} == {other.spare[0].stag}
        assert {fpdu["rdma.inval_stag"] for fpdu in of[6]} == {other.spare[1].stag}
        assert {fpdu["ddp.stag"] for fpdu in of[0] if fpdu.payload_bytes} == {other.shared.stag}
        assert {fpdu["ddp.stag"] for fpdu in of[2]} == {other.shared.stag}
        (read,), (add, swap), (added, swapped) = of[1], of[10], of[11]
        assert (read["rdma.srcstag"], read["rdma.srcto"], read["ddp.qn"]) == (other.shared.stag, 16, 1)
        for atomic in (add, swap):
            assert (atomic["rdma.atomic.remote_stag"], atomic["rdma.atomic.remote_tagged_offset"]) == (other.shared.stag, 16)
        assert (add["rdma.atomic.opcode"], add["rdma.atomic.add_data"]) == (0, 0x1122334455667788)
        assert add["rdma.atomic.add_mask"] == 1 << 63 | 1 << 31
        assert (swap["rdma.atomic.opcode"], swap["rdma.atomic.swap_data"], swap["rdma.atomic.swap_mask"]) == (2, 0xA1, 0xFF)
        assert (swap["rdma.atomic.compare_data"], swap["rdma.atomic.compare_mask"]) == (0xB2, 0xFFFF)
        assert [f["rdma.atomic.request_identifier"] for f in (add, swap)] == [1, 2]
        assert [f["rdma.atomic.original_request_identifier"] for f in (added, swapped)] == [1, 2]
        assert of[8][0].payload == bytes.fromhex("0102030405060708")
        assert of[9][0].payload == bytes.fromhex("1112131415161718")


@pytest.mark.parametrize("captured", ["active", "passive"])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize(("mulpdu", "size"), [(1500, 5000), (61458, 60_000), (64, 333)])
def test_every_operation_both_ways_is_what_tshark_takes_it_for(tmp_path: Path, mulpdu: int, size: int, host: str, captured: str) -> None:
    path = tmp_path / "all.pcap"
    wants = [{"mulpdu": mulpdu, **({"capture": path} if captured == name else {})} for name in ("active", "passive")]
    with node(**wants[0]) as left, node(**wants[1]) as right:
        a, b = join(left, right, host)
        say_everything(a, b, size)
        say_everything(b, a, size)
        part(a, b)
    seen = look(path)
    check(seen)
    check_everything(seen, seen.start_ups[0].source, a, b)


def test_start_up_is_revision_2_with_crc_and_both_depths(tmp_path: Path) -> None:
    path = tmp_path / "start.pcap"
    with node(capture=path) as left, node() as right:
        right.listen()
        a = left.create_qp(QueueLimits(ird=5, ord=9))
        a.qp.connect("127.0.0.1", right.listen(), b"who calls")
        b = right.serve(QueueLimits(ird=7, ord=3))
        b.qp.accept(b"who answers")
        a.expect(Op.CONNECTED)
        a.post(request(Op.WRITE))
        a.expect(Op.WRITE)
        b.expect(Op.CONNECTED)
    asked, replied = (seen := look(path)).start_ups
    check(seen)
    assert (asked.is_reply, replied.is_reply) == (False, True)
    for frame, text in ((asked, b"\x00\x05\x00\x09who calls"), (replied, b"\x00\x07\x00\x03who answers")):
        assert (frame["rev"], frame["crc_flag"], frame["marker_flag"], frame["rej_flag"]) == (2, 1, 0, 0)
        assert (frame["res"], frame["pdlength"]) == (0x10, len(text))  # the S bit of RFC 6581
    first, second = streams(packets(path)).values()
    assert first[20 : 20 + 13] == b"\x00\x05\x00\x09who calls"
    assert second[20:] == b"\x00\x07\x00\x03who answers"


def test_the_frame_that_says_ready_in_the_peer_to_peer_model_is_an_fpdu_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "ready.pcap"
    with node(capture=path, peer_to_peer=True) as left, node() as right:
        port = right.listen()
        a = left.create_qp(LIMITS)
        a.receive_into(left.memory(64), 64)
        a.qp.connect("127.0.0.1", port)
        b = right.serve(LIMITS)
        b.qp.accept()
        a.expect(Op.CONNECTED)
        b.expect(Op.CONNECTED)
        b.post(request(Op.SEND, right.memory(b"I speak first"), 13))
        a.expect(Op.RECEIVE)
    seen = look(path)
    check(seen)
    ready, spoken = seen.fpdus
    assert (ready.source, ready.payload_bytes) == (seen.start_ups[0].source, 0)
    assert (spoken.source, spoken.payload) == (seen.start_ups[1].source, b"I speak first")


def test_tiny_messages_share_packets_and_each_has_its_pad(tmp_path: Path) -> None:
    path = tmp_path / "tiny.pcap"
    sizes = [*range(9), *range(120, 129)]
    with node(capture=path) as left, node() as right:
        a, b = join(left, right)
        for _ in range(2):
            for at in range(0, len(sizes), 6):
                batch = sizes[at : at + 6]
                a.end.post(*[request(Op.SEND, a.shared, size) for size in batch])
                for size in batch:
                    assert b.end.expect(Op.RECEIVE).length == size
                b.end.receive_into(b.inbox, 1 << 16, count=len(batch))
    seen = look(path)
    check(seen)
    sends = seen.of(Opcode.SEND)
    assert [fpdu.payload_bytes for fpdu in sends] == sizes * 2
    assert [fpdu.payload for fpdu in sends] == [pattern(2 << 20)[:size].tobytes() for size in sizes] * 2
    assert max(Counter(fpdu.packet for fpdu in sends).values()) > 1


def test_large_messages_cross_packets_and_are_cut_where_it_was_asked(tmp_path: Path) -> None:
    path = tmp_path / "large.pcap"
    with node(capture=path) as left, node(mulpdu=64768) as right:
        a, b = join(left, right)
        a.end.post(request(Op.WRITE, a.shared, 1 << 20, to=(b.shared.stag, 7)), request(Op.READ, a.shared, 1 << 20, to=(b.shared.stag, 7)))
        a.end.expect(Op.WRITE)
        a.end.expect(Op.READ)
        part(a, b)
    seen = look(path)
    check(seen)
    written, read = [f for f in seen.of(Opcode.WRITE) if f.payload_bytes], seen.of(Opcode.READ_RESPONSE)
    assert [f.payload_bytes for f in written] == [61440] * 17 + [4096]
    assert sum(f.payload_bytes for f in read) == 1 << 20
    assert {f.payload_bytes for f in read[:-1]} == {61440}
    ends = np.cumsum(
        [6 + f["mpa.ulpdulength"] + (-(2 + f["mpa.ulpdulength"]) & 3) for f in seen.fpdus if f.source == seen.start_ups[0].source]
    )
    first, *found = [packet for packet in packets(path) if packet.payload]
    cuts = np.cumsum([len(packet.payload) for packet in found if packet.source == first.source])
    assert set(cuts.tolist()) - set(ends.tolist()), "no FPDU crosses the end of a packet"


def test_a_terminate_of_this_stack_names_layer_type_and_code_and_quotes_the_culprit(tmp_path: Path) -> None:
    paths = [tmp_path / "sent.pcap", tmp_path / "received.pcap"]
    with node(capture=paths[1]) as left, node(capture=paths[0]) as right:
        a, b = join(left, right)
        a.end.post(request(Op.READ, a.shared, 46, to=(0xBAD, 0)))
        a.end.drain()
        b.end.drain()
    for path in paths:
        seen = look(path)
        check(seen)
        (terminate,) = seen.of(Opcode.TERMINATE)
        assert terminate.source == seen.start_ups[1].source
        assert (terminate["rdma.term_layer"], terminate["rdma.term_etype_rdma"], terminate["rdma.term_errcode_rdma"]) == (0, 1, 0)
        assert (terminate["rdma.term_hdrct_m"], terminate["rdma.hdrct_d"], terminate["rdma.hdrct_r"]) == (1, 1, 1)
        assert terminate["rdma.term_ddp_seg_len"] == 46


@pytest.mark.parametrize(
    ("culprit", "fields"),
    [
        (Untagged(Opcode.SEND, 7, b"MSN"), {"term_layer": 1, "term_etype_ddp": 2, "term_errcode_ddp_untagged": 3}),
        (write(0xBAD, 0, b"STag"), {"term_layer": 1, "term_etype_ddp": 1, "term_errcode_ddp_tagged": 0}),
    ],
    ids=["untagged", "tagged"],
)
def test_terminates_of_the_ddp_layer_are_read_as_such(tmp_path: Path, culprit: Segment, fields: dict[str, int]) -> None:
    path = tmp_path / "ddp.pcap"
    with node(capture=path) as device, closing(dial(device.listen())) as peer:
        peer.send(StartUp().encode())
        end = device.serve()
        end.receive_into(device.memory(64), 64)
        end.qp.accept()
        peer.receive_start()
        peer.send(write(0, 0, b""), culprit)
        assert isinstance(peer.receive_terminate(), Terminate)
        peer.read_to_end()
        end.drain()
    seen = look(path)
    (terminate,) = seen.of(Opcode.TERMINATE)
    assert terminate.crc.endswith("(Good CRC32)")
    assert {name: terminate["rdma." + name] for name in fields} == fields


def test_a_peer_that_asks_for_markers_gets_frames_that_tshark_finds_among_them(tmp_path: Path) -> None:
    path = tmp_path / "markers.pcap"
    sizes = [0, 1, 100, 468, 469, 470, 1000, 1350]
    with node(capture=path, mulpdu=1400) as device, listening() as listener:
        end = device.create_qp(LIMITS)
        end.qp.connect("127.0.0.1", listener.port)
        with closing(listener.accept()) as peer:
            peer.answer(StartUp(is_reply=True, wants_markers=True, enhanced=Enhanced(ird=4, ord=3)))
            end.expect(Op.CONNECTED)
            source = device.memory(pattern(1400))
            for size in sizes:  # one packet each: tshark takes markers only in frames that begin a packet
                end.post(request(Op.SEND, source, size))
                end.expect(Op.SEND)
                peer.receive()
    seen = look(path)
    check(seen)
    assert seen.start_ups[1]["marker_flag"] == 1
    assert [fpdu["mpa.ulpdulength"] - 18 for fpdu in seen.fpdus] == sizes
    assert sum(fpdu.get("mpa.marker_fpduptr") is not None for fpdu in seen.fpdus) >= 6


def test_crcs_that_neither_side_wants_are_not_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "without.pcap"
    with node(capture=path, wants_crc=False) as left, node(wants_crc=False) as right:
        a, b = join(left, right)
        a.end.post(request(Op.SEND, a.shared, 100))
        b.end.expect(Op.RECEIVE)
    seen = look(path)
    assert [frame["crc_flag"] for frame in seen.start_ups] == [0, 0]
    assert {fpdu.crc for fpdu in seen.fpdus} == {"unchecked"}
    assert seen.warnings == []


def test_a_spoilt_crc_is_bad_to_tshark_too(tmp_path: Path) -> None:
    path = tmp_path / "spoilt.pcap"
    with node(capture=path) as device, closing(dial(device.listen())) as peer:
        peer.send(StartUp().encode())
        end = device.serve()
        end.receive_into(device.memory(64), 64)
        end.qp.accept()
        peer.receive_start()
        octets = bytearray(send(b"spoilt", 1).frame())
        octets[-1] ^= 1
        peer.send(write(0, 0, b""), bytes(octets))
        peer.receive_terminate()
        peer.read_to_end()
        end.drain()
    assert ["Good" in fpdu.crc for fpdu in look(path).fpdus] == [True, False, True]


@pytest.mark.parametrize("use_executor", [True, False], ids=["executor", "software"])
def test_a_session_of_kbtp_from_hello_to_goodbye(tmp_path: Path, use_executor: bool) -> None:
    path = tmp_path / "session.pcap"
    fabric = SoftRnic(capture=path)
    world = World(fabric, use_executor)
    session = world.connect(world.ring())
    memory = buffer(16)
    memory[: 4 * BLOCK] = pattern(4 * BLOCK)
    region, handles, offsets = session.register(memory), 1000 + np.arange(4), np.arange(4) * BLOCK
    stored = session.alloc_store(handles, 0, region, offsets, [BLOCK, BLOCK, 100, 1], deadline=soon(), flags=Flag.NONE).wait()
    inline = session.alloc_store_inline([1010], 0, [b"inline"], deadline=soon()).wait()
    again = session.store(handles[:1], stored.generation[:1], region, offsets[1:2], BLOCK, deadline=soon(), flags=Flag.SEAL).wait()
    loads = [session.load(handles, 0, region, offsets + 4 * BLOCK, BLOCK, deadline=soon(), flags=Flag.ALLOW_UNSEALED) for _ in range(3)]
    assert all(batch.wait().ok for batch in loads)
    assert stored.ok
    assert inline.ok
    assert again.ok
    assert session.free(handles, stored.generation, deadline=soon()).wait().ok
    assert session.free(handles, stored.generation, deadline=soon()).wait().status.all()  # they are free already
    world.close()
    stats = fabric.stats()
    fabric.close()

    seen = look(path)
    check(seen)
    initiator = seen.start_ups[0].source
    sends = [f for f in seen.fpdus if f.opcode in (Opcode.SEND, Opcode.SEND_INVALIDATE, Opcode.SEND_SE)]
    said = [Kbtp(f.payload[1]) for f in sends if f.source == initiator]
    answered = [Kbtp(f.payload[1]) for f in sends if f.source != initiator]
    assert said[0] == Kbtp.HELLO
    assert said[-1] == Kbtp.GOODBYE
    assert Counter(said) == {Kbtp.HELLO: 1, Kbtp.ALLOC_STORE: 5, Kbtp.STORE: 1, Kbtp.LOAD: 12, Kbtp.FREE: 8, Kbtp.GOODBYE: 1}
    assert Counter(answered)[Kbtp.HELLO_ACK] == 1
    assert Counter(answered)[Kbtp.COMPLETION] == 5 + 1 + 12 + 8
    loaded = sum(f.payload_bytes for f in seen.of(Opcode.WRITE) if f.source != initiator)
    assert loaded == 3 * (BLOCK + BLOCK + 100 + 1)
    assert [f["rdma.rdmardsz"] for f in seen.of(Opcode.READ_REQUEST)] == [BLOCK, BLOCK, 100, 1, BLOCK]
    assert (memory[4 * BLOCK : 5 * BLOCK] == memory[BLOCK : 2 * BLOCK]).all()
    if use_executor:
        # the rest came while an earlier message waited for the target, and went up behind it
        assert 1 <= stats["executed_loads"] <= 12
        assert 1 <= stats["executed_stores"] <= 6
        assert stats["executed_frees"] <= 4
    else:
        assert (stats["executed_loads"], stats["executed_stores"], stats["executed_frees"]) == (0, 0, 0)
