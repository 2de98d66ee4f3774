"""Settings: the only reader of the environment.

Rules of this package: a setting is one field here, and so one flag, one `EPDCTL_*` variable and one line in
`docs/configuration.md` (tested). Precedence: flag, then variable, then default. Blank text is refused for all
settings here: one to which it means something says so in its own class.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar, get_args

from pydantic import ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    CLI_SUPPRESS,
    BaseSettings,
    CliApp,
    CliPositionalArg,
    CliSettingsSource,
    SettingsConfigDict,
)

from epdctl.exits import EXIT_FAILED as EXIT_FAILED
from epdctl.exits import EXIT_OK as EXIT_OK
from epdctl.exits import EXIT_USAGE as EXIT_USAGE

LONGEST_S = 31_536_000.0
"""A year: the largest value of a setting that is no whole number; all of them are seconds."""


class CommandSettings(BaseSettings):
    """Base of all commands' settings."""

    model_config = SettingsConfigDict(
        env_prefix="EPDCTL_",
        extra="forbid",
        cli_kebab_case="all",
        cli_implicit_flags="toggle",
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_use_class_docs_for_groups=False,
        populate_by_name=True,
        validate_default=False,
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before", check_fields=False)
    @classmethod
    def _says_something(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse blank text: as a host it would be every address, as a folder the current one.

        A key whose variable is set to nothing is not given; a text that is empty by default may be so.
        """
        if not isinstance(value, str) or value.strip():
            return value
        field = cls.model_fields[str(info.field_name)]
        if CLI_SUPPRESS in field.metadata and not value:
            return None
        if field.default == "":
            return value
        if field.is_required():
            raise ValueError("must not be empty")
        variable = variable_of(str(info.field_name), field)
        raise ValueError(f"must not be empty: give a value, or leave it out and unset {variable}")

    @field_validator("*", check_fields=False)
    @classmethod
    def _within_reason(cls, value: Any) -> Any:
        """Refuse numbers of seconds that the event loop's clock cannot count."""
        if isinstance(value, float) and value > LONGEST_S:
            raise ValueError(f"must be at most {LONGEST_S:.0f}")
        return value

    def refuse_idle(self, *names: str, why: str, variables_count: bool = True) -> None:
        """Refuse fields that were given and would do nothing; `why` says when, such as "without --x".

        `variables_count` is off for variables that other commands read too: they may be meant for those.

        Raises:
            ValueError: one of them was given, as it is by default or not; the text names it and the cure.
        """
        for name in names:
            variable = variable_of(name, type(self).model_fields[name])
            is_variable = any(known.upper() == variable for known in os.environ)
            if name in self.model_fields_set and (variables_count or not is_variable):
                flag = _flag(type(self), (name,))
                cure = f"unset {variable}" if is_variable else "leave it out"
                raise ValueError(f"{flag} does nothing {why}: {cure}")

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Straighten the docstring's margin: it is the text of `--help`."""
        cls.__doc__ = inspect.cleandoc(cls.__doc__ or "")


S = TypeVar("S", bound=CommandSettings)


def public_name(name: str, field: FieldInfo) -> str:
    """Return the name that a setting's flag and variable are made from."""
    return field.validation_alias if isinstance(field.validation_alias, str) else name


def variable_of(name: str, field: FieldInfo) -> str:
    """Return the variable that a setting is read from."""
    public = public_name(name, field)
    return public if public.isupper() else f"EPDCTL_{public.upper()}"


def usage_error(prog: str, message: str) -> NoReturn:
    """Say on stderr what is wrong with the command line, and exit with 2."""
    print(f"{prog}: {message}\n{prog}: see '{prog} --help'", file=sys.stderr)
    raise SystemExit(EXIT_USAGE)


_POSITIONAL = get_args(CliPositionalArg[str])[1]


def _flag(kind: type[CommandSettings], location: tuple[Any, ...]) -> str:
    """Return how the user wrote the setting at `location`: a flag, an argument's name, or a variable."""
    name = str(location[0]) if location else ""
    field = kind.model_fields.get(name)
    if field is not None and _POSITIONAL in field.metadata:
        return name.upper()
    return name if name.isupper() else "--" + name.replace("_", "-")


def _refuse_secrets(kind: type[CommandSettings], prog: str, arguments: Sequence[str]) -> None:
    """Exit with 2 when a secret is given as a flag: everybody on the machine can read a command line."""
    for name, field in kind.model_fields.items():
        flag = "--" + name.replace("_", "-")
        if CLI_SUPPRESS in field.metadata and any(word.split("=")[0] == flag for word in arguments):
            usage_error(prog, f"{flag}: give a key as the variable {field.validation_alias}, not as a flag")


class _ReadableHelp(CliSettingsSource[S]):
    """Shows a list, and a default that is a variable, as their user writes them.

    The method is pydantic-settings' own (2.16); where it is called otherwise, `--help` shows Python's types.
    """

    def _metavar_format(self, obj: Any) -> str:
        shown = str(super()._metavar_format(obj))
        if shown == "tuple[str,...]":
            return "A,B,..."
        return shown.replace("variable_", "variable ", 1) if shown.startswith("variable_") else shown


def load_settings(kind: type[S], prog: str, arguments: Sequence[str]) -> S:
    """Return the settings of `prog` from `arguments` and the environment; exit 2 naming what is wrong."""
    _refuse_secrets(kind, prog, arguments)
    try:
        return CliApp.run(
            kind,
            cli_args=list(arguments),
            cli_settings_source=_ReadableHelp(kind, cli_prog_name=prog, case_sensitive=False),
            cli_cmd_method_name="after_load",
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = _flag(kind, first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        usage_error(prog, f"{where}: {message}" if first["loc"] else message)


def child_environment(**additions: str) -> dict[str, str]:
    """Return this process's environment with `additions`, for a child process."""
    return {**os.environ, **additions}
