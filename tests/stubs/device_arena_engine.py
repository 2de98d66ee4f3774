"""The real encode engine with its arena in a tensor on the tower's device, also where that is the CPU.

Its staging buffer is smaller than a large embedding, so that one is read in several parts.
"""

from __future__ import annotations

from epdctl.worker.encode.arena_memory import ArenaMemory
from epdctl.worker.encode.device_arena import DeviceArena
from epdctl.worker.encode.engine import EncodeEngine
from epdctl.worker.encode.vision import Tower
from epdctl.worker.engine import run_engine


class DeviceArenaEngine(EncodeEngine):
    """The engine with that arena."""

    def open_memory(self, tower: Tower) -> ArenaMemory:
        """Return it, whatever the flags say."""
        self._log.info("test_arena_on_device")
        return DeviceArena(tower.device, self._settings.cache_bytes, staging_bytes=65536)


if __name__ == "__main__":
    raise SystemExit(run_engine(DeviceArenaEngine))
