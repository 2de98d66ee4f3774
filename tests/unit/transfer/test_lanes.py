"""Claims about which writes go out next."""

from __future__ import annotations

from collections import deque

import pytest

from epdctl.worker.transfer.lanes import (
    CHUNK_BYTES,
    LANES,
    LONGEST_BYTES,
    MAX_SESSIONS,
    RETRY_S,
    JobUpdate,
    Lanes,
    Piece,
    Submission,
)

pytestmark = pytest.mark.unit

DONE = JobUpdate(1, failed=False, settled=True)


def opened(*sessions: str) -> Lanes:
    """Return lanes that have written to these sessions before."""
    lanes = Lanes()
    for number, session in enumerate(sessions):
        lanes.add(session, -1 - number, [Piece(0, 0, 1)])
        lanes.probes_due(0)
        lanes.probed(session, True, 0)
        for submission in lanes.due():
            lanes.ended(submission, True, 0)
    return lanes


def apart(count: int, nbytes: int = CHUNK_BYTES) -> list[Piece]:
    """Return pieces that have no neighbours."""
    return [Piece(number * 2 * nbytes, number * 2 * nbytes, nbytes) for number in range(count)]


class TestContact:
    """Hazard 17: nobody may be held up by a peer that does not answer."""

    def test_nothing_is_written_to_a_stranger(self) -> None:
        """A session is probed before its first write."""
        lanes = Lanes()
        lanes.add("s", 1, [Piece(0, 0, 1)])

        assert lanes.due() == []
        assert lanes.probes_due(0) == ["s"]
        assert lanes.probes_due(0) == []
        lanes.probed("s", True, 0)
        assert len(lanes.due()) == 1

    def test_the_first_write_goes_alone(self) -> None:
        """Until one write has succeeded there is only one in flight."""
        lanes = Lanes()
        lanes.add("s", 1, apart(6))
        lanes.probes_due(0)
        lanes.probed("s", True, 0)
        (first,) = lanes.due()

        assert lanes.due() == []
        lanes.ended(first, True, 0)
        assert len(lanes.due()) == LANES

    def test_an_unreachable_peer_fails_what_is_queued_for_it_only(self) -> None:
        """A failed probe fails its own session's jobs and leaves the others alone."""
        lanes = opened("good")
        lanes.add("bad", 1, [Piece(0, 0, 1)])
        lanes.add("good", 2, [Piece(0, 0, 1)])
        lanes.probes_due(0)

        assert [JobUpdate(1, failed=True, settled=True)] == lanes.probed("bad", False, 0)
        assert [submission.session for submission in lanes.due()] == ["good"]

    def test_a_failed_peer_is_tried_once_a_second(self) -> None:
        """After a failure the next attempt waits, and begins with a probe and a single write."""
        lanes = opened("s")
        lanes.add("s", 1, [Piece(0, 0, 1)])
        (submission,) = lanes.due()
        lanes.ended(submission, False, 10.0)
        lanes.add("s", 2, apart(3))

        assert lanes.due() == []
        assert lanes.probes_due(10.0) == []
        assert lanes.next_probe_at() == 10.0 + RETRY_S
        assert lanes.probes_due(10.0 + RETRY_S) == ["s"]
        lanes.probed("s", True, 11.0)
        assert len(lanes.due()) == 1

    def test_a_late_probe_changes_nothing(self) -> None:
        """The result of a probe that nobody waits for any more is ignored."""
        lanes = opened("s")

        assert lanes.probed("s", False, 0) == []
        lanes.add("s", 1, [Piece(0, 0, 1)])
        assert len(lanes.due()) == 1


class TestLanes:
    """How much is in flight, and in what pieces."""

    def test_at_most_four_writes_for_each_peer(self) -> None:
        """The fifth write waits, and another peer's do not wait with it."""
        lanes = opened("a", "b")
        lanes.add("a", 1, apart(10))
        lanes.add("b", 2, apart(10))
        flying = [submission.session for submission in lanes.due()]

        assert (flying.count("a"), flying.count("b")) == (LANES, LANES)

    def test_large_pieces_are_cut(self) -> None:
        """A large item goes in pieces of a mebibyte, every byte once."""
        lanes = opened("s")
        lanes.add("s", 1, [Piece(100, 5000, 3 * CHUNK_BYTES + 7)])
        pieces = [submission.piece for submission in lanes.due()]

        assert [piece.nbytes for piece in pieces] == [CHUNK_BYTES, CHUNK_BYTES, CHUNK_BYTES, 7]
        assert [piece.source - 100 for piece in pieces] == [piece.destination - 5000 for piece in pieces]

    def test_writes_grow_with_what_is_queued(self) -> None:
        """Much that is queued goes in few long writes, each byte once; the last one takes what is left."""
        lanes = opened("s")
        lanes.add("s", 1, [Piece(100, 5000, 80 * CHUNK_BYTES)])
        flying: deque[Submission] = deque()
        lengths = []
        while due := lanes.due():
            for submission in due:
                assert submission.piece.source - 100 == sum(lengths) == submission.piece.destination - 5000
                lengths.append(submission.piece.nbytes)
                flying.append(submission)
            lanes.ended(flying.popleft(), True, 0)

        assert sum(lengths) == 80 * CHUNK_BYTES
        assert max(lengths) == LONGEST_BYTES
        assert len(lengths) == 7

    @pytest.mark.parametrize("piece", [CHUNK_BYTES, 64 * CHUNK_BYTES])
    def test_writes_that_start_together_do_not_end_together(self, piece: int) -> None:
        """With much queued the four have four lengths; each that follows another has the greatest."""
        lanes = opened("s")
        for number in range(256 * CHUNK_BYTES // piece):
            lanes.add("s", number, [Piece(number * piece, number * piece, piece)])
        together = lanes.due()
        lanes.ended(together[0], True, 0)

        fourth = LONGEST_BYTES // 4
        assert [fourth, 2 * fourth, 3 * fourth, 4 * fourth] == [write.piece.nbytes for write in together]
        assert [write.piece.nbytes for write in lanes.due()] == [LONGEST_BYTES]

    def test_what_the_lanes_take_goes_at_once(self) -> None:
        """When the rest fits into the free lanes nothing of it waits for the next look at them."""
        lanes = opened("s")
        for number in range(20):
            lanes.add("s", number, [Piece(number * CHUNK_BYTES, number * CHUNK_BYTES, CHUNK_BYTES)])

        assert [submission.piece.nbytes for submission in lanes.due()] == [5 * CHUNK_BYTES] * LANES
        assert lanes.due() == []

    def test_neighbours_do_not_wait_for_each_other_too_long(self) -> None:
        """However much is queued, what is merged stays within its own bound."""
        lanes = opened("s")
        for number in range(128):
            lanes.add("s", number, [Piece(number * CHUNK_BYTES, number * CHUNK_BYTES, CHUNK_BYTES)])

        assert max(submission.piece.nbytes for submission in lanes.due()) == LONGEST_BYTES

    def test_the_first_write_to_a_session_is_short(self) -> None:
        """What a session does with its first write is not known yet, so not much goes into it."""
        lanes = Lanes()
        lanes.add("s", 1, [Piece(0, 0, 64 * CHUNK_BYTES)])
        lanes.probes_due(0)
        lanes.probed("s", True, 0)

        assert [submission.piece.nbytes for submission in lanes.due()] == [CHUNK_BYTES]

    def test_what_was_withdrawn_counts_no_more(self) -> None:
        """A job that is given up does not lengthen the writes of the others."""
        lanes = opened("s")
        lanes.add("s", 1, [Piece(0, 0, 64 * CHUNK_BYTES)])
        lanes.withdraw(1)
        lanes.add("s", 2, [Piece(0, 0, 2 * CHUNK_BYTES)])

        assert [submission.piece.nbytes for submission in lanes.due()] == [CHUNK_BYTES, CHUNK_BYTES]

    def test_neighbours_are_merged(self) -> None:
        """Items that adjoin at both ends go as one write, and each of them learns how it ended."""
        lanes = opened("s")
        lanes.add("s", 1, [Piece(0, 9000, 256)])
        lanes.add("s", 2, [Piece(256, 9256, 256)])
        lanes.add("s", 3, [Piece(512, 20000, 256)])
        merged, alone = lanes.due()

        assert Submission("s", Piece(0, 9000, 512), (1, 2)) == merged
        assert alone.jobs == (3,)
        assert [DONE, JobUpdate(2, failed=False, settled=True)] == lanes.ended(merged, True, 0)

    def test_an_empty_job_ends_at_once(self) -> None:
        """Nothing to write is written."""
        assert Lanes().add("s", 1, []) == [DONE]


class TestJobs:
    """What the owner of a write is told."""

    def test_a_job_is_done_when_all_its_pieces_are(self) -> None:
        """News comes once, with the last piece."""
        lanes = opened("s")
        lanes.add("s", 1, apart(2))
        first, second = lanes.due()

        assert lanes.ended(first, True, 0) == []
        assert lanes.ended(second, True, 0) == [DONE]
        assert lanes.is_idle

    def test_a_failure_is_told_at_once_and_the_end_when_nothing_is_read(self) -> None:
        """A job with pieces in flight has failed with the first, and settles with the last."""
        lanes = opened("s")
        lanes.add("s", 1, apart(3))
        first, second, third = lanes.due()

        assert [JobUpdate(1, failed=True, settled=False)] == lanes.ended(first, False, 0)
        assert lanes.ended(second, True, 0) == []
        assert [JobUpdate(1, failed=True, settled=True)] == lanes.ended(third, False, 0)

    def test_a_failed_write_fails_what_waits_behind_it(self) -> None:
        """Queued jobs of the session fail with it, rather than each running into the same time-out."""
        lanes = opened("s")
        lanes.add("s", 1, apart(5))
        lanes.add("s", 2, [Piece(1, 1, 1)])
        first, *others = lanes.due()
        updates = lanes.ended(first, False, 0)

        assert JobUpdate(1, failed=True, settled=False) in updates
        assert JobUpdate(2, failed=True, settled=True) in updates
        for other in others:
            updates = lanes.ended(other, True, 0)
        assert [JobUpdate(1, failed=True, settled=True)] == updates
        assert lanes.is_idle

    def test_a_withdrawn_job_sends_nothing_more(self) -> None:
        """What is in flight ends by itself; what is not, never starts."""
        lanes = opened("s")
        lanes.add("s", 1, apart(6))
        flying = lanes.due()

        assert [JobUpdate(1, failed=True, settled=False)] == lanes.withdraw(1)
        assert [update for one in flying[:-1] for update in lanes.ended(one, True, 0)] == []
        assert lanes.due() == []
        assert [JobUpdate(1, failed=True, settled=True)] == lanes.ended(flying[-1], True, 0)

    def test_withdrawing_what_ended_does_nothing(self) -> None:
        """A job that is over, or never was, can be withdrawn without harm."""
        assert Lanes().withdraw(1) == []


def test_sessions_that_are_gone_are_forgotten() -> None:
    """A producer that outlives thousands of consumers does not remember them all."""
    lanes = Lanes()
    for number in range(3 * MAX_SESSIONS):
        lanes.add(f"s{number}", number, [Piece(0, 0, 1)])
        lanes.probes_due(0)
        lanes.probed(f"s{number}", False, 0)

    assert lanes.due() == []
    assert len(lanes._sessions) <= MAX_SESSIONS
    assert len(lanes._waiting) == 0
    assert lanes.is_idle
