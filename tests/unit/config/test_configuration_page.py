"""`docs/configuration.md` against the settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from epdctl.cli import COMMANDS, Command, load_reference
from epdctl.config.reference import render_table, replace_tables

pytestmark = pytest.mark.unit

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command.words))
def test_each_setting_has_its_row(command: Command) -> None:
    """The table of a command is exactly what its settings are; `scripts/configuration-tables` writes it."""
    table = render_table(load_reference(command.settings))

    assert f"<!-- epdctl {' '.join(command.words)} -->\n\n{table}\n\n<!-- end -->" in PAGE.read_text("utf-8")


def test_a_row_says_flag_variable_default_and_meaning() -> None:
    """Flags, variables that are not EPDCTL_, keys and positional arguments are shown as they are used."""
    from epdctl.config.client import RemoveSettings
    from epdctl.config.serve import ServeSettings

    serve, remove = render_table(ServeSettings), render_table(RemoveSettings)

    assert "| `--port` | `EPDCTL_PORT` | `8000` | port to listen on; 0 picks a free one |" in serve
    assert "| `--encoder-max-batch-size` | `ENCODER_MAX_BATCH_SIZE` | `0` |" in serve
    assert "| variable only | `ADMIN_API_KEY` | – |" in serve
    assert "| `--no-rewrite` | `EPDCTL_NO_REWRITE` | `false` |" in serve
    assert "| `INSTANCE` |  | required |" in remove


def test_a_page_without_marks_is_an_error() -> None:
    """A new command whose section is missing is noticed."""
    with pytest.raises(ValueError, match="<!-- epdctl fly -->"):
        replace_tables("# page", {"epdctl fly": "table"})
