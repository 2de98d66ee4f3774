"""Claims about how Mooncake is called, against a library that does what the test wants."""

from __future__ import annotations

import asyncio
import builtins
import os
import sys
import threading
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from epdctl.errors import TransferFailed, UpstreamTimeout
from epdctl.worker.transfer import writer
from epdctl.worker.transfer.lanes import Piece
from epdctl.worker.transfer.mooncake import TransferEngine, TransferSetupFailed, load_engine
from epdctl.worker.transfer.writer import MAX_PROBES, PROBE_TIMEOUT_S
from tests.stubs.process import wait_until
from tests.unit.transfer.library import ITEM, Library, engine_of

pytestmark = pytest.mark.unit


class TestSetup:
    """What can go wrong at the start says what to do about it (hazard 32)."""

    async def test_a_session_is_host_and_port(self) -> None:
        """Peers write to the advertised host and the port that Mooncake chose."""
        library = Library()
        async with engine_of(library) as engine:
            assert engine.session == "10.0.0.5:15001"
        assert library.arguments == ("10.0.0.5", "P2PHANDSHAKE", "tcp", "")

    async def test_devices_are_passed_through(self) -> None:
        """Mooncake gets protocol and devices as they were given."""
        library = Library()
        engine = TransferEngine(
            host="10.0.0.5", protocol="rdma", devices="mlx5_0,mlx5_1", load=lambda: library
        )

        assert library.arguments == ("10.0.0.5", "P2PHANDSHAKE", "rdma", "mlx5_0,mlx5_1")
        await engine.close()

    async def test_an_ipv6_host_is_bracketed(self) -> None:
        """An IPv6 literal is told apart from the port."""
        engine = TransferEngine(host="::1", load=Library)

        assert engine.session == "[::1]:15001"
        await engine.close()

    async def test_no_free_ports(self) -> None:
        """An engine that cannot start names the flag."""
        with pytest.raises(TransferSetupFailed, match=r"code -1.*--mooncake-ports"):
            TransferEngine(host="10.0.0.5", load=lambda: Library(initialised=-1))

    @pytest.mark.parametrize(
        ("code", "said"), [(-1, "it is empty"), (-7, "overlaps"), (-200, "locked-memory limit")]
    )
    async def test_memory_that_cannot_be_registered(self, code: int, said: str) -> None:
        """A refused registration is an error with the reason, never a silent one."""
        async with engine_of(Library(registered=code)) as engine:
            with pytest.raises(TransferSetupFailed, match=said):
                engine.register(4096, 100)

    def test_a_missing_wheel_is_explained_by_extras(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without Mooncake the error names the three extras, of which exactly one is to be installed."""
        monkeypatch.setitem(sys.modules, "mooncake", None)
        monkeypatch.delitem(sys.modules, "mooncake.engine", raising=False)

        with pytest.raises(TransferSetupFailed, match=r"epdctl\[cpu\].*\[cuda12\].*\[cuda13\]"):
            load_engine()

    @pytest.mark.parametrize(
        ("problem", "said"),
        [
            ("libibverbs.so.1: cannot open shared object file", "install the system library libibverbs1"),
            ("libcudart.so.12: cannot open shared object file", "cannot be loaded: libcudart.so.12"),
        ],
    )
    def test_a_wheel_that_cannot_be_loaded(
        self, monkeypatch: pytest.MonkeyPatch, problem: str, said: str
    ) -> None:
        """A missing system library is named, and the package it is in where we know it."""

        def refuse(name: str, *rest: Any) -> ModuleType:
            if name.startswith("mooncake"):
                raise ImportError(problem)
            return original(name, *rest)

        original = builtins.__import__
        monkeypatch.setattr("importlib.import_module", refuse)

        with pytest.raises(TransferSetupFailed, match=said):
            load_engine()

    async def test_a_closed_engine_is_not_touched(self) -> None:
        """Calls on an engine that is gone are errors of ours: in the library they would be a crash."""
        engine = TransferEngine(host="10.0.0.5", load=Library)
        await engine.close()
        await engine.close()

        with pytest.raises(TransferSetupFailed, match="closed"):
            engine.submit("s:1", ITEM, ignore)
        with pytest.raises(TransferSetupFailed, match="closed"):
            engine.register(4096, 100)

    @pytest.mark.parametrize("shut", [False, True])
    async def test_a_write_that_cannot_be_queued_leaves_its_source_free(self, shut: bool) -> None:
        """To a peer of the other address family, or after the end: an error at once, and nothing is read."""
        settled: list[bool] = []
        async with engine_of(Library()) as engine:
            if shut:
                await engine.close()
            with pytest.raises((TransferFailed, TransferSetupFailed), match="closed" if shut else "IPv6"):
                await engine.write("[::1]:1", ITEM, deadline_s=5.0, on_settled=lambda: settled.append(True))

        assert settled == [True]

    async def test_a_forked_child_may_not_use_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In a forked child the library would hang: that is an error at once."""
        async with engine_of(Library()) as engine:
            monkeypatch.setattr(os, "getpid", lambda: -1)
            with pytest.raises(TransferSetupFailed, match="spawn, never fork"):
                engine.submit("s:1", ITEM, ignore)
            monkeypatch.undo()


def ignore(failed: bool, settled: bool) -> None:
    """Take news of a write that nobody cares for."""


class TestWrites:
    """Submitting and polling."""

    async def test_a_write_ends_when_the_library_says_so(self) -> None:
        """A batch id is asked about until it is not 0, and not once more."""
        states = iter([0, 0, 0, 1])
        library = Library(status=lambda batch: next(states))
        settled: list[bool] = []
        async with engine_of(library) as engine:
            await engine.write("s:1", ITEM, deadline_s=5, on_settled=lambda: settled.append(True))

        assert library.writes == [("s:1", 4096, 8192, 100)]
        assert library.asked == [1, 1, 1, 1]
        assert settled == [True]

    async def test_one_thread_does_it_all(self) -> None:
        """Submits and polls of any number of writes come from one thread."""
        library = Library()
        async with engine_of(library) as engine:
            await asyncio.gather(
                *(
                    engine.write(f"s:{number % 5}", ITEM, deadline_s=5, on_settled=lambda: None)
                    for number in range(50)
                )
            )

        assert {"mooncake-writer"} == library.threads

    @pytest.mark.parametrize("code", [0, -1])
    async def test_a_refused_submit_fails_the_write(self, code: int) -> None:
        """Mooncake says 0 when it did not take a write: that is a failure, not a batch id."""
        async with engine_of(Library(submitted=lambda session: code)) as engine:
            with pytest.raises(TransferFailed):
                await engine.write("s:1", ITEM, deadline_s=5, on_settled=lambda: None)

    async def test_a_failed_status_fails_the_write(self) -> None:
        """-1 is the end of the write, and of the reading of its source."""
        settled: list[bool] = []
        async with engine_of(Library(status=lambda batch: -1)) as engine:
            with pytest.raises(TransferFailed):
                await engine.write("s:1", ITEM, deadline_s=5, on_settled=lambda: settled.append(True))
            await wait_until(lambda: settled == [True], "the source is free")

    async def test_a_late_write_still_reads_its_source(self) -> None:
        """At the deadline the caller is told; the source is free when the library has finished."""
        finished = threading.Event()
        settled: list[bool] = []
        library = Library(status=lambda batch: int(finished.is_set()))
        async with engine_of(library) as engine:
            with pytest.raises(UpstreamTimeout):
                await engine.write("s:1", ITEM, deadline_s=0.05, on_settled=lambda: settled.append(True))
            early = list(settled)
            finished.set()
            await wait_until(lambda: settled == [True], "the source is free")

        assert early == []

    async def test_closing_frees_all_sources(self) -> None:
        """When the engine is gone, and not sooner, nothing reads any source; no caller is left waiting."""
        engine = TransferEngine(host="10.0.0.5", load=lambda: Library(status=lambda batch: 0))
        news: list[tuple[bool, bool, bool]] = []

        def note(failed: bool, settled: bool) -> None:
            names = [thread.name for thread in threading.enumerate()]
            news.append((failed, settled, "mooncake-writer" in names))

        engine.submit("s:1", ITEM, note)
        await wait_until(lambda: engine._writer._running != {}, "the write is under way")
        await engine.close()

        assert news == [(True, True, False)]

    async def test_a_failed_write_never_becomes_a_success(self) -> None:
        """While pieces end on one thread and callers give up on another, a failure stays one (hazard 28)."""
        library = Library(status=lambda batch: -1 if batch % 2 else 1)
        two_pieces = [Piece(0, 0, 10), Piece(100, 100, 10)]
        async with engine_of(library) as engine:
            news: dict[str, list[tuple[bool, bool]]] = {f"s:{number}": [] for number in range(300)}

            def note(session: str, failed: bool, settled: bool) -> None:
                news[session].append((failed, settled))

            jobs = [engine.submit(session, two_pieces, partial(note, session)) for session in news]
            for job in jobs[::3]:
                engine.withdraw(job)
                await asyncio.sleep(0)
            await wait_until(
                lambda: all(told and told[-1][1] for told in news.values()), "every source is free"
            )

        failed = {session for session, *_ in library.writes[::2]}
        assert failed
        assert all(has_failed for session in failed for has_failed, _ in news[session])

    async def test_news_that_cannot_be_taken_stop_no_others(self) -> None:
        """A callback that raises is logged; the writes behind it are still told of."""
        settled: list[bool] = []

        def fail(failed: bool, settled: bool) -> None:
            raise RuntimeError("in the caller")

        async with engine_of(Library()) as engine:
            engine.submit("s:1", ITEM, fail)
            await engine.write("s:1", ITEM, deadline_s=5, on_settled=lambda: settled.append(True))

        assert settled == [True]

    async def test_of_news_that_come_together_each_is_told(self) -> None:
        """Two writes that end in one look: that the first one's news cannot be taken is not the second's."""
        finished = threading.Event()
        library = Library(status=lambda batch: int(finished.is_set()))
        told: list[str] = []

        def fail(failed: bool, settled: bool) -> None:
            told.append("first")
            raise RuntimeError("in the caller")

        async with engine_of(library) as engine:
            engine.submit("s:1", ITEM, fail)
            engine.submit("s:2", ITEM, lambda failed, settled: told.append("second"))
            await wait_until(lambda: len(library.writes) == 2, "both are under way")
            finished.set()
            await wait_until(lambda: sorted(told) == ["first", "second"], "both are told")

    async def test_an_exception_in_the_library_is_survived(self) -> None:
        """An exception out of Mooncake is logged, and later writes go on."""
        faults = iter([True])

        def status(batch: int) -> int:
            if next(faults, False):
                raise RuntimeError("from the library")
            return 1

        async with engine_of(Library(status=status)) as engine:
            await engine.write("s:1", ITEM, deadline_s=5, on_settled=lambda: None)

    async def test_an_address_that_the_library_cannot_take_fails_its_write(self) -> None:
        """A consumer may name any number as its address: the write fails, its source is free, and the peer's
        later writes go on."""

        def submitted(session: str) -> int:
            if library.writes[-1][2] >= 2**64:
                raise TypeError("incompatible function arguments")
            return len(library.writes)

        settled: list[bool] = []
        library = Library(submitted=submitted)
        async with engine_of(library) as engine:
            for _ in range(5):
                with pytest.raises(TransferFailed):
                    await engine.write(
                        "s:1",
                        [Piece(4096, 2**80, 100)],
                        deadline_s=5,
                        on_settled=lambda: settled.append(True),
                    )
            await wait_until(lambda: len(settled) == 5, "the sources are free")
            await engine.write("t:1", ITEM, deadline_s=5, on_settled=lambda: None)


class TestContact:
    """First contact cannot hold up anybody (hazard 17)."""

    async def test_an_unreachable_session_fails_at_once(self) -> None:
        """A refused probe fails the write without one being submitted."""
        library = Library(probe=lambda session: -102)
        async with engine_of(library) as engine:
            with pytest.raises(TransferFailed):
                await engine.write("s:1", ITEM, deadline_s=5, on_settled=lambda: None)

        assert library.writes == []

    async def test_a_hanging_probe_delays_nobody_else(self) -> None:
        """While one peer's probe hangs, writes to another go through; the hanging one fails in time."""
        hanging = threading.Event()

        def probe(session: str) -> int:
            if session == "hung:1":
                hanging.wait(30)
            return 0

        async with engine_of(Library(probe=probe)) as engine:
            loop = asyncio.get_running_loop()
            began = loop.time()
            hung = asyncio.create_task(engine.write("hung:1", ITEM, deadline_s=10, on_settled=lambda: None))
            for _ in range(20):
                await engine.write("good:1", ITEM, deadline_s=5, on_settled=lambda: None)
            took = loop.time() - began
            with pytest.raises(TransferFailed):
                await hung
            until_failed = loop.time() - began
            again = engine.write("hung:1", ITEM, deadline_s=10, on_settled=lambda: None)
            with pytest.raises(TransferFailed):
                await again
            threads = [t.name for t in threading.enumerate()].count("mooncake-probe")
            hanging.set()

        assert took < 1
        assert PROBE_TIMEOUT_S - 0.1 < until_failed < PROBE_TIMEOUT_S + 1.5
        assert threads == 1

    async def test_hanging_probes_take_a_bounded_number_of_threads(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A probe that hangs keeps its thread for a minute: beyond so many of them a new peer fails."""
        monkeypatch.setattr(writer, "PROBE_TIMEOUT_S", 0.2)
        hanging = threading.Event()
        probed: list[str] = []

        def probe(session: str) -> int:
            probed.append(session)
            hanging.wait(60)
            return 0

        async with engine_of(Library(probe=probe)) as engine:
            writes = [
                engine.write(f"hung:{number}", ITEM, deadline_s=30, on_settled=lambda: None)
                for number in range(MAX_PROBES + 8)
            ]
            ends = await asyncio.gather(*writes, return_exceptions=True)
            hanging.set()

        assert {type(end) for end in ends} == {TransferFailed}
        assert len(probed) == MAX_PROBES

    async def test_a_probe_that_raises_is_not_the_last(self) -> None:
        """A peer whose probe failed in the library is probed again, and reached then."""
        faults = iter([True])

        def probe(session: str) -> int:
            if next(faults, False):
                raise RuntimeError("from the library")
            return 0

        async with engine_of(Library(probe=probe)) as engine:
            with pytest.raises(TransferFailed):
                await engine.write("s:1", ITEM, deadline_s=5, on_settled=lambda: None)

            async def reached() -> bool:
                try:
                    await engine.write("s:1", ITEM, deadline_s=5, on_settled=lambda: None)
                except TransferFailed:
                    return False
                return True

            await wait_until(reached, "the peer is written to", 20.0)
