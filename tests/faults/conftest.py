"""What starts processes that both ends of EC transfer are tried with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.faults.transfer_ends import Ends


@pytest.fixture
async def ends(tmp_path: Path) -> AsyncIterator[Ends]:
    """Return a starter of transfer ends."""
    starter = Ends(tmp_path / "logs")
    yield starter
    await starter.close()
