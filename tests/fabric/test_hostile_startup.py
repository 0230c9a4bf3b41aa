"""Peers that leave or dawdle while a connection starts: nothing of them stays, and no deadline moves. Rules are in tests/conformance."""

from __future__ import annotations

import time

from kbtp_core.fabric.api import FabricError, Op, QueueLimits
from tests.fabric.peer import closing, dial
from tests.fabric.victim import victim
from tests.fabric.wire import StartUp, send
from tests.fabric.world import End


def test_a_peer_that_connects_and_leaves_leaves_nothing() -> None:
    with victim() as it:
        for octets in (b"", b"MPA", StartUp().encode()[:20]):
            for _ in range(10):
                peer = dial(it.port)
                peer.send(octets)
                peer.close()
        assert it.device.poll_request(0.05) is None


def test_a_peer_that_leaves_before_it_is_accepted_is_an_error_or_a_lost_connection() -> None:
    with victim() as it:
        peer = dial(it.port)
        peer.send(StartUp().encode())
        waiting = it.device.next_request()
        peer.reset()
        time.sleep(0.02)
        try:
            end = End(it.device, waiting.create_qp(it.device.pd, it.device.cq))
        except FabricError:
            return
        end.qp.accept()
        assert end.drain()[-1].op == Op.DISCONNECTED


def test_a_first_frame_that_drips_does_not_extend_the_deadline() -> None:
    with victim() as it:
        it.limits = QueueLimits(startup_timeout_s=0.3)
        peer, end = it.connect()
        with closing(peer):
            began, octets = time.monotonic(), send(b"x" * 100).frame()
            for at in range(len(octets)):
                if not peer.send_while_it_lasts(octets[at : at + 1]):
                    break
                time.sleep(0.02)
            assert time.monotonic() - began < 2.0
            end.drain(2.0)
        it.limits = QueueLimits()


# The device as initiator, a hostile responder -----------------------------------------------------------------------
