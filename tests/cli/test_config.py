"""Settings: typed, and nothing unknown is ignored."""

from __future__ import annotations

import pytest
from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from kbtp_core.config import Settings
from kbtp_core.errors import ConfigError


class Lease(Settings):
    model_config = SettingsConfigDict(env_prefix="KBTP_TEST_")
    lease_s: float = Field(30.0, gt=0, description="How long blocks wait for their reader.")
    host: str = Field("127.0.0.1", description="Where to listen.")
    secret: str = Field("", repr=False, max_length=4, description="A shared secret.")

    @model_validator(mode="after")
    def _secret_needs_a_host(self) -> Lease:
        if self.secret and not self.host:
            raise ValueError("a secret without a host")
        return self


def test_values_are_typed_and_the_rest_has_its_default() -> None:
    settings = Lease.read({"lease_s": "5"}, "the settings")
    assert (settings.lease_s, settings.host) == (5.0, "127.0.0.1")


def test_an_unknown_key_is_an_error_that_names_the_nearest_match() -> None:
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config has no setting 'lease'; did you mean 'lease_s'\?"):
        Lease.read({"lease": 5}, "kv_connector_extra_config")


def test_an_unknown_key_like_no_other_lists_the_settings() -> None:
    with pytest.raises(ConfigError, match="it has host, lease_s, secret"):
        Lease.read({"zzzzzzzzzz": 5}, "the settings")


def test_a_bad_value_is_an_error_that_names_the_setting_and_the_value() -> None:
    with pytest.raises(ConfigError, match=r"the settings: lease_s is -1: Input should be greater than 0"):
        Lease.read({"lease_s": -1}, "the settings")


def test_the_environment_gives_values_and_the_mapping_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KBTP_TEST_HOST", "10.0.0.4")
    monkeypatch.setenv("KBTP_TEST_LEASE_S", "7")
    settings = Lease.read({"lease_s": 9}, "the settings")
    assert (settings.lease_s, settings.host) == (9.0, "10.0.0.4")


def test_an_unknown_variable_is_an_error_that_names_the_nearest_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KBTP_TEST_LEASE", "7")
    with pytest.raises(ConfigError, match="did you mean 'KBTP_TEST_LEASE_S'"):
        Lease.read({}, "the settings")


def test_settings_do_not_change() -> None:
    settings = Lease.read({}, "the settings")
    with pytest.raises(ValueError, match="frozen"):
        settings.host = "10.0.0.5"


def test_a_description_is_derived_from_the_declaration() -> None:
    assert Lease.describe()[0] == ("lease_s", "float", "30.0", "How long blocks wait for their reader.")


def test_a_secret_is_in_no_message() -> None:
    with pytest.raises(ConfigError, match=r"secret is \(not shown\): String should have at most 4") as bad_value:
        Lease.read({"secret": "hunter2"}, "the settings")
    with pytest.raises(ConfigError, match="a secret without a host") as bad_together:
        Lease.read({"secret": "hunt", "host": ""}, "the settings")
    assert "hunt" not in str(bad_value.value) + str(bad_together.value) + repr(Lease.read({"secret": "hunt"}, "the settings"))


class Plain(Settings):
    host: str = Field("127.0.0.1", description="Where to listen.")


def test_without_a_prefix_nothing_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST", "somebody-elses")
    assert Plain.read({}, "the settings").host == "127.0.0.1"
