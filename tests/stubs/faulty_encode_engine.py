"""The real encode engine with a tower that fails or stands still on request.

Run by the worker's front instead of `epdctl.worker.encode.engine`. What happens is read, before every
forward, from the file that the variable EPDCTL_TEST_FAULT names: nothing (all well), `raise` (every forward
fails), `poison` (a forward with an all-black picture fails), `hang` (forwards wait until the file changes).
The variable EPDCTL_TEST_CONTROL_TIMEOUT says for how many seconds a consumer's answer is waited for, in the
place of the sender's own.
The file beside it, with `.sizes` at its end, says how many entries the engine's tables have.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from epdctl.errors import EncodeFailed
from epdctl.worker.encode.engine import EncodeEngine
from epdctl.worker.encode.layout import ItemLayout
from epdctl.worker.encode.patch_tower import PatchTower
from epdctl.worker.encode.vision import Outputs, Tower
from epdctl.worker.engine import run_engine

FAULT_FILE = "EPDCTL_TEST_FAULT"
CONTROL_TIMEOUT = "EPDCTL_TEST_CONTROL_TIMEOUT"


def _fault() -> str:
    path = Path(os.environ[FAULT_FILE])
    return path.read_text().strip() if path.exists() else ""


class FaultyTower(PatchTower):
    """A tower with a switch."""

    def encode(self, items: Sequence[tuple[torch.Tensor, ItemLayout]]) -> Outputs:
        """Fail, wait, or encode."""
        while _fault() == "hang":
            time.sleep(0.02)
        is_black = any(
            bool((pixels == pixels.flatten()[0]).sum() * 3 >= pixels.numel()) for pixels, _ in items
        )
        if _fault() == "raise" or (_fault() == "poison" and is_black):
            raise EncodeFailed("the vision tower failed on this item")
        return super().encode(items)


class FaultyEncodeEngine(EncodeEngine):
    """The engine with that tower."""

    async def start(self) -> Mapping[str, Any]:
        """Start the real engine, more or less patient."""
        facts = await super().start()
        if seconds := os.environ.get(CONTROL_TIMEOUT):
            pusher: Any = self._transfer.pusher
            assert pusher._control_timeout_s > 0
            pusher._control_timeout_s = float(seconds)
        return facts

    def load_tower(self) -> Tower:
        """Load the real tower, behind the switch."""
        loaded: Any = super().load_tower()
        loaded.__class__ = FaultyTower
        return loaded  # type: ignore[no-any-return]

    def health(self) -> str | None:
        """Write down how much every table holds, next to the switch, with each heart-beat."""
        sizes = {
            "flights": len(self._flights),
            "asks": len(self._asks),
            "outbox": self._outbox.qsize(),
            "deliveries": len(self._deliveries),
            "announced": len(self._deliveries._announced),
            "pushes": self._transfer.pusher.stats().open,
            "waiting": len(self._queue._waiting),
        }
        sizes_file = Path(os.environ[FAULT_FILE] + ".sizes")
        # Two engines of one worker write it, each when it likes.
        other = sizes_file.with_suffix(f".writing-{os.getpid()}")
        other.write_text(json.dumps(sizes))
        other.replace(sizes_file)
        return super().health()


if __name__ == "__main__":
    raise SystemExit(run_engine(FaultyEncodeEngine))
