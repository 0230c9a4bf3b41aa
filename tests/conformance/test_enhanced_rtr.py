"""The peer-to-peer model and the frame that says "ready to receive": RFC 6581 sections 5 and 9.2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kbtp_core.fabric.api import CompletionStatus, Op, QueueLimits, terminate_code
from tests.conformance.rule import rule
from tests.conformance.stage import LIMITS
from tests.fabric.peer import Peer, closing, dial, listening
from tests.fabric.wire import Enhanced, Opcode, ReadRequest, Segment, StartUp, Terminate, Untagged, read_response, send, write
from tests.fabric.world import End, Node, node, request

ALL = Enhanced(4, 4, is_peer_to_peer=True, offers_send=True, offers_write=True, offers_read=True)
NONE = Enhanced(16, 16)


@contextmanager
def asked(wish: Enhanced, *, receives: int = 1) -> Iterator[tuple[Node, End, Peer, StartUp]]:
    """A Responder that has accepted a Request with `wish`, and its Reply."""
    with node() as device, closing(dial(device.listen())) as peer:
        peer.send(StartUp(enhanced=wish).encode())
        end = device.serve(QueueLimits(ird=4, ord=4))
        if receives:
            end.receive_into(device.memory(16), 16)
        end.qp.accept()
        yield device, end, peer, peer.receive_start()


@contextmanager
def offered(offer: Enhanced) -> Iterator[tuple[Node, End, Peer]]:
    """An Initiator of the peer-to-peer model whose Request was answered with `offer`; one Send was posted before."""
    with node(peer_to_peer=True) as device, listening() as listener:
        end = device.create_qp(LIMITS)
        end.qp.connect("127.0.0.1", listener.port)
        with closing(listener.accept()) as peer:
            wish = peer.receive_start()
            assert wish.enhanced is not None
            assert wish.enhanced.is_peer_to_peer
            end.post(request(Op.SEND, device.memory(b"first"), 5))
            peer.send(StartUp(is_reply=True, enhanced=offer).encode())
            yield device, end, peer


# The Responder --------------------------------------------------------------------------------------------------------


@rule("RFC 6581 section 9.2", "sender", "A is 1 in the Reply when it is 1 in the Request.")
def test_the_peer_to_peer_model_is_mirrored() -> None:
    with asked(ALL) as (_, _, _, reply):
        assert reply.enhanced is not None
        assert reply.enhanced.is_peer_to_peer


@rule("RFC 6581 section 9.2", "sender", "A is 1 in a rejecting Reply too when it is 1 in the Request.")
def test_the_peer_to_peer_model_is_mirrored_in_a_rejection() -> None:
    with node() as device, closing(dial(device.listen())) as peer:
        peer.send(StartUp(enhanced=ALL).encode())
        device.next_request().reject()
        enhanced = peer.receive_start().enhanced
        assert enhanced is not None
        assert enhanced.is_peer_to_peer


@rule("RFC 6581 section 9.2", "sender", "A is 0 in the Reply when it is 0 in the Request, and so are B, C and D.")
def test_the_client_server_model_is_mirrored() -> None:
    with asked(replace(ALL, is_peer_to_peer=False)) as (_, _, _, reply):
        assert reply.enhanced is not None
        assert reply.enhanced == Enhanced(reply.enhanced.ird, reply.enhanced.ord)


@rule("RFC 6581 section 9.2", "sender", "A Responder sets the flag of every ready-to-receive frame that it can take, at least one.")
@pytest.mark.parametrize("kind", ["offers_send", "offers_write", "offers_read"])
def test_every_kind_of_ready_frame_is_offered(kind: str) -> None:
    with asked(replace(Enhanced(4, 4, is_peer_to_peer=True), **{kind: True})) as (_, _, _, reply):
        assert getattr(reply.enhanced, kind)


@rule("RFC 6581 section 9.2", "receiver", "B, C and D are ignored when A is 0: an empty Send is then a message like any other.")
def test_an_empty_first_send_is_delivered_in_the_client_server_model() -> None:
    with asked(replace(ALL, is_peer_to_peer=False)) as (_, end, peer, _):
        peer.send(send(b""))
        end.expect(Op.CONNECTED)
        assert end.expect(Op.RECEIVE).length == 0


@rule("RFC 6581 section 9.2", "receiver", "An empty Send that says 'ready' is not for the ULP and takes no buffer from it.")
def test_a_ready_send_is_not_delivered() -> None:
    with asked(ALL) as (_, end, peer, _):
        peer.send(send(b"", 1), send(b"after", 2))
        end.expect(Op.CONNECTED)
        done = end.expect(Op.RECEIVE)
        assert (done.wr_id, done.length) == (0, 5)


@rule("RFC 6581 section 9.2", "receiver", "An empty Write may say 'ready'; whatever its STag, it is taken.")
def test_a_ready_write_is_taken() -> None:
    with asked(ALL) as (_, end, peer, _):
        peer.send(write(1, 99, b""), send(b"after"))
        end.expect(Op.CONNECTED)
        assert end.expect(Op.RECEIVE).length == 5


@rule("RFC 6581 section 9.2", "receiver", "An empty Read may say 'ready'; it is answered.")
def test_a_ready_read_is_answered() -> None:
    with asked(ALL) as (_, end, peer, _):
        peer.send(ReadRequest(8, 9, 0, 0, 0).segment())
        assert peer.receive() == read_response(8, 9, b"")
        end.expect(Op.CONNECTED)


@rule("RFC 6581 section 5", "receiver", "Only the first frame can say 'ready': a later empty Send is a message.")
def test_a_second_empty_send_is_delivered() -> None:
    with asked(ALL) as (_, end, peer, _):
        peer.send(send(b"", 1), send(b"", 2))
        end.expect(Op.CONNECTED)
        assert end.expect(Op.RECEIVE).length == 0
        assert end.is_idle(0.02)


@rule("RFC 6581 section 5", "sender", "Once the Initiator has said 'ready' the Responder may speak first.")
@pytest.mark.parametrize("ready", [send(b""), write(0, 0, b"")], ids=["send", "write"])
def test_the_responder_speaks_after_the_ready_frame(ready: Segment) -> None:
    with asked(ALL, receives=0) as (device, end, peer, _):
        end.post(request(Op.SEND, device.memory(b"hello"), 5))
        peer.expect_silence(0.05)
        peer.send(ready)
        assert peer.receive() == send(b"hello")


# The Initiator --------------------------------------------------------------------------------------------------------


@rule("RFC 6581 section 9.2", "sender", "An Initiator of the client-server model has A = B = C = D = 0.")
def test_a_client_sets_no_flags() -> None:
    with node() as device, listening() as listener:
        device.create_qp(LIMITS).qp.connect("127.0.0.1", listener.port)
        with closing(listener.accept()) as peer:
            assert peer.receive_start().enhanced == NONE


@rule("RFC 6581 section 9.2", "sender", "An Initiator of the peer-to-peer model has A = 1 and the flag of every frame that it can send.")
def test_a_peer_sets_the_flags_of_what_it_can_send() -> None:
    with node(peer_to_peer=True) as device, listening() as listener:
        device.create_qp(LIMITS).qp.connect("127.0.0.1", listener.port)
        with closing(listener.accept()) as peer:
            assert peer.receive_start().enhanced == replace(NONE, is_peer_to_peer=True, offers_send=True, offers_write=True)


@rule(
    "RFC 6581 section 9.2", "sender", "After an accepting Reply with A = 1 the Initiator sends one of the common ready-to-receive frames."
)
def test_a_ready_write_is_sent_when_it_is_common() -> None:
    with offered(ALL) as (_, _, peer):
        assert peer.receive_octets(20).hex() == "000ec140000000000000000000000000a30572ab"


@rule("RFC 6581 section 9.2", "sender", "The Initiator sends the kind that the Responder can take.")
def test_a_ready_send_is_sent_when_only_that_is_common() -> None:
    with offered(replace(ALL, offers_write=False)) as (_, _, peer):
        assert peer.receive() == send(b"", 1)


@rule("RFC 6581 section 5", "sender", "No other frame leaves before the ready-to-receive frame.")
def test_the_ready_frame_precedes_what_was_posted() -> None:
    with offered(ALL) as (_, _, peer):
        assert peer.receive() == write(0, 0, b"")
        assert peer.receive() == send(b"first", 1)


@rule("RFC 6581 section 9.2", "sender", "A ready-to-receive Send takes a message sequence number like any Send.")
def test_the_send_after_a_ready_send_has_the_next_number() -> None:
    with offered(replace(ALL, offers_write=False)) as (_, _, peer):
        assert [peer.receive_untagged().msn, peer.receive_untagged().msn] == [1, 2]


@rule("RFC 6581 section 9.2", "sender", "The ready-to-receive frame is not reported to the ULP.")
def test_the_ready_frame_has_no_completion() -> None:
    with offered(ALL) as (_, end, peer):
        peer.receive()
        peer.receive()
        end.expect(Op.CONNECTED)
        end.expect(Op.SEND)
        assert end.is_idle(0.02)


@rule("RFC 6581 section 9.2", "sender", "Without a common ready-to-receive frame the Initiator says so in a Terminate and ends.")
@pytest.mark.parametrize(
    "offer", [replace(ALL, offers_send=False, offers_write=False), NONE], ids=["only what it cannot send", "another model"]
)
def test_no_common_ready_frame_ends_the_connection(offer: Enhanced) -> None:
    with offered(offer) as (_, end, peer):
        assert peer.receive_terminate() == Terminate(2, 0, 7)
        peer.close()
        last = end.drain()[-1]
        assert (last.value, last.status) == (terminate_code(2, 0, 7), CompletionStatus.CONNECT_FAILED)


@rule("RFC 6581 section 9.2", "receiver", "An Initiator of the client-server model ignores B, C and D of the Reply.")
def test_a_client_ignores_the_flags_of_a_reply() -> None:
    with node() as device, listening() as listener:
        end = device.create_qp(LIMITS)
        end.qp.connect("127.0.0.1", listener.port)
        with closing(listener.accept()) as peer:
            peer.answer(StartUp(is_reply=True, enhanced=replace(ALL, is_peer_to_peer=False)))
            end.expect(Op.CONNECTED)
            peer.expect_silence(0.05)
            end.post(request(Op.SEND))
            assert peer.receive() == Untagged(Opcode.SEND)
