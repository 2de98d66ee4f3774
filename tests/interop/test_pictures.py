"""vLLM's loader and the pixels that the unit tests compare ours with."""

from __future__ import annotations

import base64
import json

import pytest

from tests.interop.installed import Installed
from tests.interop.picture_files import DECODED, decode_with_vllm

pytestmark = pytest.mark.interop


def test_the_installed_vllm_decodes_as_the_page_says(installed: Installed) -> None:
    """Each file of the page has the pixels that the installed vLLM gives it."""
    page = json.loads(DECODED.read_text())["pictures"]
    files = {name: base64.b64decode(row["file"]) for name, row in page.items()}

    found = decode_with_vllm(installed.python, files)

    assert found == {name: [row["white"], row["background"]] for name, row in page.items()}
