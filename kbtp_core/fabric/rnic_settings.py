"""What a software RNIC may be told: options of `SoftRnic`, or KBTP_RNIC_ and the name in capitals in the environment, for every device of a
process whose maker does not say."""

from __future__ import annotations

import ipaddress
import logging
import socket
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_settings import SettingsConfigDict

from kbtp_core.config import Settings

_log = logging.getLogger(__name__)
_ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
_said: set[str] = set()
"""Congestion controls that the log has named already."""

NetworkRule = tuple[bytes, int, str]
"""16 octets of an address, IPv4 as IPv6 has it (::ffff:a.b.c.d), the length of the prefix that counts, and a congestion control."""


def parse_networks(text: str) -> list[NetworkRule]:
    """Rules of "NETWORK=NAME, ...", the narrowest network first. Raises ValueError."""
    rules = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        network, equals, name = (piece.strip() for piece in part.partition("="))
        if not equals or not name:
            raise ValueError(f"{part!r} is no rule; write it like 10.0.0.0/8=dctcp")
        parsed = ipaddress.ip_network(network)
        address, offset = parsed.network_address.packed, 128 - parsed.max_prefixlen
        rules.append((bytes(10) + b"\xff\xff" + address if offset else address, offset + parsed.prefixlen, name))
    return sorted(rules, key=lambda rule: -rule[1])


def _check_networks(text: str) -> str:
    parse_networks(text)
    return text


class RnicSettings(Settings):
    """Settings of a software RNIC."""

    model_config = SettingsConfigDict(env_prefix="KBTP_RNIC_")

    progress_threads: int = Field(1, ge=1, le=64, description="Threads that serve a device's queue pairs; each pair stays with one.")
    spin_s: float = Field(
        50e-6,  # about what it takes to put a thread to sleep and to wake it
        ge=0,
        le=0.01,
        description="Seconds that a thread which has just moved octets, or waits for an answer, looks for more before it sleeps.",
    )
    keepalive_s: int = Field(
        60,
        ge=2,
        le=7200,
        description="Seconds after which a peer is given up that shows no sign of life, or takes nothing of what is sent.",
    )
    congestion_local: str = Field("cubic", description="TCP congestion control for peers on this host; empty: the system's.")
    congestion_remote: str = Field("", description="TCP congestion control for peers elsewhere; empty: the system's.")
    congestion_peers: Annotated[str, AfterValidator(_check_networks)] = Field(
        "", description="TCP congestion control by network, like 10.0.0.0/8=dctcp, fd00::/8=bbr; the narrowest that has the peer counts."
    )

    @property
    def networks(self) -> list[NetworkRule]:
        return parse_networks(self.congestion_peers)


def say_what_is_missing(settings: RnicSettings) -> None:
    """Log each congestion control that the kernel does not grant, once; connections keep the system's then."""
    names = {settings.congestion_local, settings.congestion_remote, *(name for _, _, name in settings.networks)} - {""} - _said
    for name in sorted(names):
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except OSError as error:
            _said.add(name)
            _log.warning(
                "TCP congestion control %s can't be used (%s): connections keep the system's. The kernel allows %s.",
                name,
                error.strerror,
                _allowed(),
            )


def _allowed() -> str:
    try:
        return ", ".join(_ALLOWED.read_text().split())
    except OSError as error:
        return f"what it does not tell ({error.strerror})"
