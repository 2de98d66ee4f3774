"""Mooncake Store as a cache of embeddings that all encode workers share.

    client = StoreClient(StoreSettings(address="10.0.0.9:50051", ...))
    client.connect()                 # also: is it there again? raises StoreDown
    client.get(key)                  # -> StoredValue, or None; raises StoreDown
    client.put(key, value)           # -> PutOutcome; raises StoreDown
    client.close()

Every call blocks, for up to 5 s with the settings of `transfer.environment` when the store hangs: they are
made on threads of their own, whose callers do not wait that long. `get` and `put` may run at the same time,
`connect` and `close` beside a `put` only.

Rules of this file: the only one that imports Mooncake's store. What it may do and what the codes mean is
from measurements of mooncake-transfer-engine 0.3.13. Setting up and closing a client hold Python's lock all
the time, 2 to 12 s when the master hangs or is gone: both are done only right after it answered. A
restarted master is found again by the client itself. -200 and -600 say that there is no space for a value,
-700 to -799 are about one key, a `get_buffer` that fails is None for every reason. A closed client must
never be called again (it ends the process).
"""

from __future__ import annotations

import importlib
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from epdctl.worker.encode.cache import Facts
from epdctl.worker.encode.store_value import PREFIX, parse_value
from epdctl.worker.transfer.mooncake import TransferSetupFailed

_ANSWER_S = 0.5
_NO_REQUEST = bytes(32)
_PROBE_KEY = PREFIX + "probe"
_FULL = (-200, -600)
_KEY_CODES = range(-799, -699)
_OWNER_GONE = -800


class StoreDown(Exception):
    """The store does not answer, or not as it should; the text says how."""


class PutOutcome(StrEnum):
    """How a publication ended at a store that answers."""

    STORED = "stored"
    FULL = "full"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Where the master is and how this process takes part.

    address: host:port of `mooncake_master`.
    host: what other clients connect to, to read from this one's segment.
    segment_bytes: memory that this process lends to the store; 0 lends nothing.
    buffer_bytes: memory through which values pass; the largest value, and all that are read at a time.
    """

    address: str
    host: str
    protocol: str
    segment_bytes: int
    buffer_bytes: int

    @property
    def parts(self) -> tuple[str, int]:
        """Host and port of the master."""
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredValue:
    """A checked value. `rows` lie in the client's buffer, which has less room for as long as they live."""

    facts: Facts
    rows: memoryview


def load_store() -> Any:
    """Return a new, unconnected client of the wheel; raises TransferSetupFailed."""
    try:
        return importlib.import_module("mooncake.store").MooncakeDistributedStore()
    except ImportError as error:
        raise TransferSetupFailed(f"Mooncake's store client cannot be loaded: {error}") from error


class StoreClient:
    """See the module."""

    def __init__(self, address: StoreAddress, *, load: Callable[[], Any] = load_store) -> None:
        self._address = address
        self._load = load
        self._store: Any = None
        self._putting = threading.Lock()

    def connect(self) -> None:
        """Make sure that the store answers, setting the client up if need be; raises StoreDown."""
        self._ask_master()
        if self._store is None:
            self._set_up()
        code = int(self._store.is_exist(_PROBE_KEY))
        if code < 0:
            raise StoreDown(f"the master listens and does not answer (code {code})")

    def get(self, key: str) -> StoredValue | None:
        """Return the value of `key`, or None when there is none that is right; raises StoreDown.

        A value that is not right is removed, since the first one written for a key stays otherwise.
        """
        store = self._require()
        name = PREFIX + key
        code = int(store.is_exist(name))
        if code < 0 and code not in _KEY_CODES:
            raise StoreDown(f"the master does not answer (code {code})")
        handle = store.get_buffer(name) if code == 1 else None
        if handle is None:
            return None
        parsed = parse_value(key, memoryview(handle).cast("B"))
        if parsed is None:
            store.remove(name, True)
            return None
        facts, rows = parsed
        return StoredValue(facts=facts, rows=rows)

    def put(self, key: str, value: bytearray) -> PutOutcome:
        """Store `value` under `key`, unless the key has one already; raises StoreDown."""
        with self._putting:
            code = int(self._require().put(PREFIX + key, value))
        if code == 0:
            return PutOutcome.STORED
        if code in _FULL:
            return PutOutcome.FULL
        if code == _OWNER_GONE or code in _KEY_CODES:
            return PutOutcome.FAILED
        raise StoreDown(f"the master does not answer (code {code})")

    def close(self) -> None:
        """Leave the store: the memory lent to it goes, with what lies there; raises StoreDown."""
        with self._putting:
            if self._store is None:
                return
            self._ask_master()
            store, self._store = self._store, None
            store.close()

    def _require(self) -> Any:
        if self._store is None:
            raise StoreDown("the client is not connected")
        return self._store

    def _ask_master(self) -> None:
        """See whether the master reads what it gets: it closes a connection that says nothing it knows."""
        try:
            with socket.create_connection(self._address.parts, _ANSWER_S) as connection:
                connection.sendall(_NO_REQUEST)
                with suppress(ConnectionError):
                    connection.recv(1)
        except TimeoutError as error:
            raise StoreDown(f"the master does not answer within {_ANSWER_S:g} s") from error
        except OSError as error:
            raise StoreDown(f"nobody listens there ({error.strerror})") from error

    def _set_up(self) -> None:
        address = self._address
        store = self._load()
        code = int(
            store.setup(
                address.host,
                "P2PHANDSHAKE",
                address.segment_bytes,
                address.buffer_bytes,
                address.protocol,
                "",
                address.address,
            )
        )
        if code != 0:
            raise StoreDown(f"the client could not be set up (code {code})")
        self._store = store
