"""Ports for tests: free, below the kernel's ephemeral range, and never handed out twice.

Rules of this file: one cursor file per user serialises all test processes of the machine, so that two of
them do not pick the same port in the moment before either listens; outgoing connections cannot take one of
these ports either, because they use 32768 and above. Mooncake listens on random ports from 15000 to 17000, so
tests begin above those.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

FIRST_PORT, LAST_PORT = 17_001, 32_000


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that nobody listens on and that no other test got lately."""
    return free_ports(1, host)[0]


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return `count` neighbouring free ports, for listeners whose ports are derived from a base."""
    path = Path(tempfile.gettempdir()) / f"epdctl-test-ports-{os.getuid()}"
    with path.open("a+") as cursor:
        fcntl.flock(cursor, fcntl.LOCK_EX)
        port = _read_cursor(cursor.fileno())
        for _ in range(LAST_PORT - FIRST_PORT):
            if port + count > LAST_PORT:
                port = FIRST_PORT
            run = list(range(port, port + count))
            port += 1
            if all(_is_free(candidate, host) for candidate in run):
                _write_cursor(cursor.fileno(), run[-1] + 1)
                return run
    raise RuntimeError(f"no {count} free ports between {FIRST_PORT} and {LAST_PORT}")


def _read_cursor(descriptor: int) -> int:
    os.lseek(descriptor, 0, os.SEEK_SET)
    text = os.read(descriptor, 16)
    if not text.strip().isdigit():
        return random.randrange(FIRST_PORT, LAST_PORT)
    return max(FIRST_PORT, int(text))


def _write_cursor(descriptor: int, port: int) -> None:
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.write(descriptor, str(port).encode())


def _is_free(port: int, host: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
