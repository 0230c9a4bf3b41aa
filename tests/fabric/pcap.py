"""Reads captures of the software RNIC: a pcap reader of a few lines, which checks every length and checksum on its way."""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FIN, SYN, RST, ACK = 1, 2, 4, 16
Address = tuple[str, int]


@dataclass(frozen=True)
class Packet:
    time_ns: int
    source: Address
    destination: Address
    seq: int
    ack: int
    flags: int
    payload: bytes
    has_checksums: bool


def internet_sum(octets: bytes) -> int:
    """Zero if `octets` hold their right checksum (RFC 1071)."""
    padded = octets + b"\0" * (len(octets) % 2)
    total = int(np.frombuffer(padded, ">u2").sum(dtype=np.uint64))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF


def packets(path: Path) -> list[Packet]:
    """Every packet of a capture, which must be whole."""
    data = path.read_bytes()
    assert struct.unpack_from("=IHHiIII", data) == (0xA1B23C4D, 2, 4, 0, 0, 262144, 1)
    return list(_records(data, 24))


def _records(data: bytes, at: int) -> Iterator[Packet]:
    while at < len(data):
        seconds, nanoseconds, kept, length = struct.unpack_from("=IIII", data, at)
        assert kept == length
        assert nanoseconds < 1_000_000_000
        frame = data[at + 16 : at + 16 + length]
        assert len(frame) == length
        yield _packet(seconds * 1_000_000_000 + nanoseconds, frame)
        at += 16 + length


def _packet(time_ns: int, frame: bytes) -> Packet:
    (kind,) = struct.unpack_from(">H", frame, 12)
    ip = frame[14:]
    if kind == 0x0800:
        assert ip[0] == 0x45
        assert ip[9] == 6
        assert struct.unpack_from(">H", ip, 2)[0] == len(ip)
        source, destination, tcp = ip[12:16], ip[16:20], ip[20:]
        has_checksums = ip[10:12] != b"\0\0"
        assert not has_checksums or internet_sum(ip[:20]) == 0
    else:
        assert (kind, ip[0] >> 4, ip[6]) == (0x86DD, 6, 6)
        assert struct.unpack_from(">H", ip, 4)[0] == len(ip) - 40
        source, destination, tcp = ip[8:24], ip[24:40], ip[40:]
        has_checksums = tcp[16:18] != b"\0\0"
    if has_checksums:
        assert internet_sum(source + destination + struct.pack(">II", 6, len(tcp)) + tcp) == 0
    else:
        assert tcp[16:18] == b"\0\0"
    source_port, destination_port, seq, ack, header, flags = struct.unpack_from(">HHIIBB", tcp)
    return Packet(
        time_ns,
        (str(ipaddress.ip_address(source)), source_port),
        (str(ipaddress.ip_address(destination)), destination_port),
        seq,
        ack,
        flags,
        tcp[header >> 4 << 2 :],
        has_checksums,
    )


def streams(found: list[Packet]) -> dict[tuple[Address, Address], bytes]:
    """What each direction carried, keyed by (source, destination); sequence and acknowledgement numbers must be without a gap."""
    carried: dict[tuple[Address, Address], bytes] = {}
    following: dict[tuple[Address, Address], int] = {}
    for packet in found:
        way, back = (packet.source, packet.destination), (packet.destination, packet.source)
        if packet.flags & SYN:
            following[way] = packet.seq
        assert packet.seq == following[way], packet
        if packet.flags & ACK:
            assert packet.ack == following[back], packet
        following[way] += len(packet.payload) + bool(packet.flags & SYN) + bool(packet.flags & FIN)
        carried[way] = carried.get(way, b"") + packet.payload
    return carried
