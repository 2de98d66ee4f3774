"""Fixtures that all levels share: processes, stub instances and stub consumers with owned lifetimes."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import pytest

from epdctl.domain import Role
from tests.stubs.consumer import StubConsumer
from tests.stubs.instance import StubInstance
from tests.stubs.process import Process, start_process

HAS_WORKER_EXTRA = all(find_spec(name) is not None for name in ("torch", "transformers", "PIL", "mooncake"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--full`, which runs the long variants too."""
    parser.addoption("--full", action="store_true", help="run the tests marked full too: soaks, large models")


def pytest_configure() -> None:
    """Set what every run needs, however it was started.

    One thread a process: the bits of a forward depend on the number of threads, and the spinning barriers of
    OpenMP slow two processes on two cores down many times.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _let_children_see_ctrl_c()


def _let_children_see_ctrl_c() -> None:
    """Let the processes that tests start see Ctrl-C, also where this one runs in a shell's background.

    A shell lets what it starts with `&` ignore SIGINT, children inherit that, and a shell script among them
    cannot take it back.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out modules of real workers where the worker extra is not installed: they import torch."""
    if (
        HAS_WORKER_EXTRA
        or collection_path.suffix != ".py"
        or collection_path.parent.name not in ("e2e", "faults")
    ):
        return None
    return True if "pytest.mark.worker" in collection_path.read_text() else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the long variants without `--full`, and real vLLM unless its marker is asked for."""
    unwanted = set() if config.getoption("--full") else {"full"}
    if "interop" not in config.option.markexpr:
        unwanted.add("interop")
    left_out = [item for item in items if unwanted & {mark.name for mark in item.iter_markers()}]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


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
