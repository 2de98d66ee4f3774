"""Which data-parallel replica serves a request.

Rules of this file: pure. A rank that the request names is obeyed or refused, never replaced: its embeddings
were pushed to that replica.
"""

from __future__ import annotations

from collections.abc import Sequence

from epdctl.errors import InvalidRequest

RANK_HEADER = "X-data-parallel-rank"
"""The header with which vLLM's proxy pins a request to a replica."""


def parse_rank(value: str | None, replicas: int) -> int | None:
    """Return the replica that the header names, None without a header; raises InvalidRequest."""
    if value is None:
        return None
    if not (value.isascii() and value.isdigit()) or int(value) >= replicas:
        raise InvalidRequest(f"{RANK_HEADER} must be from 0 to {replicas - 1}", param=RANK_HEADER)
    return int(value)


def choose_replica(ready: Sequence[bool], loads: Sequence[int], turn: int) -> int:
    """Return the ready replica with the fewest requests; among equals the next one from `turn` on.

    When none is ready the choice is made as if all were, and the call says what is wrong.
    """
    candidates = [i for i, is_ready in enumerate(ready) if is_ready] or list(range(len(ready)))
    return min(candidates, key=lambda i: (loads[i], (i - turn) % len(ready)))
