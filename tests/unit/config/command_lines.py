"""What every command line must hold."""

from __future__ import annotations

from epdctl.cli import Command, load_reference

REQUIRED = {
    "instance": "http://10.0.0.5:8001",
    "shape": "1e1pd",
    "model": "--model=m",
    "role": "--role=encode",
}
"""By field."""


def required(command: Command, *, but: str = "") -> list[str]:
    """Return the arguments without which `command` does not run, but for the field `but`."""
    fields = load_reference(command.settings).model_fields
    return [REQUIRED[name] for name, field in fields.items() if field.is_required() and name != but]
