"""`epdctl worker encode` with the engine of `device_arena_engine`: same flags, same front."""

from __future__ import annotations

import sys

from epdctl.config import load_settings
from epdctl.config.worker import EncodeSettings
from epdctl.worker.encode.main import run

if __name__ == "__main__":
    settings = load_settings(EncodeSettings, "epdctl worker encode", sys.argv[1:])
    raise SystemExit(run(settings, engine_module="tests.stubs.device_arena_engine"))
