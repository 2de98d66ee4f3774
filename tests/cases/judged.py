"""Cases judged wrong for this product, with the reason; they are listed, not run.

Rules of this file: a reason names the promise of ours that the case contradicts.
"""

from __future__ import annotations

from collections.abc import Mapping

JUDGED: Mapping[str, str] = {}
