"""Fixtures of the interoperability suite; all of it shares one event loop.

Rules of this file: nothing is skipped. A missing environment fails the run and says how to install it.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Generator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from tests.interop.answers import Answer, ask
from tests.interop.compatibility import Row, table, write_table
from tests.interop.engines import PLAIN
from tests.interop.fleet import Fleet
from tests.interop.ground import Ground
from tests.interop.installed import Installed, NotInstalled, find_installed
from tests.interop.media import serve_pictures
from tests.interop.scenarios import MediaUrl, scenarios

# Neighbours share vLLM instances, so that few have to start.
ORDER = (
    "test_pictures",
    "test_a_mooncake",
    "test_faults_mooncake",
    "test_b_our_encoder",
    "test_c_our_prefill_decode",
    "test_b_our_encoder_folder",
    "test_a_example",
    "test_faults_example",
    "test_f_membership",
    "test_d_prefill_and_decode",
    "test_d_mooncake_kv",
    "test_d_mooncake",
    "test_e_reference_proxy",
)
DEPLOYMENTS = (
    *("a-mooncake", "a-example", "b", "b-folder", "c", "d", "d-mooncake", "d-mooncake-kv", "e", "f"),
    *("faults-mooncake", "faults-example"),
)

INSTALLED = pytest.StashKey[Installed]()
OUTCOMES = pytest.StashKey[dict[str, list[bool]]]()
ROWS = pytest.StashKey[dict[str, Row]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that turns a run into documentation."""
    parser.addoption(
        "--write-compatibility", action="store_true", help="put the run's table into docs/compatibility.md"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the run's outcomes; SIGTERM ends it as Ctrl-C does, so that no vLLM instance is left behind."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    config.stash[OUTCOMES] = {}
    config.stash[ROWS] = {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the modules of this folder, and note each one's row of the table."""
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here and isinstance(item, pytest.Function):
            row = getattr(item.module, "ROW", None)
            if row is not None:
                config.stash[ROWS][item.path.stem] = row
    items.sort(key=lambda item: ORDER.index(item.path.stem) if item.path.parent == here else -1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Count each test of a row, in whichever phase it failed."""
    report = yield
    if report.when == "call" or report.failed:
        item.config.stash[OUTCOMES].setdefault(item.path.stem, []).append(report.passed)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Show the table, and write it when asked to."""
    rows, outcomes = config.stash[ROWS], config.stash[OUTCOMES]
    if not outcomes or INSTALLED not in config.stash:
        return
    text = table(
        config.stash[INSTALLED], [(rows[m], outcomes[m]) for m in ORDER if m in rows and m in outcomes]
    )
    terminalreporter.section("compatibility")
    terminalreporter.write_line(text)
    if config.getoption("--write-compatibility", default=False):
        write_table(text)


@pytest.fixture(scope="session")
def installed(pytestconfig: pytest.Config) -> Installed:
    """The environment with vLLM and the reference proxy."""
    try:
        found = find_installed()
    except NotInstalled as missing:
        pytest.fail(str(missing), pytrace=False)
    pytestconfig.stash[INSTALLED] = found
    return found


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fleet(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """All processes of the session; none is left when it ends."""
    fleet = Fleet(installed, tmp_path_factory.mktemp("interop"))
    try:
        yield fleet
    finally:
        await fleet.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def media_url() -> AsyncIterator[MediaUrl]:
    """A web server with the pictures that `http` scenarios name."""
    async with AsyncExitStack() as stack:
        yield await serve_pictures(stack)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def plain(fleet: Fleet, media_url: MediaUrl) -> dict[str, dict[str, Answer]]:
    """What one plain vLLM says to every request of every deployment."""
    (engine,) = await fleet.use(PLAIN)
    return {
        deployment: {
            name: await ask(engine.url, scenario.body)
            for name, scenario in scenarios(deployment, media_url).items()
        }
        for deployment in DEPLOYMENTS
    }


@pytest.fixture(scope="session")
def ground(fleet: Fleet, plain: dict[str, dict[str, Answer]], media_url: MediaUrl) -> Ground:
    """What the deployments stand on."""
    return Ground(fleet=fleet, plain=plain, media_url=media_url)
