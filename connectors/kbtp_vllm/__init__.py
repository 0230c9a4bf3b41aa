"""KBTP for vLLM: a decode engine pulls KV blocks out of a prefill engine's paged memory.

The package maps vLLM's block ids to KBTP handles and does no I/O of its own; everything that moves bytes is in
`kbtp_core.transfer`. vLLM finds it through the entry point group `vllm.general_plugins`, which calls `register`.
"""

from __future__ import annotations

from kbtp_vllm import threads as threads  # takes note of the cores before vLLM pins its worker

CONNECTOR = "KBTPConnector"


def register() -> None:
    """Make `--kv-transfer-config '{"kv_connector": "KBTPConnector", ...}'` known to vLLM. May be called many times."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "kbtp_vllm.connector", CONNECTOR)
