"""Keys that HTTP calls carry, compared in constant time.

Rules of this file: a key never gets into a log, a message or an exception.
"""

from __future__ import annotations

import hmac

from epdctl.errors import NotAuthorised

ADMIN_HEADER = "X-API-Key"


def is_same_secret(offered: str, expected: str) -> bool:
    """Compare two secrets in a time that does not depend on where they differ."""
    return hmac.compare_digest(offered.encode("utf-8", "surrogateescape"), expected.encode("utf-8"))


class AdminKey:
    """The key of the admin API; without one nothing that needs it is allowed."""

    def __init__(self, key: str | None) -> None:
        self._key = key

    def check(self, offered: str | None) -> None:
        """Raise NotAuthorised unless `offered` (the `X-API-Key` header) is the key."""
        if self._key is None:
            raise NotAuthorised("no admin key is configured: start epdctl serve with ADMIN_API_KEY set")
        if offered is None or not is_same_secret(offered, self._key):
            raise NotAuthorised(f"Invalid admin API key: send it in the {ADMIN_HEADER} header")
