"""The client of the store, as an engine's halves open it."""

from __future__ import annotations

from kbtp_core.client import Client
from kbtp_core.store.link import LinkOptions
from kbtp_vllm.config import ConnectorConfig

QUOTA_BYTES = 256 << 20  # of values on their way to a store


def open_client(config: ConnectorConfig, space: bytes, block_bytes: int, name: str) -> Client:
    """A client of all members; connects when it is first used."""
    options = LinkOptions(
        block_bytes=block_bytes,
        secret=config.secret_bytes(),
        trust_domain=config.trust_domain,
        client_name=f"vllm {name}",
        quota=max(8, min(1024, QUOTA_BYTES // block_bytes)),
        stripes=config.store_stripes,
    )
    return Client(config.store, space, timeout_s=config.save_timeout_s, ttl_s=config.store_ttl_s, options=options)
