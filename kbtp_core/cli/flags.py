"""Command line flags out of a class of settings, so that a setting is declared once.

A setting `some_name` becomes `--some-name VALUE`, one that is a tuple may be given several times. Values stay texts here: the settings
read them, and say what is wrong with them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Optional, get_origin

import typer
from pydantic.fields import FieldInfo

from kbtp_core.config import Settings


def with_flags(settings: type[Settings]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of `settings`: it gets those that were used, by name, as the mapping `flags`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**arguments: Any) -> None:
            flags = {name: arguments.pop(name) for name in settings.model_fields}
            command(flags={name: value for name, value in flags.items() if value not in (None, [])}, **arguments)

        own = [parameter for name, parameter in inspect.signature(command, eval_str=True).parameters.items() if name != "flags"]
        parameters = [_parameter(name, field) for name, field in settings.model_fields.items()]
        run.__signature__ = inspect.Signature([*own, *parameters])  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *parameters]}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    is_many = "tuple" in (str(field.annotation), getattr(get_origin(field.annotation), "__name__", ""))
    default = field.get_default()
    shown = False if default in ("", None, ()) else str(getattr(default, "human_readable", lambda: default)())
    option = typer.Option(
        None, f"--{name.replace('_', '-')}", help=field.description, show_default=shown, metavar="VALUE", rich_help_panel="Settings"
    )
    # typer evaluates Optional, not the new form, on every Python that this runs on
    annotation = Optional[list[str]] if is_many else Optional[str]  # noqa: UP045
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation)
