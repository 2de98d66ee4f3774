"""An embedding, and the value of it that lies in the shared store."""

from __future__ import annotations

from blake3 import blake3

from epdctl.worker.encode.cache import Facts
from epdctl.worker.encode.store_value import header_of

ROWS = bytes(range(64)) * 4
FACTS = Facts(
    rows=4, width=16, dtype="float32", digest=blake3(ROWS).hexdigest(), metadata={"image_grid_thw": [1, 4, 4]}
)


def value_of(key: str, rows: bytes = ROWS, facts: Facts = FACTS) -> bytearray:
    """Return a value as it lies in the store."""
    return bytearray(header_of(key, len(rows), facts) + rows)
