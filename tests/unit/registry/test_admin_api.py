"""The admin API over HTTP, in this process, with stub instances."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from epdctl.app import build_app
from epdctl.config.serve import ServeSettings
from epdctl.domain import Role
from epdctl.lifecycle import Presence
from epdctl.registry import api as registry_api
from tests.stubs.instance import StubInstance
from tests.stubs.ports import free_port
from tests.stubs.process import wait_until

pytestmark = pytest.mark.unit

KEY = "top-secret"
AUTH = {"X-API-Key": KEY}


class Api:
    """A running application and short ways to call it."""

    def __init__(self, client: TestClient[Any, Any]) -> None:
        self.client = client

    async def post(self, key: str | None = KEY, /, **fields: Any) -> tuple[int, Any]:
        """Register with `fields`."""
        return await self.call("POST", json.dumps(fields).encode(), key)

    async def delete(self, key: str | None = KEY, /, **query: str) -> tuple[int, Any]:
        """Remove or drain."""
        return await self.call("DELETE", b"", key, **query)

    async def get(self, path: str = "/instances", **query: str) -> tuple[int, Any]:
        """Read a page."""
        async with self.client.get(path, params=query) as answer:
            return answer.status, await answer.json()

    async def call(self, method: str, body: bytes, key: str | None, **query: str) -> tuple[int, Any]:
        """Call `/instances` and return status and JSON."""
        headers = {} if key is None else {"X-API-Key": key}
        async with self.client.request(
            method, "/instances", data=body, params=query, headers=headers
        ) as answer:
            assert answer.headers["x-request-id"]
            return answer.status, await answer.json()

    async def lists(self, role: str) -> dict[str, list[str]]:
        """Return the lists of one role."""
        return (await self.get())[1][role]  # type: ignore[no-any-return]

    async def one(self, url: str) -> dict[str, Any]:
        """Return one instance of the detail view."""
        _, detail = await self.get(view="detail")
        return next(entry for entry in detail["instances"] if entry["url"] == url)


async def start(**settings: Any) -> TestClient[Any, Any]:
    """Return a client of a started application."""
    given: dict[str, Any] = {
        "dynamic_registration": True,
        "admin_api_key": KEY,
        "store": "memory",
        "probe_interval": 0.05,
        "probe_timeout": 0.3,
        "fail_threshold": 2,
    }
    client: TestClient[Any, Any] = TestClient(TestServer(build_app(ServeSettings(**(given | settings)))))
    await client.start_server()
    return client


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    """An application with dynamic registration."""
    client = await start()
    yield Api(client)
    await client.close()


@pytest.fixture
async def encoder() -> AsyncIterator[StubInstance]:
    """A healthy encoder."""
    async with StubInstance(Role.ENCODE, {"models": ["m"]}) as stub:
        yield stub


def code(answer: Any) -> str:
    """Return the code of an error, whose shape is OpenAI's."""
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    return str(answer["error"]["code"])


class TestRegister:
    """`POST /instances`."""

    async def test_reachable_is_ready_when_the_call_returns(self, api: Api, encoder: StubInstance) -> None:
        """A reachable instance is live, with its models, when POST answers."""
        assert await api.post(role="encode", url=encoder.url) == (200, {"registered": True, "state": "ready"})
        assert await api.lists("encode") == {
            "live": [encoder.url],
            "evicted": [],
            "pending": [],
            "draining": [],
        }
        assert (await api.one(encoder.url))["models"] == ["m"]

    async def test_again_says_so_and_changes_nothing(self, api: Api, encoder: StubInstance) -> None:
        """The same registration again answers 200 with registered false."""
        await api.post(role="encode", url=encoder.url)
        before = await api.one(encoder.url)

        answer = await api.post(role="encode", url=encoder.url.upper().replace("HTTP", "http") + "/")

        assert answer == (200, {"registered": False, "state": "ready"})
        after = await api.one(encoder.url)
        assert (after["generation"], after["since"]) == (
            before["generation"],
            pytest.approx(before["since"], abs=0.1),
        )

    async def test_other_fields_update(self, api: Api, encoder: StubInstance) -> None:
        """The same URL and role with other fields is an update of a new generation."""
        await api.post(role="encode", url=encoder.url)

        answer = await api.post(role="encode", url=encoder.url, labels={"group": "a"})

        assert answer == (200, {"registered": False, "state": "ready", "updated": True})
        assert (await api.one(encoder.url))["generation"] == 2

    async def test_unreachable_is_pending_and_joins_by_itself(self, api: Api) -> None:
        """An instance that is not up yet is accepted, and gets traffic once it answers."""
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        assert await api.post(role="encode", url=url) == (200, {"registered": True, "state": "pending"})

        async with StubInstance(Role.ENCODE, port=port):

            async def is_live() -> bool:
                return (await api.lists("encode"))["live"] == [url]

            await wait_until(is_live, "live")

    async def test_posting_an_evicted_one_asks_it_again(self, api: Api, encoder: StubInstance) -> None:
        """A launcher that announces a restarted instance need not wait for the back-off."""
        await api.post(role="encode", url=encoder.url)
        await encoder.set_behaviour({"health": {"status": 503}})

        async def is_evicted() -> bool:
            return (await api.one(encoder.url))["state"] == "evicted"

        await wait_until(is_evicted, "evicted")
        await encoder.set_behaviour({})

        assert await api.post(role="encode", url=encoder.url) == (
            200,
            {"registered": False, "state": "ready"},
        )

    async def test_conflicts_are_409(self, api: Api) -> None:
        """Mixed topologies and role changes are refused by name."""
        url = f"http://127.0.0.1:{free_port()}"
        await api.post(role="prefill", url=url)

        mixed = await api.post(role="prefill_decode", url="http://127.0.0.1:1")
        changed = await api.post(role="decode", url=url)

        assert (mixed[0], code(mixed[1])) == (409, "topology_conflict")
        assert (changed[0], code(changed[1])) == (409, "role_change")

    @pytest.mark.parametrize("key", [None, "", "wrong", KEY + "x", "sch\u00fcssel"])
    async def test_a_wrong_key_is_403(self, api: Api, key: str | None) -> None:
        """Without the right key nothing is registered, and nothing of the key is told."""
        status, answer = await api.post(key, role="encode", url="http://127.0.0.1:1")

        assert (status, code(answer)) == (403, "forbidden")
        assert KEY not in json.dumps(answer)
        assert (await api.get(view="detail"))[1]["instances"] == []

    async def test_the_key_comes_before_the_body(self, api: Api) -> None:
        """A stranger's body is not even parsed."""
        assert (await api.call("POST", b"{", "wrong"))[0] == 403

    @pytest.mark.parametrize(
        ("body", "status", "name"),
        [
            (b'{"role":"encode"', 400, "invalid_request"),
            (b"", 400, "invalid_request"),
            (b"[]", 422, "schema_violation"),
            (b'{"role":"encode"}', 422, "schema_violation"),
            (b'{"role":"banana","url":"http://e:1"}', 422, "schema_violation"),
            (b'{"role":"encode","url":"http://e:1","x":1}', 422, "schema_violation"),
            (b'{"role":"encode","url":"http://e:1","ec_zmq_addrs":["tcp://e:1"]}', 400, "invalid_request"),
            (b'{"role":"encode","url":"http://e:1","dp_size":2}', 400, "invalid_request"),
            (b" " * 70_000, 413, "body_too_large"),
        ],
    )
    async def test_bad_bodies(self, api: Api, body: bytes, status: int, name: str) -> None:
        """Each kind of bad body has its status and code, and nothing is stored."""
        got, answer = await api.call("POST", body, KEY)

        assert (got, code(answer)) == (status, name)
        assert (await api.get(view="detail"))[1]["instances"] == []

    async def test_a_body_that_does_not_come_is_given_up(
        self, api: Api, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A client that stops in the middle of its body gets an answer and holds nothing."""
        monkeypatch.setattr(registry_api, "BODY_TIMEOUT_S", 0.1)
        never = asyncio.Event()

        async def halting() -> AsyncIterator[bytes]:
            yield b'{"role":'
            await never.wait()

        async with api.client.post("/instances", data=halting(), headers=AUTH) as answer:
            assert (answer.status, code(await answer.json())) == (400, "invalid_request")

    async def test_a_probe_that_hangs_does_not_hold_the_call(self, api: Api, encoder: StubInstance) -> None:
        """POST answers within the probe's deadline."""
        await encoder.set_behaviour({"health": {"hang": True}})

        async with asyncio.timeout(3):
            assert (await api.post(role="encode", url=encoder.url))[1]["state"] == "pending"


class TestModes:
    """What the flags allow."""

    async def test_registration_off_names_the_flag(self) -> None:
        """With a key but without --dynamic-registration, POST is refused and says how to allow it."""
        api = Api(
            await start(
                dynamic_registration=False,
                store="",
                encode_servers_urls="http://127.0.0.1:1",
                decode_servers_urls="http://127.0.0.1:2",
            )
        )

        status, answer = await api.post(role="encode", url="http://127.0.0.1:3")
        static = await api.delete(url="http://127.0.0.1:1/")
        await api.client.close()

        assert (status, code(answer)) == (403, "forbidden")
        assert "--dynamic-registration" in answer["error"]["message"]
        assert (static[0], code(static[1])) == (409, "static_instance")

    async def test_without_any_key_nobody_may(self) -> None:
        """No key configured is not an open door."""
        api = Api(
            await start(
                dynamic_registration=False,
                admin_api_key=None,
                store="",
                encode_servers_urls="http://127.0.0.1:1",
                decode_servers_urls="http://127.0.0.1:2",
            )
        )

        answers = [
            await api.post("", role="encode", url="http://e:1"),
            await api.delete("", url="http://e:1"),
        ]
        await api.client.close()

        assert [status for status, _ in answers] == [403, 403]

    async def test_protected_reads(self) -> None:
        """With --protect-reads, listing needs the key too."""
        api = Api(await start(protect_reads=True))

        refused = await api.get()
        allowed = await api.call("GET", b"", KEY)
        await api.client.close()

        assert (refused[0], allowed[0]) == (403, 200)

    async def test_reads_are_open_by_default(self, api: Api) -> None:
        """Listing needs no key unless asked for, and an unknown view is refused."""
        assert (await api.get())[0] == 200
        assert (await api.get(view="list")) == (await api.get())
        assert (await api.get(view="everything"))[0] == 400


class TestRemove:
    """`DELETE /instances`."""

    async def test_removed(self, api: Api, encoder: StubInstance) -> None:
        """DELETE removes; the URL's spelling does not matter."""
        await api.post(role="encode", url=encoder.url)

        assert await api.delete(url=encoder.url + "/") == (200, {"removed": True})
        assert await api.delete(url=encoder.url) == (404, {"removed": False})

    @pytest.mark.parametrize(
        ("query", "status"),
        [
            ({}, 400),
            ({"url": "nonsense"}, 422),
            ({"url": "http://e:1", "drain": "perhaps"}, 400),
            ({"url": "http://e:1", "drain": "true", "timeout": "soon"}, 400),
            ({"url": "http://e:1", "drain": "true", "timeout": "-1"}, 400),
            ({"url": "http://e:1", "drain": "true", "timeout": "nan"}, 400),
            ({"url": "http://e:1", "drain": "true"}, 404),
        ],
    )
    async def test_bad_queries(self, api: Api, query: dict[str, str], status: int) -> None:
        """Each mistake in the query is named, none is guessed away."""
        assert (await api.delete(**query))[0] == status

    async def test_wrong_key(self, api: Api, encoder: StubInstance) -> None:
        """Without the key nothing is removed."""
        await api.post(role="encode", url=encoder.url)

        assert (await api.delete("wrong", url=encoder.url))[0] == 403
        assert (await api.lists("encode"))["live"] == [encoder.url]

    async def test_drain_of_an_idle_instance(self, api: Api, encoder: StubInstance) -> None:
        """With nothing in flight a drain ends at once and says so."""
        await api.post(role="encode", url=encoder.url)

        answer = await api.delete(url=encoder.url, drain="true", timeout="5")

        assert answer == (200, {"removed": True, "drained": True, "in_flight": 0})


class TestHealthPages:
    """`/health`, `/ready`, `/metrics`."""

    async def test_health_is_alive_and_ready_has_the_reason(self, api: Api) -> None:
        """An empty proxy is alive, and not ready for a reason."""
        assert await api.get("/health") == (200, {"proxy": "healthy"})
        status, answer = await api.get("/ready")

        assert (status, answer["topology"], answer["reason"]) == (503, "empty", "no instance is registered")

    async def test_ready_with_a_full_topology(self, api: Api, encoder: StubInstance) -> None:
        """An encoder and a consumer make it ready."""
        async with StubInstance(Role.PREFILL_DECODE) as consumer:
            await api.post(role="encode", url=encoder.url)
            await api.post(role="prefill_decode", url=consumer.url)

            assert await api.get("/ready") == (200, {"ready": True, "topology": "e_pd", "reason": None})

    async def test_not_ready_while_leaving(self) -> None:
        """A proxy that is leaving is alive, serves, and is not ready."""
        presence = Presence()
        settings = ServeSettings(dynamic_registration=True, admin_api_key=KEY, store="memory")  # type: ignore[arg-type]
        client: TestClient[Any, Any] = TestClient(TestServer(build_app(settings, presence)))
        await client.start_server()
        api = Api(client)
        presence.leave()

        alive, ready, listed = await api.get("/health"), await api.get("/ready"), await api.get()
        await client.close()

        assert (alive[0], ready[0], ready[1]["reason"], listed[0]) == (200, 503, "shutting down", 200)

    async def test_metrics(self, api: Api, encoder: StubInstance) -> None:
        """The exposition text shows instances by role and state, and no URL."""
        await api.post(role="encode", url=encoder.url)

        async with api.client.get("/metrics") as answer:
            text = await answer.text()

        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert 'epdctl_instances{role="encode",state="ready"} 1.0' in text
        assert encoder.url not in text


async def test_restart_keeps_registrations_in_the_file(tmp_path: Path, encoder: StubInstance) -> None:
    """A second start on the same file knows the instances of the first, with their generation."""
    store = f"sqlite:{tmp_path / 'r.db'}"
    first = Api(await start(store=store))
    await first.post(role="encode", url=encoder.url)
    await first.post(role="encode", url=encoder.url, labels={"group": "a"})
    await first.client.close()

    second = Api(await start(store=store))
    entry = await second.one(encoder.url)
    await second.client.close()

    assert (entry["generation"], entry["labels"]) == (2, {"group": "a"})
