"""Which writes go out next, and to whom: the rules under which Mooncake's TCP transport behaves.

Rules of this file:
- At most `LANES` writes to one session are in flight (the fifth would wait behind a dead one); a session that
  was never written to, or that failed, gets one until it has succeeded.
- Before the first write, and after a failure, a session is probed: a write to a hung peer that was never
  contacted blocks the whole engine for 60 s. A failed session is probed at most once in `RETRY_S`.
- When a write fails, everything queued for its session fails with it, at once.
- A write takes its share, over the free lanes, of what is queued for its session: large pieces are cut, and
  neighbours (adjacent at both ends) merged. When more is queued than the lanes take, writes have the greatest
  length, and those that start together a fourth, half and three fourths of it: lanes of one length end
  together, and the transport is idle until the polling thread is let look, milliseconds on a busy machine.
- A job is settled when the engine reads none of its bytes any more, which may be long after it has failed.

No engine, no clock, no threads here: `now` (seconds) is handed in. Numbers are from measurements of
mooncake-transfer-engine 0.3.13 on TCP.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

CHUNK_BYTES = 2**20
"""The shortest that a write is cut to: the transport's best figures are with four of these in flight."""
LONGEST_BYTES = 2**24
"""The greatest length of a write. Merged items end together: the first of them waits for the last."""
LANES = 4
RETRY_S = 1.0
MAX_SESSIONS = 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """`nbytes` from address `source` here to address `destination` at the peer."""

    source: int
    destination: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Submission:
    """One write as the engine gets it, and the jobs it serves."""

    session: str
    piece: Piece
    jobs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class JobUpdate:
    """News of a job: `failed` is known as soon as one piece failed, `settled` when none is in flight."""

    job: int
    failed: bool
    settled: bool


class Contact(StrEnum):
    """What is known of a session."""

    UNKNOWN = "unknown"
    PROBING = "probing"
    OPEN = "open"


@dataclass(slots=True, eq=False)
class _Session:
    contact: Contact = Contact.UNKNOWN
    proven: bool = False
    not_before: float = 0.0
    queue: deque[tuple[int, Piece]] = field(default_factory=deque)
    queued_bytes: int = 0
    in_flight: int = 0

    @property
    def longest(self) -> int:
        """The most bytes that the next write takes."""
        if not self.proven:
            return CHUNK_BYTES
        share = _whole_chunks(self.queued_bytes / (LANES - self.in_flight))
        if share <= LONGEST_BYTES:
            return share
        return _whole_chunks(LONGEST_BYTES * (self.in_flight + 1) / LANES)

    @property
    def is_idle(self) -> bool:
        return not self.queue and not self.in_flight and self.contact is not Contact.PROBING


@dataclass(slots=True, eq=False)
class _Job:
    session: str
    queued: int = 0
    in_flight: int = 0
    failed: bool = False


class Lanes:
    """All queued and running writes of one engine."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._jobs: dict[int, _Job] = {}
        self._waiting: dict[str, _Session] = {}

    def add(self, session: str, job: int, pieces: Iterable[Piece]) -> list[JobUpdate]:
        """Queue a job's pieces; job numbers are the caller's and not used twice."""
        peer = self._session(session)
        entries = [(job, piece) for piece in pieces if piece.nbytes]
        peer.queue.extend(entries)
        peer.queued_bytes += sum(piece.nbytes for _, piece in entries)
        self._waiting[session] = peer
        self._jobs[job] = _Job(session, queued=len(entries))
        return self._settle(job)

    def withdraw(self, job: int) -> list[JobUpdate]:
        """Give a job up: what is not in flight yet will not be."""
        return self._fail(job)

    def probes_due(self, now: float) -> list[str]:
        """Return the sessions to probe now; each is then waiting for `probed`."""
        due = []
        for name, peer in self._waiting.items():
            if peer.queue and peer.contact is Contact.UNKNOWN and peer.not_before <= now:
                peer.contact = Contact.PROBING
                due.append(name)
        return due

    def probed(self, session: str, reachable: bool, now: float) -> list[JobUpdate]:
        """Take a probe's result: writes may start, or all that are queued fail."""
        peer = self._session(session)
        if peer.contact is not Contact.PROBING:
            return []
        if reachable:
            peer.contact = Contact.OPEN
            return []
        return self._suspect(peer, now)

    def due(self) -> list[Submission]:
        """Return the writes to submit now; each is in flight until `ended`."""
        submissions = []
        for name, peer in list(self._waiting.items()):
            lanes = LANES if peer.proven else 1
            while peer.contact is Contact.OPEN and peer.queue and peer.in_flight < lanes:
                submissions.append(self._next(name, peer))
            if not peer.queue:
                del self._waiting[name]
        return submissions

    def ended(self, submission: Submission, ok: bool, now: float) -> list[JobUpdate]:
        """Take the end of a write."""
        peer = self._session(submission.session)
        peer.in_flight -= 1
        updates: list[JobUpdate] = []
        for number in submission.jobs:
            self._jobs[number].in_flight -= 1
        if ok:
            peer.proven = True
        else:
            updates += self._suspect(peer, now, submission.jobs)
        for number in dict.fromkeys(submission.jobs):
            updates += self._settle(number)
        return updates

    def next_probe_at(self) -> float | None:
        """Return when the next suspect session with work may be probed, or None."""
        times = [p.not_before for p in self._waiting.values() if p.queue and p.contact is Contact.UNKNOWN]
        return min(times, default=None)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or in flight."""
        return not self._jobs

    def _session(self, name: str) -> _Session:
        peer = self._sessions.get(name)
        if peer is None:
            self._forget_idle()
            peer = self._sessions[name] = _Session()
        return peer

    def _forget_idle(self) -> None:
        # Each consumer incarnation is a session; a forgotten one that returns is merely probed again.
        if len(self._sessions) < MAX_SESSIONS:
            return
        for name in [name for name, peer in self._sessions.items() if peer.is_idle][: MAX_SESSIONS // 4]:
            del self._sessions[name]

    def _next(self, name: str, peer: _Session) -> Submission:
        # Lanes of one length would end together, and leave the transport idle until somebody looks.
        longest = peer.longest
        job, piece = peer.queue.popleft()
        jobs = [job]
        if piece.nbytes > longest:
            piece, rest = _cut(piece, longest)
            peer.queue.appendleft((job, rest))
        else:
            self._jobs[job].queued -= 1
        while peer.queue and _adjoins(piece, peer.queue[0][1], longest):
            other, following = peer.queue.popleft()
            piece = Piece(piece.source, piece.destination, piece.nbytes + following.nbytes)
            jobs.append(other)
            self._jobs[other].queued -= 1
        for number in jobs:
            self._jobs[number].in_flight += 1
        peer.in_flight += 1
        peer.queued_bytes -= piece.nbytes
        return Submission(name, piece, tuple(jobs))

    def _suspect(self, peer: _Session, now: float, jobs: Iterable[int] = ()) -> list[JobUpdate]:
        peer.contact, peer.proven, peer.not_before = Contact.UNKNOWN, False, now + RETRY_S
        failed = dict.fromkeys([*jobs, *(number for number, _ in peer.queue)])
        return [update for number in failed for update in self._fail(number)]

    def _fail(self, number: int) -> list[JobUpdate]:
        job = self._jobs.get(number)
        if job is None or job.failed:
            return []
        job.failed = True
        if job.queued:
            peer = self._sessions[job.session]
            peer.queue = deque(entry for entry in peer.queue if entry[0] != number)
            peer.queued_bytes = sum(piece.nbytes for _, piece in peer.queue)
            job.queued = 0
        if job.in_flight:
            return [JobUpdate(number, failed=True, settled=False)]
        return self._settle(number)

    def _settle(self, number: int) -> list[JobUpdate]:
        job = self._jobs.get(number)
        if job is None or job.queued or job.in_flight:
            return []
        del self._jobs[number]
        return [JobUpdate(number, failed=job.failed, settled=True)]


def _whole_chunks(nbytes: float) -> int:
    return max(1, math.ceil(nbytes / CHUNK_BYTES)) * CHUNK_BYTES


def _cut(piece: Piece, at: int) -> tuple[Piece, Piece]:
    rest = Piece(piece.source + at, piece.destination + at, piece.nbytes - at)
    return Piece(piece.source, piece.destination, at), rest


def _adjoins(first: Piece, second: Piece, longest: int) -> bool:
    return (
        first.nbytes + second.nbytes <= longest
        and first.source + first.nbytes == second.source
        and first.destination + first.nbytes == second.destination
    )
