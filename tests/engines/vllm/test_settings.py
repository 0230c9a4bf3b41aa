"""What users and routers hand in: the connector's settings and `kv_transfer_params`."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kbtp_core.errors import ConfigError
from kbtp_vllm import connector
from kbtp_vllm.config import read_config
from kbtp_vllm.messages import WorkerAddress
from kbtp_vllm.params import HANDLE_LIMIT, BadParameters, describe_prefill, parse_remote_prefill

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"leases_s": 5}, "'leases_s'; did you mean 'lease_s'?"),
        ({"port": 70000}, "port is 70000"),
        ({"mode": "push"}, "mode is 'push'"),
        ({"lease_s": 0}, "lease_s is 0"),
        ({"host": "0.0.0.0"}, "host is '0.0.0.0'"),
        ({"secret": "a", "secret_file": "b"}, "secret and secret_file are both set"),
    ],
)
def test_a_wrong_setting_is_named(extra: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_config(extra)
    assert text in str(refusal.value)


def test_the_secret_comes_from_its_file_without_white_space(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("word\n")
    assert read_config({"secret_file": str(tmp_path / "secret")}).secret_bytes() == b"word"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config({"secret_file": str(tmp_path / "none")}).secret_bytes()


@pytest.mark.parametrize("extra", [{"secret": "word of mouth"}, {"secret_file": "somewhere"}, {}])
def test_only_a_secret_that_vllm_would_log_is_warned_about(
    extra: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KBTP_VLLM_SECRET" if not extra else "KBTP_OTHER", "word of mouth")
    monkeypatch.setattr(connector.geometry, "check_movable", lambda *_: None)
    monkeypatch.setattr(connector, "PullScheduler", lambda *_: None)
    monkeypatch.setattr(connector, "logger", logging.getLogger("kbtp.test"))  # vLLM's own does not propagate
    transfer = SimpleNamespace(kv_connector_extra_config=extra, is_kv_consumer=False)
    config = SimpleNamespace(kv_transfer_config=transfer, parallel_config=None)

    connector.KBTPConnector(config, KVConnectorRole.SCHEDULER, None)

    warnings = [record.getMessage() for record in caplog.records if record.name == "kbtp.test"]
    assert len(warnings) == ("secret" in extra)
    assert all("secret_file" in text and "KBTP_VLLM_SECRET" in text and "word of mouth" not in text for text in warnings)


def test_the_environment_gives_settings_that_the_configuration_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KBTP_VLLM_LEASE_S", "7")
    monkeypatch.setenv("KBTP_VLLM_PORT", "7400")
    config = read_config({"port": 7500})
    assert (config.lease_s, config.port) == (7, 7500)


def described() -> dict[str, Any]:
    return describe_prefill(
        engine_id="e",
        request_id="r",
        token_count=40,
        block_tokens=32,
        tp_size=1,
        pp_size=1,
        prompt="a" * 64,
        workers=[WorkerAddress("10.0.0.4", 7400, 2**63 + 1)],
        block_ids=[[0, 9, 4]],
        handles=[[0, 17, 18]],
        generations=[[0, 2, 4]],
    )


def test_what_prefill_describes_decode_reads() -> None:
    remote = parse_remote_prefill(described())
    assert remote.workers() == (WorkerAddress("10.0.0.4", 7400, 2**63 + 1),)
    assert (remote.kbtp_handles, remote.kbtp_generations, remote.remote_num_tokens) == ([[0, 17, 18]], [[0, 2, 4]], 40)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kbtp_format": 2}, "kbtp_format"),
        ({"kbtp_generations": [[1]]}, "differ in length"),
        ({"kbtp_handles": [[-1, 2, 3]]}, "kbtp_handles.0.0"),
        ({"kbtp_generations": [[1, 2, 70000]]}, "kbtp_generations.0.2"),
        ({"kbtp_generations": [[0, 2, 0]]}, "kbtp_generations has 0 for a block"),
        ({"kbtp_handles": [[0, 0, 0]]}, "kbtp_handles names no block at all"),
        ({"kbtp_handles": [[]], "kbtp_generations": [[]]}, "kbtp_handles names no block at all"),
        ({"kbtp_handles": [[1] * HANDLE_LIMIT, [1]]}, f"kbtp_handles: Value error, {HANDLE_LIMIT + 1} block positions"),
        ({"kbtp_generations": [[1] * HANDLE_LIMIT, [1]]}, f"kbtp_generations: Value error, {HANDLE_LIMIT + 1} block positions"),
        ({"kbtp_workers": []}, "kbtp_workers"),
        ({"tp_size": 2}, "names 1 workers"),
        ({"remote_num_tokens": "many"}, "remote_num_tokens"),
    ],
)
def test_a_bad_parameter_is_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises(BadParameters) as refusal:
        parse_remote_prefill(described() | change)
    assert text in str(refusal.value)


def test_parameters_of_another_connector_are_told_apart() -> None:
    params = described()
    del params["kbtp_format"]
    with pytest.raises(BadParameters, match="does not use KBTPConnector"):
        parse_remote_prefill(params)
