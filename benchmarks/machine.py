"""What a benchmark says of the machine it ran on, and how it keeps the terminal for its own figures."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def machine() -> str:
    """Return the class of this machine and its load now."""
    load = os.getloadavg()[0]
    python = ".".join(platform.python_version_tuple()[:2])
    return (
        f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {python}, load {load:.1f}"
    )


@contextmanager
def quietly() -> Iterator[None]:
    """Send what C libraries write to standard error nowhere, for the time of the block."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
