"""The digest of an embedding's bytes: blake3, hex.

Rules of this file: one function, the same on both ends.
"""

from __future__ import annotations

import blake3

SMALL_BYTES = 128 * 1024
"""Below this a digest takes less time than handing it to a thread."""


def digest_of(data: memoryview | bytes) -> str:
    """Return the blake3 hex digest of `data` (about 3 GB/s on one core; the GIL is released)."""
    return blake3.blake3(data).hexdigest()
