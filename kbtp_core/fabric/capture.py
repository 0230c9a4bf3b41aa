"""Captures: what the connections of a software RNIC carried, as a pcap file for Wireshark and tshark (docs/captures.md).

Off unless a device is made with a `Capture`, or the environment asks for one of every device (`CaptureSettings`).
"""

from __future__ import annotations

import itertools
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from kbtp_core.config import Settings

MIB = 1 << 20
_numbers = itertools.count(1)


class CaptureSettings(Settings):
    """Captures of every software RNIC of a process, from the environment."""

    model_config = SettingsConfigDict(env_prefix="KBTP_CAPTURE_")

    folder: Path | None = Field(None, description="An existing folder that gets one file a device. Default: no captures.")
    limit_mib: int = Field(256, ge=1, description="Size of a file, in MiB; later packets are counted and not written.")
    checksums: bool = Field(True, description="Compute the checksums of IP and TCP; else they are zero.")


@dataclass(frozen=True)
class Capture:
    """A file that gets the packets of one device; it is made anew."""

    path: Path
    limit_bytes: int = 256 * MIB
    checksums: bool = True


def wanted_by_environment() -> Capture | None:
    """A file of its own for one more device, if the environment asks for captures. Raises ConfigError for settings that make no sense."""
    settings = CaptureSettings.read({}, "the environment")
    if settings.folder is None:
        return None
    name = f"kbtp-{socket.gethostname()}-{os.getpid()}-{next(_numbers)}.pcap"
    return Capture(settings.folder / name, settings.limit_mib * MIB, settings.checksums)
