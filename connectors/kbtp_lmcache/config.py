"""The settings of the plugin, typed.

The plugin reads `remote_storage_plugin.NAME.SETTING` of LMCache's `extra_config`, or a URL `kbtp://host:port,host:port?SETTING=...`;
Each may also come from the environment, as KBTP_LMCACHE_ and its name in capitals; what LMCache's
configuration says wins. An unknown key or a bad value is an error that names the key and the way out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from kbtp_core.client import Client
from kbtp_core.config import Settings, secret_of
from kbtp_core.errors import ConfigError
from kbtp_core.store.identity import Namespace
from kbtp_core.store.link import LinkOptions

SCHEME: Final = "kbtp://"
_LMCACHES_OWN: Final = ("module_path", "class_name")


class LmcacheConfig(Settings):
    """Every setting."""

    model_config = SettingsConfigDict(env_prefix="KBTP_LMCACHE_")

    members: str = Field("", description="Stores as host:port, with commas between. The same in every engine that shares values.")
    tenant: str = Field("lmcache", min_length=1, description="Whose values these are; a store may limit what a tenant takes.")
    revision: str = Field("", description="Revision of the model's weights: what was made by another one is not found.")
    timeout_s: float = Field(5.0, gt=0, description="Seconds after which a batch that was not answered is a miss.")
    connect_timeout_s: float = Field(3.0, gt=0, description="Seconds for the connection to a store.")
    ttl_s: int = Field(0, ge=0, description="Seconds that values live. 0: until they are evicted.")
    calls_at_once: int = Field(8, ge=1, le=256, description="Batches on their way at a time; further ones wait.")
    stripes: int = Field(1, ge=1, le=16, description="Connections to each store.")
    block_bytes: int = Field(0, ge=0, description="Largest value, to choose a store's pool. 0: the store's default.")
    secret: str | None = Field(None, min_length=1, repr=False, description="Shared secret of the trust domain.")
    secret_file: Path | None = Field(None, description="A file that holds the secret (white space at both ends is dropped).")
    trust_domain: str = Field("", max_length=255, description="Name of the secret.")

    def addresses(self) -> list[str]:
        return [one for one in (part.strip() for part in self.members.split(",")) if one]

    def options(self, where: str) -> LinkOptions:
        """How to connect. Raises ConfigError."""
        return LinkOptions(
            block_bytes=self.block_bytes,
            secret=self._secret_bytes(where),
            trust_domain=self.trust_domain,
            client_name="lmcache",
            connect_timeout_s=self.connect_timeout_s,
            stripes=self.stripes,
        )

    def client(self, namespace: Namespace | bytes, where: str, *, timeout_s: float | None = None) -> Client:
        """Connects when it is first needed. Raises ConfigError."""
        try:
            return Client(self.addresses(), namespace, timeout_s=timeout_s or self.timeout_s, ttl_s=self.ttl_s, options=self.options(where))
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None

    def _secret_bytes(self, where: str) -> bytes | None:
        return secret_of(self.secret, self.secret_file, where)


def plugin_settings(url: str, plugin_name: str | None, extra: Mapping[str, Any] | None) -> tuple[LmcacheConfig, str]:
    """The settings of the engine's plugin, and what the user calls their place. Raises ConfigError."""
    name = plugin_name or "kbtp"
    prefix = f"remote_storage_plugin.{name}."
    values = {key.removeprefix(prefix): value for key, value in (extra or {}).items() if key.startswith(prefix)}
    for own in _LMCACHES_OWN:
        values.pop(own, None)
    where = f"extra_config {prefix}*"
    if url.startswith(SCHEME):
        where = f"remote_url {url}"
        members, _, query = url[len(SCHEME) :].partition("?")
        values |= {"members": members.rstrip("/"), **dict(parse_qsl(query, keep_blank_values=True))}
    return read_settings(values, where), where


def read_settings(values: Mapping[str, Any], where: str) -> LmcacheConfig:
    """Raises ConfigError."""
    members = values.get("members")
    if isinstance(members, list | tuple):
        values = {**values, "members": ",".join(map(str, members))}
    config = LmcacheConfig.read(values, where)
    if not config.addresses():
        raise ConfigError(f"{where}: members is missing; name the stores, as in members: 10.0.0.4:7400,10.0.0.5:7400.")
    if config.secret is not None and config.secret_file is not None:
        raise ConfigError(f"{where}: secret and secret_file are both set; keep one.")
    return config
