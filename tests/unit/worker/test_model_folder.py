"""What is wrong with a model's folder is told, not what transformers raised."""

from __future__ import annotations

from pathlib import Path

import pytest

from epdctl.worker.model_folder import unreadable_config

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "there is no config.json, so this is no model's folder"),
        ("{", "config.json is no JSON"),
        ("[]", "config.json names no model_type"),
        ("{}", "config.json names no model_type"),
        ('{"model_type": "new"}', "is of no model that is known here, or not whole (ValueError)"),
    ],
)
def test_the_reason_is_told(tmp_path: Path, text: str | None, words: str) -> None:
    """Absent, broken, of something else, or unknown: each in its own words, behind the folder."""
    if text is not None:
        (tmp_path / "config.json").write_text(text)

    said = unreadable_config(tmp_path, ValueError("long"))

    assert said.startswith(f"{tmp_path}: ")
    assert said.endswith(words)
