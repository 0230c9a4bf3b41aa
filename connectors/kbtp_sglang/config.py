"""The backend's settings: keys of SGLang's `--hicache-storage-backend-extra-config`, typed.

Each may also come from the environment, as KBTP_SGLANG_ and its name in capitals; what the engine's configuration says wins. An unknown
key or a bad value stops the engine at start, with a text that names the key and the way out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from kbtp_core.config import Settings, secret_of
from kbtp_core.errors import ConfigError

WHERE: Final = "--hicache-storage-backend-extra-config"
ENGINE_KEYS: Final = frozenset({"backend_name", "module_path", "class_name", "interface_v1", "allocator", "prefetch_threshold"})
"""Keys of the same mapping that are SGLang's own, or were taken out by it in another version."""


class HiCacheConfig(Settings):
    """Every key of the backend."""

    model_config = SettingsConfigDict(env_prefix="KBTP_SGLANG_")

    stores: str = Field("127.0.0.1:7400", min_length=1, description="The stores, host:port, with commas between; a key belongs to one.")
    tenant: str = Field("sglang", min_length=1, description="Whose values these are: quotas of the store are per tenant.")
    model: str = Field("", description="Name that pages are kept under. Default: the model path that SGLang was started with.")
    revision: str = Field(
        "", description="What else changes the KV bytes and SGLang doesn't tell a backend: say, a fine-tune under the same path."
    )
    timeout_s: float = Field(
        0.6, gt=0, description="Seconds without any page after which the store counts as dead: then calls are misses at once."
    )
    batch_timeout_s: float = Field(5.0, gt=0, description="Seconds after which a batch is given up that a living store is slow to carry.")
    round_mib: int = Field(32, ge=1, description="MiB that are on their way at once in a batch; the store has timeout_s for them.")
    probe_s: float = Field(1.0, gt=0, description="Seconds between looks whether a dead store is back.")
    ttl_s: int = Field(0, ge=0, description="Seconds that pages live. 0: until they are evicted.")
    block_bytes: int = Field(
        16 << 10, ge=64, description="Least size of the store's blocks that are asked for; larger pages ask for blocks of their size."
    )
    stripes: int = Field(1, ge=1, le=64, description="Connections to each store: more where one is slower than the network.")
    secret: str | None = Field(None, min_length=1, repr=False, description="Shared secret of the trust domain.")
    secret_file: Path | None = Field(None, description="A file that holds the secret (white space at both ends is dropped).")
    trust_domain: str = Field("", max_length=255, description="Name of the secret.")

    @property
    def members(self) -> list[str]:
        return [name.strip() for name in self.stores.split(",") if name.strip()]

    def secret_bytes(self) -> bytes | None:
        """The secret, read from its file if need be. Raises ConfigError."""
        return secret_of(self.secret, self.secret_file, WHERE)


def read_config(extra: Mapping[str, Any]) -> HiCacheConfig:
    """Parse the mapping that SGLang hands to its backend. Raises ConfigError."""
    config = HiCacheConfig.read({key: value for key, value in extra.items() if key not in ENGINE_KEYS}, WHERE)
    if config.secret is not None and config.secret_file is not None:
        raise ConfigError(f"{WHERE}: secret and secret_file are both set; keep one.")
    if not config.members:
        raise ConfigError(f"{WHERE}: stores is {config.stores!r}, which names none; give host:port.")
    return config
