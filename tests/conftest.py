"""Fixtures that all levels share: processes, stub instances and stub consumers with owned lifetimes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest

from epdctl.domain import Role
from tests.stubs.consumer import StubConsumer
from tests.stubs.instance import StubInstance
from tests.stubs.process import Process, start_process


class StartProcess(Protocol):
    """Starts a program whose process group ends with the test; its logs are in the test's folder."""

    def __call__(
        self, command: Sequence[str], name: str, *, env: Mapping[str, str | None] | None = None
    ) -> Process:
        """Start `command`; its logs are `<name>.out` and `<name>.err`."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartProcess]:
    """Return a starter of processes; all of them are killed when the test ends."""
    started: list[Process] = []

    def starter(command: Sequence[str], name: str, *, env: Mapping[str, str | None] | None = None) -> Process:
        process = start_process(command, tmp_path / "logs", name, env=env)
        started.append(process)
        return process

    yield starter
    for process in started:
        process.close()


StartStub = Callable[..., Awaitable[StubInstance]]


@pytest.fixture
async def stub() -> AsyncIterator[StartStub]:
    """Return a starter of stub instances: `await stub("encode", {"chat": {...}})`."""
    started: list[StubInstance] = []

    async def starter(
        role: Role | str, behaviour: Mapping[str, Any] | None = None, *, port: int | None = None
    ) -> StubInstance:
        instance = StubInstance(role, behaviour, port=port)
        started.append(instance)
        await instance.start()
        return instance

    yield starter
    for instance in started:
        await instance.stop()


StartConsumer = Callable[..., Awaitable[StubConsumer]]


@pytest.fixture
async def ec_consumer() -> AsyncIterator[StartConsumer]:
    """Return a starter of stub EC consumers: `await ec_consumer({"reserve": "refuse"})`."""
    started: list[StubConsumer] = []

    async def starter(behaviour: Mapping[str, Any] | None = None) -> StubConsumer:
        consumer = StubConsumer(behaviour)
        started.append(consumer)
        await consumer.start()
        return consumer

    yield starter
    for consumer in started:
        await consumer.stop()
