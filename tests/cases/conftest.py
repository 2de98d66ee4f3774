"""What checks of expectations are tried on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cases.loader import load_case
from tests.cases.world import World
from tests.stubs.consumer import StubConsumer
from tests.stubs.instance import StubInstance

CASE = {"id": "X1", "target": "proxy", "steps": [], "expect": []}


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Return a world in which nothing runs: a decode stub `d0`, an encoder `e0`, a consumer `c0`."""
    path = tmp_path / "X1-made.json"
    path.write_text(json.dumps(CASE))
    made = World(load_case(path), tmp_path)
    made.stubs = {"d0": StubInstance("decode", port=1), "e0": StubInstance("encode", port=2)}
    made.consumers = {"c0": StubConsumer(port=3)}
    return made
