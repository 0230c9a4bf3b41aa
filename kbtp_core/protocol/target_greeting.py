"""How a target answers the first message, or the first two, of a connection.

HELLO is the first message and comes once; with a key configured it comes twice: the first is answered UNAUTHENTICATED with a nonce,
and the second must prove, over that nonce, that its sender holds the trust domain's secret. Anything else ends the connection.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kbtp_core.errors import Malformed
from kbtp_core.protocol.auth import is_proved, proved
from kbtp_core.protocol.constants import HEADER_BYTES, NONCE_BYTES, VERSION, Capability, Opcode, Status
from kbtp_core.protocol.hello import NO_NONCE, Hello, HelloAck
from kbtp_core.protocol.target_grant import Expose, Grant, grant
from kbtp_core.protocol.wire import Completion, Header, parse

if TYPE_CHECKING:
    from kbtp_core.protocol.target import Target


@dataclass(frozen=True)
class Reply:
    """Send `answer` if there is one. Then: go on if `granted`, close if there is a `close_reason`, else wait for the proof."""

    answer: bytes | None
    close_reason: str | None = None
    granted: Grant | None = None
    hello: Hello | None = None


@dataclass
class Greeting:
    """One connection before its session is ready."""

    target: Target
    owner: int
    offers: Capability
    expose: Expose | None
    is_proving: bool = False
    _nonce: bytes = field(default=NO_NONCE, init=False)

    def receive(self, message: bytes) -> Reply:
        header = Header.of_prefix(message)
        if len(message) >= HEADER_BYTES and header.opcode == Opcode.HELLO and header.version != VERSION:
            answer = Completion(header.request_id, 0, 0, Status.VERSION, data_length=VERSION)
            return Reply(answer.encode(), f"HELLO of version {header.version}")
        if header.opcode != Opcode.HELLO:
            return Reply(None, "the first message is no HELLO")
        try:
            hello = parse(message)
        except Malformed as error:
            return self._refuse(header.request_id, Status.MALFORMED, str(error))
        assert isinstance(hello, Hello)
        secret = self.target.secrets.get(hello.trust_domain)
        if not self.target.secrets:
            return self._admit(hello, None)
        if not self.is_proving and not hello.proof:
            self._nonce = self.target.draw(NONCE_BYTES)
            self.is_proving = True
            return Reply(HelloAck(hello.request_id, Status.UNAUTHENTICATED, nonce=self._nonce).encode())
        if self.is_proving and secret is not None and is_proved(message, self._nonce, secret):
            return self._admit(hello, secret)
        return self._refuse(hello.request_id, Status.UNAUTHENTICATED, f"a wrong proof for trust domain {hello.trust_domain!r}")

    def _admit(self, hello: Hello, secret: bytes | None) -> Reply:
        target = self.target
        if target.is_shutting_down:
            return self._refuse(hello.request_id, Status.SHUTTING_DOWN, "the target shuts down")
        if target.trust_domains is not None and hello.trust_domain not in target.trust_domains:
            return self._refuse(hello.request_id, Status.NOT_PERMITTED, f"trust domain {hello.trust_domain!r} is not served")
        chosen = target.pick(hello.block_bytes)
        if chosen is None:
            return self._refuse(hello.request_id, Status.UNSUPPORTED, f"no pool of blocks of {hello.block_bytes} octets")
        granted = grant(chosen, self.owner, hello, self._nonce, self.offers, self.expose)
        ack = granted.ack if secret is None else proved(granted.ack, hello.nonce, secret)
        return Reply(ack.encode(), granted=granted, hello=hello)

    def _refuse(self, request_id: int, status: Status, reason: str) -> Reply:
        nonce = self._nonce if status is Status.UNAUTHENTICATED else NO_NONCE
        return Reply(HelloAck(request_id, status, nonce=nonce).encode(), reason)
