"""The one thread that submits and polls Mooncake writes.

Rules of this file: commands come in by a queue, news of jobs go out by `post` (called on this thread); what
is submitted, when, and in which order is decided in `lanes`. The thread never blocks but in Mooncake. A batch
id is polled until it is not 0, and never again: Mooncake frees it then.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from epdctl.worker.transfer.callbacks import call_back
from epdctl.worker.transfer.lanes import JobUpdate, Lanes, Piece, Submission

PROBE_TIMEOUT_S = 2.0
MAX_PROBES = 32
FAST_POLL_S = 0.0001
MEDIUM_POLL_S = 0.00025
SLOW_POLL_S = 0.0005
FAST_POLL_FOR_S = 0.001
LARGE_BYTES = 256 * 1024
"""From here on a write takes longer than a fast poll, and four in flight hide the slower one."""
STOP_TIMEOUT_S = 2.0

DONE = 1


@dataclass(frozen=True, slots=True)
class Add:
    """Queue a job."""

    session: str
    job: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Give a job up."""

    job: int


@dataclass(frozen=True, slots=True)
class Probed:
    """A probe ended."""

    session: str
    reachable: bool


Command = Add | Withdraw | Probed


class Writer:
    """Owns all transfer calls of one engine; its thread starts with the first command."""

    def __init__(self, engine: Any, post: Callable[[list[JobUpdate]], None]) -> None:
        self._engine = engine
        self._post = post
        self._lanes = Lanes()
        self._inbox: deque[Command] = deque()
        self._wake = threading.Event()
        self._stopped = False
        self._running: dict[int, Submission] = {}
        self._submitted_at = 0.0
        self._submitted_large = False
        self._next_look = 0.0
        self._probes: dict[str, float] = {}
        self._probing: set[str] = set()
        self._thread: threading.Thread | None = None
        self._log = structlog.get_logger()

    def tell(self, command: Command) -> None:
        """Hand a command to the thread."""
        self._inbox.append(command)
        if not self._wake.is_set():
            # One that is set already makes the thread look into the inbox after this: setting costs 8 us.
            self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mooncake-writer", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread and let go of the engine; waits a little, not for a call that hangs in Mooncake."""
        self._stopped = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)
        self._engine = None

    def _run(self) -> None:
        while not self._stopped:
            updates: list[JobUpdate] = []
            try:
                self._step(updates)
            except Exception:  # noqa: BLE001 - the supervisor of this loop: without it no write ever ends
                self._log.exception("mooncake_writer_failed")
            if updates:
                self._post(updates)
            self._wake.wait(self._pause(time.monotonic()))
            self._wake.clear()

    def _step(self, updates: list[JobUpdate]) -> None:
        now = time.monotonic()
        flying = len(self._running)
        updates += self._poll(now)
        if flying and flying == len(self._running) and not self._inbox and now < self._next_look:
            # Nothing has moved: at 20,000 looks a second the rest is worth sparing.
            return
        self._next_look = now + SLOW_POLL_S
        while self._inbox:
            updates += self._obey(self._inbox.popleft(), now)
        for session in [name for name, deadline in self._probes.items() if deadline <= now]:
            updates += self._probe_ended(session, False, now)
        for session in self._lanes.probes_due(now):
            updates += self._probe(session, now)
        for submission in self._lanes.due():
            updates += self._submit(submission)

    def _obey(self, command: Command, now: float) -> list[JobUpdate]:
        match command:
            case Add(session, job, pieces):
                return self._lanes.add(session, job, pieces)
            case Withdraw(job):
                return self._lanes.withdraw(job)
            case Probed(session, reachable):
                self._probing.discard(session)
                return self._probe_ended(session, reachable, now)

    def _submit(self, submission: Submission) -> list[JobUpdate]:
        engine, piece = self._engine, submission.piece
        batch = 0
        if engine is not None:
            try:
                batch = engine.transfer_submit_write(
                    submission.session, piece.source, piece.destination, piece.nbytes
                )
            except (TypeError, ValueError, OverflowError):
                # Its arguments do not even reach Mooncake: an address that a consumer made up, of 80 bits.
                self._log.exception("mooncake_submit_failed", session=submission.session)
        now = time.monotonic()
        if batch <= 0:
            self._log.info("mooncake_submit_refused", session=submission.session)
            return self._lanes.ended(submission, False, now)
        self._running[batch] = submission
        self._submitted_at, self._submitted_large = now, piece.nbytes >= LARGE_BYTES
        return []

    def _poll(self, now: float) -> list[JobUpdate]:
        updates: list[JobUpdate] = []
        for batch, submission in list(self._running.items()):
            status = self._engine.transfer_check_status(batch)
            if status == 0:
                continue
            del self._running[batch]
            if status != DONE:
                self._log.info("mooncake_write_failed", session=submission.session, status=status)
            updates += self._lanes.ended(submission, status == DONE, now)
        return updates

    def _probe(self, session: str, now: float) -> list[JobUpdate]:
        # A probe that hangs keeps its thread for 60 s: never two for one session, and not too many.
        if session in self._probing or len(self._probing) >= MAX_PROBES:
            return self._lanes.probed(session, False, now)
        self._probing.add(session)
        self._probes[session] = now + PROBE_TIMEOUT_S
        threading.Thread(
            target=self._run_probe, args=(self._engine, session), name="mooncake-probe", daemon=True
        ).start()
        return []

    def _run_probe(self, engine: Any, session: str) -> None:
        # A probe that did not report its end would be the last one of its peer.
        reachable = call_back(engine.send_probe, session) == 0
        self._inbox.append(Probed(session, reachable))
        self._wake.set()

    def _probe_ended(self, session: str, reachable: bool, now: float) -> list[JobUpdate]:
        if self._probes.pop(session, None) is None:
            return []
        if not reachable:
            self._log.info("mooncake_peer_unreachable", session=session)
        return self._lanes.probed(session, reachable, now)

    def _pause(self, now: float) -> float | None:
        if self._stopped:
            return 0.0
        if self._running and now - self._submitted_at >= FAST_POLL_FOR_S:
            return SLOW_POLL_S
        if self._running:
            return MEDIUM_POLL_S if self._submitted_large else FAST_POLL_S
        due = [*self._probes.values()]
        retry_at = self._lanes.next_probe_at()
        if retry_at is not None:
            due.append(retry_at)
        return max(0.0, min(due) - now) if due else None
