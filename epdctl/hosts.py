"""What a host is: the one definition of settings, of the registry and of the workers.

    is_host("pd-0.example.com"); is_host("10.0.0.5"); is_host("fe80::1%eth0")      # without brackets
    is_host(ascii_form("bücher.example"))

What is no host is refused where it comes in: the system's resolver takes some of that (an empty label, one of
64 characters) for a bug of its caller, and not for a name without an address.

Rules of this file: pure text; nothing is resolved.
"""

from __future__ import annotations

import re
from ipaddress import ip_address

MAX_NAME_CHARS = 253
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\Z")
_ADDRESS = re.compile(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?\Z")


def is_host(text: str) -> bool:
    """Return whether `text` is an IP address, or a name: labels of 1 to 63 letters, digits, `-` and `_`.

    A name has at most 253 characters, is ASCII, and may end with a dot.
    """
    if ":" in text:
        return _is_ipv6(text)
    name = text.removesuffix(".")
    return 0 < len(name) <= MAX_NAME_CHARS and all(_LABEL.match(label) for label in name.split("."))


def is_wildcard(text: str) -> bool:
    """Return whether the host `text` is one to listen on and not to be reached at: `0.0.0.0`, `::` or `*`."""
    try:
        return text == "*" or ip_address(text).is_unspecified
    except ValueError:
        return False


def ascii_form(text: str) -> str:
    """Return a name as resolvers are asked for it (IDNA); "" when it has no such form."""
    if text.isascii():
        return text
    try:
        return text.encode("idna").decode("ascii")
    except UnicodeError:
        return ""


def _is_ipv6(text: str) -> bool:
    try:
        return _ADDRESS.match(text) is not None and ip_address(text).version == 6
    except ValueError:
        return False
