"""`epdctl instances …` against a real proxy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from epdctl.domain import Role
from tests.e2e.registry_world import Proxy, serving
from tests.stubs.instance import StubInstance
from tests.stubs.ports import free_port
from tests.stubs.process import Process, epdctl_command, start_process, wait_until

pytestmark = pytest.mark.e2e

_COMMAND_TIMEOUT_S = 60.0


def start_command(
    proxy: Proxy,
    *arguments: str,
    name: str = "command",
    environment: Mapping[str, str | None] | None = None,
) -> Process:
    """Start `epdctl instances …` against `proxy`; `environment` has more variables, None takes one away."""
    variables = proxy.environment | (environment or {})
    return start_process(epdctl_command("instances", *arguments), proxy.folder / name, name, env=variables)


async def run_command(
    proxy: Proxy, *arguments: str, environment: Mapping[str, str | None] | None = None
) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a command."""
    process = start_command(
        proxy, *arguments, name="-".join(arguments).replace("/", "_")[:80], environment=environment
    )
    code = await process.wait_exit(_COMMAND_TIMEOUT_S)
    return code, process.stdout, process.stderr


async def test_the_life_of_an_instance_by_command(tmp_path: Path) -> None:
    """Register, list, show, drain, remove: data on stdout, exit code 0."""
    async with StubInstance(Role.ENCODE, {"models": ["m"]}) as stub, serving(tmp_path) as proxy:
        registered = await run_command(proxy, "register", stub.url, "--role", "encode", "--wait-ready", "30")
        again = await run_command(proxy, "register", stub.url, "--role", "encode")
        updated = await run_command(proxy, "register", stub.url, "--role", "encode", "--labels", "group=a")
        listed = await run_command(proxy, "list")
        shown = await run_command(proxy, "show", stub.url)
        as_json = await run_command(proxy, "list", "--json")
        drained = await run_command(proxy, "drain", stub.url)

        assert registered == (0, f"{stub.url} registered, ready\n", "")
        assert again == (0, f"{stub.url} already registered, ready\n", "")
        assert updated == (0, f"{stub.url} updated, ready\n", "")
        header, row = listed[1].splitlines()[:2]
        assert header.split() == [
            "ROLE",
            "STATE",
            "URL",
            "MODELS",
            "DP",
            "IN",
            "FLIGHT",
            "FAILURES",
            "LAST",
            "PROBE",
        ]
        assert row.split()[:7] == ["encode", "ready", stub.url, "m", "1", "0", "0"]
        assert listed[1].splitlines()[-1].startswith("topology incomplete: not ready, no prefill_decode")
        assert "labels                  group=a" in shown[1]
        assert json.loads(as_json[1])["instances"][0]["url"] == stub.url
        assert drained == (0, f"{stub.url} drained and removed\n", "")


async def test_what_is_not_registered(tmp_path: Path) -> None:
    """Showing and removing a stranger fails with exit code 1, unless a missing one is fine."""
    async with serving(tmp_path) as proxy:
        shown = await run_command(proxy, "show", "http://e1:1")
        removed = await run_command(proxy, "remove", "http://e1:1")
        drained = await run_command(proxy, "drain", "http://e1:1")
        fine = await run_command(proxy, "remove", "http://e1:1", "--missing-ok")

        assert shown == (1, "", "epdctl instances: http://e1:1 is not registered\n")
        assert [(code, out) for code, out, _ in (removed, drained)] == [(1, ""), (1, "")]
        assert "--missing-ok" in removed[2]
        assert fine == (0, "http://e1:1 was not registered\n", "")


async def test_the_proxys_refusal_is_shown(tmp_path: Path) -> None:
    """A refusal is one line on stderr, in the proxy's words, with exit code 1."""
    async with serving(tmp_path) as proxy:
        await proxy.register("prefill", "http://127.0.0.1:1")

        code, out, err = await run_command(
            proxy, "register", "http://127.0.0.1:2", "--role", "prefill_decode"
        )

        assert (code, out) == (1, "")
        assert err.startswith("epdctl instances: Cannot mix prefill_decode with standalone prefill/decode")


async def test_a_missing_key_is_named_where_it_is_missing(tmp_path: Path) -> None:
    """Without ADMIN_API_KEY the command says that this shell lacks it, beside the proxy's refusal."""
    async with serving(tmp_path) as proxy:
        code, out, error = await run_command(
            proxy, "remove", "http://127.0.0.1:1", environment={"ADMIN_API_KEY": None}
        )

    assert (code, out) == (1, "")
    assert "this shell has no ADMIN_API_KEY" in error


async def test_a_proxy_that_is_down_is_named(tmp_path: Path) -> None:
    """Without a proxy the message names its URL and the flag, at once."""
    async with serving(tmp_path, start=False) as proxy:
        code, out, err = await run_command(proxy, "list")

        assert (code, out) == (1, "")
        assert f"cannot reach the proxy at {proxy.url}: connection refused" in err
        assert "--url" in err
        assert "Traceback" not in err


async def test_something_else_on_the_port_is_not_taken_for_a_proxy(tmp_path: Path) -> None:
    """A server that is no epdctl proxy is named as such."""
    async with StubInstance(Role.ENCODE) as stub, serving(tmp_path, start=False) as proxy:
        code, _, err = await run_command(proxy, "list", "--url", stub.url)

        assert code == 1
        assert stub.url in err
        assert "Traceback" not in err


async def test_wait_ready_waits_for_the_proxy_and_for_the_instance(tmp_path: Path) -> None:
    """A launcher may start first: the command waits for both, says so, and returns when it is ready."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with serving(tmp_path, start=False) as proxy:
        command = start_command(proxy, "register", url, "--role", "encode", "--wait-ready", "60")
        await command.wait_until(lambda: "so far" in command.stderr, "progress is shown", 30)
        await proxy.start()
        await proxy.wait_state(url, "pending")
        assert command.exit_code is None

        async with StubInstance(Role.ENCODE, port=port):
            assert await command.wait_exit(30) == 0

        assert command.stdout == f"{url} registered, ready\n"


async def test_wait_ready_gives_up_in_time(tmp_path: Path) -> None:
    """An instance that does not come is a failure after the time given, and stays registered."""
    url = f"http://127.0.0.1:{free_port()}"
    async with serving(tmp_path) as proxy:
        code, out, err = await run_command(
            proxy, "register", url, "--role", "encode", "--wait-ready", "1", "--json"
        )

        assert code == 1
        assert json.loads(out) == {"registered": True, "state": "pending"}
        assert f"{url} was not ready within 1 s" in err
        assert await proxy.state(url) == "pending"


async def test_wait_ready_notices_a_removal(tmp_path: Path) -> None:
    """Somebody else's removal ends the wait with a failure."""
    url = f"http://127.0.0.1:{free_port()}"
    async with serving(tmp_path) as proxy:
        command = start_command(proxy, "register", url, "--role", "encode", "--wait-ready", "60")
        await proxy.wait_state(url, "pending", 30)
        await wait_until(lambda: command.exit_code is None, "still waiting")
        await proxy.remove(url)

        assert await command.wait_exit(30) == 1
        assert "removed" in command.stderr
