"""The settings of a store: where values come from, and what a wrong one says."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbtp_core.errors import ConfigError
from kbtp_core.store.identity import tenant_id
from kbtp_core.store.settings import StoreSettings, parse_address, read_settings


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "store.toml"
    path.write_text('ram = "2GiB"\nlisten = "127.0.0.1:1"\nflush_threads = 3\nblock = ["4KiB", "1MiB"]\n')
    return path


def test_flags_win_over_the_environment_and_that_over_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KBTP_STORE_LISTEN", "127.0.0.1:2")
    monkeypatch.setenv("KBTP_STORE_FLUSH_THREADS", "4")
    settings, origins = read_settings({"flush_threads": "5"}, file)
    assert (settings.ram, settings.address, settings.flush_threads) == (2 << 30, ("127.0.0.1", 2), 5)
    assert settings.block == (4096, 1 << 20)
    assert {name: origins[name] for name in ("ram", "listen", "flush_threads", "engine")} == {
        "ram": str(file),
        "listen": "the environment",
        "flush_threads": "the command line",
        "engine": "default",
    }


def test_directories_in_the_environment_have_commas_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KBTP_STORE_DATA_DIR", "/a, /b")
    settings, _ = read_settings({}, None)
    assert settings.data_dir == (Path("/a"), Path("/b"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rma = 1", r"store.toml has no setting 'rma'; did you mean 'ram'"),
        ("ram = 'much'", r"store.toml: ram is 'much'"),
        ("listen = '7400'", r"store.toml: listen is '7400': .*127.0.0.1:7400"),
        ("acknowledge = 'disk'", r"acknowledge is disk, but there is no data_dir"),
        ("data_dir = ['/a', '/a']", "names a directory twice"),
        ("ram = ", "is no TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "store.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_settings({}, path)


def test_an_unknown_variable_is_refused_with_the_nearest_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KBTP_STORE_LISTENN", "x")
    with pytest.raises(ConfigError, match=r"KBTP_STORE_LISTENN.*KBTP_STORE_LISTEN"):
        read_settings({}, None)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read"):
        read_settings({}, tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("listen", "exposed"),
    [("127.0.0.1:1", False), ("[::1]:1", False), ("localhost:1", False), ("0.0.0.0:1", True), ("[::]:1", True), ("store-3:1", True)],
)
def test_it_knows_whether_others_can_reach_it(listen: str, exposed: bool) -> None:
    assert StoreSettings(listen=listen).is_exposed is exposed


def test_an_address_has_a_host_and_a_port() -> None:
    assert parse_address("[::1]:80") == ("::1", 80)
    for text in ("::1", "host", ":80", "host:port", "host:70000"):
        with pytest.raises(ValueError, match="is no address"):
            parse_address(text)


def test_secrets_come_from_their_file_and_are_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "secrets"
    path.write_text("# domain secret\nprod  one two \ntest three\n")
    assert StoreSettings(secret_file=path).secrets() == {"prod": b"one two", "test": b"three"}
    for text, message in (
        ("prod", "line 1"),
        ("a b\na c", "line 2"),
        ("\n", "no secret in it"),
        ("a b\nc d tenants=", "line 2"),
        ("prod tenants=a", "line 1"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            StoreSettings(secret_file=path).secrets()


def test_a_trust_domain_has_the_tenant_of_its_name_or_those_that_its_line_names(tmp_path: Path) -> None:
    path = tmp_path / "secrets"
    path.write_text("prod\tone two\ntest three four  tenants=a,00000000000000ff\nops five tenants=*\n")
    domains = StoreSettings(secret_file=path).domains()
    assert {name: domain.secret for name, domain in domains.items()} == {"prod": b"one two", "test": b"three four", "ops": b"five"}
    assert domains["prod"].tenants == {tenant_id(b"prod")}
    assert domains["test"].tenants == {tenant_id(b"a"), 0xFF}
    assert domains["ops"].tenants is None
