"""Two queue pairs that send small messages to each other, driven from Python: the sides of the bench's round trip."""

from __future__ import annotations

import threading
import time

import numpy as np

from kbtp_core.errors import KbtpError
from kbtp_core.fabric.api import RECEIVE_REQUEST, WORK_REQUEST, Access, CompletionStatus, Op, QueueLimits, QueuePair
from kbtp_core.fabric.softrnic import SoftRnic

MESSAGE_BYTES = 64
_LIMITS = QueueLimits(send_depth=16, receive_depth=16)
_TIMEOUT_S = 30.0
_RECEIVE_COUNT = 4


class End:
    """One end of a connection for messages of `MESSAGE_BYTES`."""

    def __init__(self, congestion_control: str) -> None:
        self._fabric = SoftRnic(congestion_local=congestion_control)
        self._pd, self._cq = self._fabric.alloc_pd(), self._fabric.create_cq()
        self._memory = np.zeros((1 + _RECEIVE_COUNT) * MESSAGE_BYTES, np.uint8)  # the first is sent from
        region = self._region = self._pd.register(self._memory, Access.LOCAL_WRITE)
        self._send = np.zeros(1, WORK_REQUEST)
        self._send["op"], self._send["length"], self._send["local_stag"] = Op.SEND, MESSAGE_BYTES, region.stag
        self._receives = np.zeros(_RECEIVE_COUNT, RECEIVE_REQUEST)
        self._receives["offset"] = (1 + np.arange(_RECEIVE_COUNT)) * MESSAGE_BYTES
        self._receives["stag"], self._receives["length"] = region.stag, MESSAGE_BYTES
        self._listener = self._fabric.listen("127.0.0.1", 0, self._cq)
        self._qp: QueuePair | None = None

    @property
    def port(self) -> int:
        return self._listener.address[1]

    def connect(self, port: int) -> None:
        self._qp = self._fabric.create_qp(self._pd, self._cq, _LIMITS)
        self._qp.post_receive(self._receives)
        self._qp.connect("127.0.0.1", port)
        self._expect(Op.CONNECTED)

    def accept(self) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while not (requests := self._listener.poll()):
            if not self._cq.wait(deadline - time.monotonic()) and time.monotonic() > deadline:
                raise KbtpError("nobody connected to the bench's queue pair")
            self._cq.poll()
        self._qp = requests[0].create_qp(self._pd, self._cq, _LIMITS)
        self._qp.post_receive(self._receives)
        self._qp.accept()

    def echo(self) -> None:
        """Send back whatever comes, until the peer closes."""
        while self._expect(Op.RECEIVE):
            self._post()

    def run(self, seconds: float) -> list[int]:
        """Nanoseconds of each round trip."""
        times: list[int] = []
        end = time.perf_counter_ns() + int(seconds * 1e9)
        while (begun := time.perf_counter_ns()) < end:
            self._post()
            self._expect(Op.RECEIVE)
            times.append(time.perf_counter_ns() - begun)
        return times

    def close(self) -> None:
        if self._qp is not None:
            self._qp.close()
        self._fabric.close()

    def _post(self) -> None:
        assert self._qp is not None
        self._qp.post_send(self._send)
        self._qp.post_receive(self._receives[:1])

    def _expect(self, op: Op) -> bool:
        """Wait until a completion of `op` is there; False at the connection's end."""
        deadline = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline:
            for completion in self._cq.poll().tolist():
                if completion[2] == op and completion[3] == CompletionStatus.OK:
                    return True
                if completion[2] == Op.DISCONNECTED:
                    return False
            self._cq.wait(deadline - time.monotonic())
        raise KbtpError(f"the bench's queue pair saw no {op.name} within {_TIMEOUT_S} s")


class EchoEnd:
    """In the target's process: an end that sends back what comes, on a thread of its own."""

    def __init__(self, congestion_control: str) -> None:
        self._end = End(congestion_control)
        self.port = self._end.port
        self._thread = threading.Thread(target=self._run, name="bench-echo", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the peer has closed; a thread in native code must not outlive the interpreter."""
        self._thread.join(_TIMEOUT_S)

    def _run(self) -> None:
        self._end.accept()
        self._end.echo()
        self._end.close()
