"""Proofs of HELLO and HELLO_ACK (completion page, "Authentication").

A proof is HMAC-SHA-256, keyed with the trust domain's secret, over the message up to its Proof field followed by the *peer's*
nonce: a message that was recorded once proves nothing to a peer that drew another nonce. It is checked over the octets that
came, not over what they were parsed to. Comparison takes constant time.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import replace
from typing import TypeVar

from kbtp_core.protocol.constants import PROOF_BYTES
from kbtp_core.protocol.hello import Hello, HelloAck

_Provable = TypeVar("_Provable", Hello, HelloAck)


def _proof(unproved: bytes, peer_nonce: bytes, secret: bytes) -> bytes:
    return hmac.new(secret, unproved + peer_nonce, hashlib.sha256).digest()


def proved(message: _Provable, peer_nonce: bytes, secret: bytes) -> _Provable:
    """`message` with the proof for the peer that drew `peer_nonce`."""
    return replace(message, proof=_proof(message.encode_unproved(), peer_nonce, secret))


def is_proved(octets: bytes, own_nonce: bytes, secret: bytes) -> bool:
    """Whether a received HELLO or HELLO_ACK ends in the proof that a holder of `secret` makes for `own_nonce`."""
    unproved, length, proof = octets[: -2 - PROOF_BYTES], octets[-2 - PROOF_BYTES : -PROOF_BYTES], octets[-PROOF_BYTES:]
    return length == PROOF_BYTES.to_bytes(2, "big") and hmac.compare_digest(proof, _proof(unproved, own_nonce, secret))
