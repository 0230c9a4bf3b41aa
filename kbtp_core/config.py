"""Typed settings, declared once as a subclass of `Settings`.

Rules:
1. A setting has a type, a default and a description; documentation and messages are derived from the declaration.
2. Values come from a mapping (an engine's extra configuration, a file) and, where a class sets `env_prefix`, from the
   environment; the mapping wins. Without a prefix nothing is taken from the environment, where a name like HOST means something else.
3. An unknown key is an error that names the nearest match, and a bad value is an error that names the setting and the
   value. Nothing is ignored.
4. A secret is declared with `repr=False`; its value is in no message.
5. A program that takes settings from several places (flags, environment, a file) names them all, the strongest first, in
   `read_layers`, and can say for each value where it came from.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from typing_extensions import Self

from kbtp_core.errors import ConfigError


class Settings(BaseSettings):
    """Base of every configuration; instances do not change."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, validate_default=True)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The mapping, then the environment if there is a prefix."""
        return (init_settings, env_settings) if cls.model_config.get("env_prefix") else (init_settings,)

    @classmethod
    def read(cls, values: Mapping[str, Any], where: str) -> Self:
        """Settings from `values`, which came from `where` (as the user calls it). Raises ConfigError."""
        check_known(values, cls.model_fields, where)
        prefix = str(cls.model_config.get("env_prefix") or "")
        if prefix:
            found = [name for name in os.environ if name.upper().startswith(prefix.upper())]
            check_known(found, [prefix + name.upper() for name in cls.model_fields], "the environment")
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError("\n".join(cls._explain(where, problem) for problem in error.errors(include_url=False))) from None

    @classmethod
    def read_layers(cls, layers: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[Self, dict[str, str]]:
        """Settings from several mappings, each with what the user calls it, the strongest first; and where each value came from.

        Raises ConfigError.
        """
        values: dict[str, Any] = {}
        origins = dict.fromkeys(cls.model_fields, "default")
        for where, layer in reversed(layers):
            check_known(layer, cls.model_fields, where)
            values.update(layer)
            origins.update(dict.fromkeys(layer, where))
        try:
            return cls(**values), origins
        except ValidationError as error:
            problems = error.errors(include_url=False)
            texts = [cls._explain(origins.get(str((*problem["loc"], "")[0]), "settings"), problem) for problem in problems]
            raise ConfigError("\n".join(texts)) from None

    @classmethod
    def from_environment(cls, prefix: str) -> dict[str, str]:
        """The layer of the environment: variables named `prefix` and a setting in capitals. Raises ConfigError for an unknown one."""
        found = {name: value for name, value in os.environ.items() if name.startswith(prefix)}
        check_known(found, [prefix + name.upper() for name in cls.model_fields], "the environment")
        return {name.removeprefix(prefix).lower(): value for name, value in found.items()}

    @classmethod
    def describe(cls) -> list[tuple[str, str, str, str]]:
        """(name, type, default, description) of each setting, for documentation."""
        return [
            (name, _type_name(field.annotation), "required" if field.is_required() else repr(field.default), field.description or "")
            for name, field in cls.model_fields.items()
        ]

    @classmethod
    def _explain(cls, where: str, problem: Mapping[str, Any]) -> str:
        if not problem["loc"]:  # of the settings together, whose values may be secrets
            return f"{where}: {problem['msg']}."
        name = ".".join(map(str, problem["loc"]))
        field = cls.model_fields.get(str(problem["loc"][0]))
        value = repr(problem["input"]) if field is None or field.repr else "(not shown)"
        return f"{where}: {name} is {value}: {problem['msg']}."


def secret_of(secret: str | None, secret_file: Path | None, where: str) -> bytes | None:
    """A secret that a setting gives, or that is in the file which another one names. Raises ConfigError."""
    if secret is not None:
        return secret.encode()
    if secret_file is None:
        return None
    try:
        found = secret_file.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{where}: secret_file {secret_file} cannot be read: {error.strerror}.") from error
    if not found:
        raise ConfigError(f"{where}: secret_file {secret_file} is empty; write the secret into it.")
    return found


def check_known(found: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise ConfigError for the first of `found` that is not in `known`, naming the nearest match."""
    names = sorted(known)
    for key in found:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names)}."
            raise ConfigError(f"{where} has no setting {key!r}; {hint}")


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
