"""What tshark sees in a capture: every start-up frame and FPDU, field by field; and the rules that must hold between FPDUs.

tshark checks each CRC and finds the FPDUs in the TCP stream by itself. It does not check sequence numbers, offsets, or that queue and
opcode belong together: `check_order` does, from tshark's fields.
"""

from __future__ import annotations

import re
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.fabric.pcap import packets, streams

OPTIONS = ("-o", "tcp.try_heuristic_first:TRUE", "-o", "tcp.check_checksum:TRUE", "-o", "ip.check_checksum:TRUE")
# Dissectors that guess at payloads and take what is none of theirs.
NO_GUESSING = ("--disable-protocol", "rpcordma", "--disable-protocol", "smb_direct")
QUEUES = {1: 1, 3: 0, 4: 0, 5: 0, 6: 0, 7: 2, 8: 0, 9: 0, 10: 1, 11: 3}
"""Queue number of each untagged opcode; the tagged are 0 and 2."""
KNOWN = (
    # start-up frames judged by RFC 5044, which knows neither revision 2 nor the S bit
    "Res field is NOT set to zero as required by RFC 5044",
    "Rev field is NOT set to one as required by RFC 5044",
    # a FIN
    "This frame initiates the connection closing",
    "This frame undergoes the connection closing",
)


@dataclass
class Fpdu:
    source: str
    """Address and port of its sender."""
    packet: int
    crc: str
    fields: dict[str, int]
    payload: bytes = b""
    """Cut out of the stream where tshark says that it is."""

    @property
    def opcode(self) -> int:
        return self["rdma.opcode"]

    @property
    def is_last(self) -> bool:
        return bool(self["ddp.last_flag"])

    def __getitem__(self, name: str) -> int:
        return self.fields["iwarp_" + name]

    def get(self, name: str) -> int | None:
        return self.fields.get("iwarp_" + name)

    @property
    def payload_bytes(self) -> int:
        return self["mpa.ulpdulength"] - (14 if self["ddp.tagged_flag"] else 18)


@dataclass(frozen=True)
class StartUp:
    source: str
    is_reply: bool
    fields: dict[str, int]

    def __getitem__(self, name: str) -> int:
        return self.fields["iwarp_mpa." + name]


@dataclass
class Seen:
    start_ups: list[StartUp]
    fpdus: list[Fpdu]
    warnings: list[str]
    """Everything that tshark complains of, but for KNOWN."""

    def of(self, opcode: int) -> list[Fpdu]:
        return [fpdu for fpdu in self.fpdus if fpdu.opcode == opcode]


def look(capture: Path) -> Seen:
    """Read a capture with tshark."""
    seen = Seen([], [], _complaints(capture))
    command = ["tshark", *OPTIONS, *NO_GUESSING, "-r", str(capture), "-T", "pdml"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as tshark:
        assert tshark.stdout is not None
        for _, element in ET.iterparse(tshark.stdout):
            if element.tag == "packet":
                _read_packet(element, seen)
                element.clear()
        assert tshark.stderr is not None
        complaint = tshark.stderr.read().decode()
    assert tshark.returncode == 0, complaint
    if not any(start["marker_flag"] for start in seen.start_ups):
        _cut_payloads(seen, capture)
    return seen


def _complaints(capture: Path) -> list[str]:
    """tshark's expert information from notes upwards, malformed packets included: `how often group protocol text`."""
    command = ["tshark", *OPTIONS, *NO_GUESSING, "-r", str(capture), "-q", "-z", "expert,note"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^ +\d+ +\S+ +\S+  (.*)$", done.stdout, re.MULTILINE)
    headings = re.findall(r"^(?:Errors|Warns|Notes) \((\d+)\)$", done.stdout, re.MULTILINE)
    counts = re.findall(r"^ +(\d+) +\S+ +\S+  ", done.stdout, re.MULTILINE)
    assert sum(map(int, headings)) == sum(map(int, counts)), done.stdout
    return [text for text in rows if not text.startswith(KNOWN)]


def _cut_payloads(seen: Seen, capture: Path) -> None:
    """Fill in the payloads. The start-up frame and the FPDUs of a sender are all that it sent, without a gap."""
    for (source, _), octets in streams(packets(capture)).items():
        name = f"{source[0]}:{source[1]}"
        at = sum(20 + start["pdlength"] for start in seen.start_ups if start.source == name)
        for fpdu in seen.fpdus:
            if fpdu.source == name:
                ulpdu = fpdu["mpa.ulpdulength"]
                assert int.from_bytes(octets[at : at + 2], "big") == ulpdu
                fpdu.payload = octets[at + 2 + ulpdu - fpdu.payload_bytes : at + 2 + ulpdu]
                at += 2 + ulpdu + (-(2 + ulpdu) & 3) + 4
        assert at == len(octets)


def _read_packet(packet: ET.Element, seen: Seen) -> None:
    protocols = [protocol for protocol in packet if protocol.tag == "proto"]
    shown = {field.get("name", ""): field.get("show", "") for field in packet.iter("field")}
    source = f"{shown.get('ip.src') or shown.get('ipv6.src')}:{shown['tcp.srcport']}"
    for protocol in protocols:
        name = protocol.get("name", "")
        if name == "iwarp_mpa":
            fields = _numbers(protocol)
            if "iwarp_mpa.ulpdulength" in fields:
                crc = next((f.get("showname", "") for f in protocol.iter("field") if f.get("name") == "iwarp_mpa.crc_check"), "unchecked")
                seen.fpdus.append(Fpdu(source, int(shown["num"]), crc, fields))
            else:
                seen.start_ups.append(StartUp(source, "iwarp_mpa.rep" in fields, fields))
        if name == "iwarp_ddp_rdmap":
            seen.fpdus[-1].fields.update(_numbers(protocol))


def _numbers(protocol: ET.Element) -> dict[str, int]:
    """The value of every field, first come first; 0 for those that are only a heading."""
    numbers: dict[str, int] = {}
    for field in protocol.iter("field"):
        show = field.get("show", "")
        number = int(show) if show.isdigit() else 0
        if show[:2] == "0x":
            number = int(show, 16)
        elif ":" in show:  # a row of octets
            number = int(field.get("value", ""), 16)
        numbers.setdefault(field.get("name", ""), number)
    return numbers


def check(seen: Seen, warnings: Iterable[str] = ()) -> None:
    """Every CRC is good, the order is right, and tshark has nothing to say but `warnings` (parts of texts)."""
    assert [s.is_reply for s in seen.start_ups] == [False, True] * (len(seen.start_ups) // 2)
    assert seen.fpdus, "tshark found no FPDU"
    assert [fpdu for fpdu in seen.fpdus if not fpdu.crc.endswith("(Good CRC32)")] == []
    check_order(seen.fpdus)
    assert [text for text in seen.warnings if not any(known in text for known in warnings)] == []


def check_order(fpdus: list[Fpdu]) -> None:
    """Messages of one sender follow each other without a gap, on each queue, and so do the segments of a message."""
    msn: dict[tuple[str, int], int] = {}
    following: dict[str, tuple[int, ...]] = {}  # of a sender with a message open: what its next segment must be
    for fpdu in fpdus:
        assert (fpdu["ddp.dv"], fpdu["rdma.version"], fpdu["ddp.rsvd"], fpdu["rdma.rsv"]) == (1, 1, 0, 0)
        is_tagged = bool(fpdu["ddp.tagged_flag"])
        assert is_tagged == (fpdu.opcode in (0, 2))
        head: tuple[int, ...]
        if is_tagged:
            head, at = (fpdu.opcode, fpdu["ddp.stag"]), fpdu["ddp.tagged_offset"]
        else:
            queue = fpdu["ddp.qn"]
            assert queue == QUEUES[fpdu.opcode]
            assert fpdu["ddp.msn"] == msn.setdefault((fpdu.source, queue), 1)
            msn[fpdu.source, queue] += fpdu.is_last
            head, at = (fpdu.opcode, queue, fpdu["ddp.msn"]), fpdu["ddp.mo"]
        if fpdu.source in following:
            assert (*head, at) == following.pop(fpdu.source)
        elif not is_tagged:
            assert at == 0
        if not fpdu.is_last:
            assert fpdu.payload_bytes > 0
            following[fpdu.source] = (*head, at + fpdu.payload_bytes)
    assert following == {}
