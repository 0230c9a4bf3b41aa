"""The connector's settings: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`, typed.

Each may also come from the environment, as KBTP_VLLM_ and its name in capitals; what the engine's configuration says wins. An
unknown key or a bad value stops the engine at start, with a text that names the key and the way out.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode, SettingsConfigDict

from kbtp_core.client import Client
from kbtp_core.config import Settings, secret_of
from kbtp_core.errors import ConfigError
from kbtp_core.store.settings import parse_address
from kbtp_vllm.store_client import options

WHERE = "kv_connector_extra_config"


def _members(value: Any) -> Any:
    members = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    for member in members if isinstance(members, list) else ():
        parse_address(str(member))
    return members


Members = Annotated[list[str], NoDecode, BeforeValidator(_members)]
"""host:port, a list or separated by commas."""


class ConnectorConfig(Settings):
    """Every key of `kv_connector_extra_config`."""

    model_config = SettingsConfigDict(env_prefix="KBTP_VLLM_")

    mode: Literal["pull", "store", "pull+store"] = Field(
        "pull", description="pull: decode loads blocks from prefill's memory. store: prompts' prefixes are kept in a store. Or both."
    )
    host: str | None = Field(None, min_length=1, description="Address a prefill worker listens on and tells decode. Default: vLLM's own.")
    port: int = Field(0, ge=0, le=65535, description="Port of the first worker; the next workers take the next ports. 0: any free port.")
    lease_s: float = Field(30.0, gt=0, description="Seconds that prefill keeps a finished request's blocks for a decode that has not come.")
    load_timeout_s: float = Field(10.0, gt=0, description="Seconds after which decode gives a load up and recomputes.")
    secret: str | None = Field(
        None, min_length=1, repr=False, description="Shared secret of the trust domain; both engines prove that they have it."
    )
    secret_file: Path | None = Field(None, description="A file that holds the secret (white space at both ends is dropped).")
    trust_domain: str = Field(
        "", max_length=255, description="Name of the secret: engines of one trust domain may read each other's blocks."
    )
    staging: Literal["auto", "always"] = Field(
        "auto",
        description="Copy blocks through host memory: auto, if the RNIC can't reach the KV cache (an accelerator's memory); or always.",
    )
    stage_mib: int = Field(1024, ge=1, description="Host memory for staging, in MiB for each worker and direction.")
    store: Members = Field([], description="Stores (`kbtp serve`) as host:port, a list or separated by commas. Needed for mode store.")
    tenant: str = Field("vllm", min_length=1, max_length=255, description="Whose values these are in the store: quotas count by tenant.")
    save: Literal["all", "prompt", "none"] = Field(
        "all", description="What is saved: all full blocks, those of prompts alone, or none. A kv_consumer saves nothing."
    )
    save_share: float = Field(
        0.25, gt=0, le=0.9, description="Largest share of the KV cache that waits for being saved; what comes on top is not saved."
    )
    save_timeout_s: float = Field(5.0, gt=0, description="Seconds after which a save to the store is given up.")
    store_timeout_s: float = Field(0.5, gt=0, description="Seconds that a request waits for a lookup at most; then it is computed.")
    store_ttl_s: int = Field(0, ge=0, description="Seconds that saved blocks live; 0: until the store evicts them.")
    store_stripes: int = Field(1, ge=1, le=16, description="Connections to each store.")
    table_factor: int = Field(4, ge=1, le=64, description="Handles for each KV block: how many finished requests may share a block.")

    @property
    def has_pull(self) -> bool:
        return "pull" in self.mode

    @property
    def has_store(self) -> bool:
        return "store" in self.mode

    def store_client(self, space: bytes, block_bytes: int, name: str) -> Client:
        """A client of all stores; connects when it is first used."""
        how = options(block_bytes, name, secret=self.secret_bytes(), trust_domain=self.trust_domain, stripes=self.store_stripes)
        return Client(self.store, space, timeout_s=self.save_timeout_s, ttl_s=self.store_ttl_s, options=how)

    def secret_bytes(self) -> bytes | None:
        """The secret, read from its file if need be. Raises ConfigError."""
        return secret_of(self.secret, self.secret_file, WHERE)


def read_config(extra: Mapping[str, Any]) -> ConnectorConfig:
    """Parse vLLM's `kv_connector_extra_config`. Raises ConfigError."""
    config = ConnectorConfig.read(extra, WHERE)
    if config.secret is not None and config.secret_file is not None:
        raise ConfigError(f"{WHERE}: secret and secret_file are both set; keep one.")
    if config.has_store and not config.store:
        raise ConfigError(f'{WHERE}: mode is "{config.mode}" and store is empty; set store to the address of a `kbtp serve`, host:port.')
    if config.store and not config.has_store:
        raise ConfigError(f'{WHERE}: store is set and mode is "{config.mode}"; set mode to "store" or "pull+store", or drop store.')
    if config.host is not None and _is_wildcard(config.host):
        raise ConfigError(f"{WHERE}: host is {config.host!r}, which no decode engine can connect to; give the address that it reaches.")
    return config


def exposed_secret(extra: Mapping[str, Any]) -> str | None:
    """What to tell the user whose secret is in the engine's configuration: vLLM prints that into its log."""
    if extra.get("secret") is None:
        return None
    return (
        f"{WHERE}: secret is in the engine's configuration, which vLLM writes to its log and which its command line shows. "
        "Keep it in a file and name that as secret_file, or give it as KBTP_VLLM_SECRET in the environment; then change the secret."
    )


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False  # a name
