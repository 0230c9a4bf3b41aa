"""The settings of `kbtp serve`: one declaration for the file, the environment and the flags.

A file is TOML with the names below at its top. The environment has them as KBTP_STORE_ and the name in capitals, the command line as
--name-with-dashes. Flags win over the environment, that wins over the file.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ByteSize, Field, model_validator
from typing_extensions import Self

from kbtp_core.config import Settings
from kbtp_core.errors import ConfigError
from kbtp_core.store.quota import tenant_named

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENVIRONMENT_PREFIX = "KBTP_STORE_"


def _split(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def parse_address(text: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6]:port". Raises ValueError."""
    host, colon, port = text.strip().rpartition(":")
    is_v6 = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_v6 else host
    if not colon or not host or (":" in host) != is_v6 or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{text!r} is no address; write it like 127.0.0.1:7400 or [::1]:7400")
    return host, int(port)


def _check_address(value: Any) -> Any:
    if isinstance(value, str):
        parse_address(value)
    return value


Address = Annotated[str, BeforeValidator(_check_address)]
"""host:port"""


@dataclass(frozen=True)
class TrustDomain:
    """What a line of the secret file says."""

    secret: bytes
    tenants: frozenset[int] | None
    """Ids of the tenants whose values its clients may use; None: everybody's."""


class StoreSettings(Settings):
    """Every setting of a store."""

    listen: Address = Field("127.0.0.1:7400", description="Address for KBTP; port 0 is any free port.")
    metrics_listen: Address | Literal["off"] = Field("127.0.0.1:7401", description="Address for /metrics, /healthz and /readyz, or off.")
    name: str = Field("", max_length=255, description="What the store calls itself to its clients; empty: its address.")
    ram: ByteSize = Field(ByteSize(1 << 30), ge=1 << 20, description="Memory for values, all pools together.")
    commit_ram: Literal["use", "start"] = Field(
        "use",
        description="When the system gives that memory: as it is used, or all of it in the background from the start on, so that no put "
        "waits for it.",
    )
    data_dir: Annotated[tuple[Path, ...], BeforeValidator(_split)] = Field(
        (), description="Directories for values on disk, one a disk; none: RAM only. In the environment, with commas between them."
    )
    disk: ByteSize = Field(ByteSize(16 << 30), ge=1 << 20, description="Room for values in each data directory.")
    engine: Literal["slab", "file"] = Field("slab", description="How values lie on disk; file is for diagnosis.")
    block: Annotated[tuple[ByteSize, ...], BeforeValidator(_split)] = Field(
        (), description="Block sizes to make pools for at start, with equal shares of the RAM; others are made when a client asks for them."
    )
    write_mode: Literal["back", "around"] = Field(
        "back", description="back: values go to RAM and from there to disk. around: they go to disk, and to RAM when they are read."
    )
    acknowledge: Literal["ram", "disk"] = Field(
        "ram", description="When a put is answered: once the value is in RAM, or once it is on disk."
    )
    dirty_limit: float = Field(0.8, gt=0, le=1, description="Part of the RAM that may wait for the disk; new keys are refused above it.")
    flush_threads: int = Field(2, ge=1, le=64, description="Threads that write values, for each disk.")
    disk_timeout_s: float = Field(
        20.0,
        ge=0.1,
        le=600,
        description="A disk that has done nothing for so many seconds of what it was asked for is taken out of service.",
    )
    ttl_s: int = Field(0, ge=0, description="Seconds until a value expires whose client asked for nothing else; 0: never.")
    quota_file: Path | None = Field(None, description="Committed octets for each tenant; read again on SIGHUP.")
    quota_default: ByteSize = Field(ByteSize(0), description="For tenants that the file does not name; 0: no limit.")
    secret_file: Path | None = Field(
        None,
        description="Trust domains, their secrets and tenants, `DOMAIN SECRET [tenants=A,B]` on each line; clients must prove one.",
    )
    sessions: int = Field(1024, ge=1, le=65536, description="Clients that are served at once.")
    session_quota: ByteSize = Field(ByteSize(64 << 20), ge=1 << 16, description="RAM that one client's unpublished values may hold.")
    progress_threads: int = Field(1, ge=1, le=64, description="Threads of the software RNIC.")
    drain_s: float = Field(10.0, ge=0, description="Seconds that clients and the disk get when the store is asked to stop.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe messages that are logged.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.data_dir and self.acknowledge == "disk":
            raise ValueError("acknowledge is disk, but there is no data_dir; give one, or acknowledge from RAM")
        if not self.data_dir and self.write_mode == "around":
            raise ValueError("write_mode is around, but there is no data_dir to write to")
        if len(set(self.data_dir)) != len(self.data_dir):
            raise ValueError("data_dir names a directory twice")
        return self

    @property
    def address(self) -> tuple[str, int]:
        return parse_address(self.listen)

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        return None if self.metrics_listen == "off" else parse_address(self.metrics_listen)

    @property
    def is_exposed(self) -> bool:
        """Whether others than this machine can reach it."""
        try:
            return not ipaddress.ip_address(self.address[0]).is_loopback
        except ValueError:
            return self.address[0] != "localhost"

    def secrets(self) -> dict[str, bytes]:
        """Trust domains and their secrets. Raises ConfigError naming the line."""
        return {name: domain.secret for name, domain in self.domains().items()}

    def domains(self) -> dict[str, TrustDomain]:
        """What is said of each trust domain. Raises ConfigError naming the line."""
        if self.secret_file is None:
            return {}
        found: dict[str, TrustDomain] = {}
        for number, line in enumerate(_read(self.secret_file, "secret_file").splitlines(), 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            name, *rest = line.split(maxsplit=1)
            secret, tenants = _split_tenants(rest[0].strip() if rest else "", name)
            if not secret or not tenants or name in found:
                raise ConfigError(
                    f"secret_file {self.secret_file}, line {number}: each line is `DOMAIN SECRET`, or `DOMAIN SECRET tenants=A,B`, "
                    "each domain once."
                )
            found[name] = TrustDomain(secret.encode(), None if "*" in tenants else frozenset(map(tenant_named, tenants)))
        if not found:
            raise ConfigError(
                f"secret_file {self.secret_file} has no secret in it; write lines `DOMAIN SECRET`, or leave the setting away."
            )
        return found


def read_settings(flags: Mapping[str, Any], file: Path | None) -> tuple[StoreSettings, dict[str, str]]:
    """The settings, and where each comes from. Raises ConfigError."""
    layers: list[tuple[str, Mapping[str, Any]]] = [
        ("the command line", flags),
        ("the environment", StoreSettings.from_environment(ENVIRONMENT_PREFIX)),
    ]
    if file is not None:
        try:
            layers.append((str(file), tomllib.loads(_read(file, "the configuration"))))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{file} is no TOML: {error}.") from None
    return StoreSettings.read_layers(layers)


def _split_tenants(text: str, domain: str) -> tuple[str, list[str]]:
    """(Secret, names of tenants) of what stands behind a domain; without any it is the tenant of the domain's name."""
    secret, _, last = text.rpartition(" ")
    if not last.startswith("tenants="):
        return text, [domain]
    return secret.strip(), [name for name in last.removeprefix("tenants=").split(",") if name]


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {path} cannot be read: {error}.") from error
