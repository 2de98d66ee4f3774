"""The tables of `docs/configuration.md`, made from the settings themselves.

Rules of this file: pure; one row a setting with its flag, its variable, its default and what it means. The
page is rewritten by `scripts/configuration-tables`, and a test fails when it and the settings differ.
"""

from __future__ import annotations

import re

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_settings import CLI_SUPPRESS, CliPositionalArg

from epdctl.config import CommandSettings, public_name, variable_of

_POSITIONAL = CliPositionalArg[str].__metadata__[-1]  # type: ignore[attr-defined]
_HEADER = "| flag | variable | default | meaning |\n|---|---|---|---|"


def render_table(kind: type[CommandSettings]) -> str:
    """Return the Markdown table of a command's settings."""
    return "\n".join([_HEADER, *(_row(kind, name, field) for name, field in kind.model_fields.items())])


def replace_tables(page: str, tables: dict[str, str]) -> str:
    """Return `page` with the table of each command put between its two marks; ValueError without marks."""
    for command, table in tables.items():
        marked = re.compile(f"(<!-- {re.escape(command)} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not marked.search(page):
            raise ValueError(f"the page has no marks '<!-- {command} -->' and '<!-- end -->'")
        page = marked.sub(lambda match, table=table: f"{match[1]}\n{table}\n\n{match[2]}", page)  # type: ignore[misc]
    return page


def _row(kind: type[CommandSettings], name: str, field: FieldInfo) -> str:
    variable = f"`{variable_of(name, field)}`" if _POSITIONAL not in field.metadata else ""
    cells = (_flag(kind, name, field), variable, _default(field), field.description or "")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _flag(kind: type[CommandSettings], name: str, field: FieldInfo) -> str:
    if CLI_SUPPRESS in field.metadata:
        return "variable only"
    if _POSITIONAL in field.metadata:
        return f"`{name.upper()}`"
    flag = public_name(name, field).lower().replace("_", "-")
    shortcut = (kind.model_config.get("cli_shortcuts") or {}).get(flag, flag)
    return f"`--{shortcut}`"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = None if field.default is PydanticUndefined else field.default
    if default in (None, "", ()):
        return "–"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"
