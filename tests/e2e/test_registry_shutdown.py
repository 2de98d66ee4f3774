"""How a real `epdctl serve` begins and ends."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import aiohttp
import pytest

from epdctl.domain import Role
from tests.e2e.registry_world import Proxy, serving
from tests.stubs.instance import StubInstance
from tests.stubs.process import epdctl_command, start_process, wait_until

pytestmark = pytest.mark.e2e

STREAM = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}


async def is_not_ready(proxy: Proxy) -> bool:
    """Say whether `/ready` gives shutting down as the reason."""
    status, answer = await proxy.get("/ready")
    return status == 503 and answer["reason"] == "shutting down"


async def test_the_ready_line_names_the_url(tmp_path: Path) -> None:
    """One line on stderr says where the proxy serves, whatever the log level, also for a free port."""
    async with serving(tmp_path, "--port", "0", "--log-level", "error", start=False) as proxy:
        proxy.process = start_process(
            epdctl_command("serve", "--dynamic-registration", *proxy.flags),
            tmp_path,
            "any-port",
            env=proxy.environment,
        )
        await proxy.process.wait_until(lambda: "\n" in proxy.process.stderr, "ready line", 30)  # type: ignore[union-attr]
        (line,) = proxy.process.stderr.splitlines()
        proxy.url = json.loads(line)["url"]

        assert await proxy.is_alive()
        assert proxy.process.stdout == ""


async def test_sigterm_is_not_ready_then_finishes_then_exits_0(tmp_path: Path) -> None:
    """In the drain delay work is still taken; after it, what runs ends whole, and the exit code is 0."""
    async with (
        StubInstance(Role.PREFILL_DECODE, {"chat": {"chunks": 20, "gap_ms": 100}}) as stub,
        serving(tmp_path, "--drain-delay", "0.7", "--shutdown-grace", "10") as proxy,
    ):
        await proxy.register("prefill_decode", stub.url)
        async with proxy.session.post(f"{proxy.url}/v1/chat/completions", json=STREAM) as stream:
            assert stream.status == 200
            proxy.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]
            await wait_until(lambda: is_not_ready(proxy), "not ready")
            assert (await proxy.get("/health"))[0] == 200
            async with proxy.session.post(f"{proxy.url}/v1/chat/completions", json=STREAM) as late:
                assert late.status == 200
                text = await stream.text()
                assert (await late.text()).rstrip().endswith("data: [DONE]")

        assert text.rstrip().endswith("data: [DONE]")
        assert await proxy.process.wait_exit() == 0  # type: ignore[union-attr]
        assert "Traceback" not in proxy.process.logs  # type: ignore[union-attr]


async def test_new_connections_are_refused_after_the_drain_delay(tmp_path: Path) -> None:
    """While a stream still runs, nobody new gets in."""
    async with (
        StubInstance(Role.PREFILL_DECODE, {"chat": {"chunks": 1, "end": "hang"}}) as stub,
        serving(tmp_path, "--shutdown-grace", "30") as proxy,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as other,
    ):
        await proxy.register("prefill_decode", stub.url)
        async with proxy.session.post(f"{proxy.url}/v1/chat/completions", json=STREAM) as stream:
            assert stream.status == 200
            proxy.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]

            async def is_refused() -> bool:
                try:
                    async with other.get(f"{proxy.url}/health"):
                        return False
                except aiohttp.ClientConnectorError:
                    return True
                except aiohttp.ClientError:
                    return False

            await wait_until(is_refused, "refused", 10)
            assert proxy.process.exit_code is None  # type: ignore[union-attr]


async def test_shutdown_grace_bounds_what_does_not_end(tmp_path: Path) -> None:
    """A stream that never ends is cut after the grace; that is still a polite exit."""
    async with (
        StubInstance(Role.PREFILL_DECODE, {"chat": {"chunks": 1, "end": "hang"}}) as stub,
        serving(tmp_path, "--shutdown-grace", "0.5") as proxy,
    ):
        await proxy.register("prefill_decode", stub.url)
        async with proxy.session.post(f"{proxy.url}/v1/chat/completions", json=STREAM) as stream:
            assert stream.status == 200
            proxy.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]

            assert await proxy.process.wait_exit(10) == 0  # type: ignore[union-attr]


async def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """Whoever asks twice does not wait for the grace; the exit code says that work was cut."""
    async with (
        StubInstance(Role.PREFILL_DECODE, {"chat": {"chunks": 1, "end": "hang"}}) as stub,
        serving(tmp_path, "--drain-delay", "60", "--shutdown-grace", "60") as proxy,
    ):
        await proxy.register("prefill_decode", stub.url)
        async with proxy.session.post(f"{proxy.url}/v1/chat/completions", json=STREAM) as stream:
            assert stream.status == 200
            proxy.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]
            await wait_until(lambda: is_not_ready(proxy), "not ready")

            proxy.process.send_signal(signal.SIGINT)  # type: ignore[union-attr]

            assert await proxy.process.wait_exit(10) == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "the port is in use (choose another one with --port)"),
        (("--port", "0", "--store", "sqlite:{store}"), "in use by another epdctl serve"),
    ],
)
async def test_what_is_in_use_is_a_clear_error(tmp_path: Path, flags: tuple[str, ...], says: str) -> None:
    """A port or a store that another proxy holds: exit 1, one clear line, and the other goes on."""
    async with serving(tmp_path) as proxy:
        store = tmp_path / "state" / "epdctl" / f"serve-{proxy.port}.db"
        assert store.exists()
        command = epdctl_command("serve", "--host", "127.0.0.1", "--port", str(proxy.port))
        second = start_process(
            [*command, "--dynamic-registration", *(flag.format(store=store) for flag in flags)],
            tmp_path,
            "second",
            env=proxy.environment | {"XDG_STATE_HOME": str(tmp_path / "other")},
        )

        assert await second.wait_exit(30) == 1
        assert says in second.stderr
        assert len(second.stderr.splitlines()) == 1
        assert await proxy.is_alive()


async def test_a_client_that_leaves_cancels_its_drain_call_but_not_the_drain(tmp_path: Path) -> None:
    """Handlers are cancelled when their client goes; the drain itself belongs to the registry."""
    async with (
        StubInstance(Role.PREFILL_DECODE, {"chat": {"chunks": 20, "gap_ms": 100}}) as stub,
        serving(tmp_path) as proxy,
    ):
        await proxy.register("prefill_decode", stub.url)
        async with proxy.session.post(f"{proxy.url}/v1/chat/completions", json=STREAM) as stream:
            assert stream.status == 200
            call = asyncio.create_task(proxy.remove(stub.url, drain="true", timeout="30"))
            await proxy.wait_state(stub.url, "draining")
            call.cancel()
            assert (await stream.text()).rstrip().endswith("data: [DONE]")

        await proxy.wait_state(stub.url, None)
        assert proxy.events("instance_removed")[0]["cause"] == "drained"
