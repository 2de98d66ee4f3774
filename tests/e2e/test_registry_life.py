"""The registry of a real `epdctl serve`: who joins, who leaves, what survives."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from epdctl.domain import Role
from tests.e2e.registry_world import KEY, serving
from tests.stubs.instance import StubInstance
from tests.stubs.ports import free_port
from tests.stubs.process import wait_until

pytestmark = pytest.mark.e2e

SICK = {"health": {"status": 503}}


async def test_a_dead_instance_is_evicted_although_its_launcher_keeps_posting(tmp_path: Path) -> None:
    """Re-posting the same registration resets no failure count and revives nobody."""
    async with StubInstance(Role.ENCODE) as stub, serving(tmp_path, "--fail-threshold", "3") as proxy:
        assert await proxy.register("encode", stub.url) == (200, {"registered": True, "state": "ready"})
        await stub.set_behaviour(SICK)

        async def evicted_while_posting() -> bool:
            status, answer = await proxy.register("encode", stub.url)
            assert (status, answer["registered"]) == (200, False)
            return bool(answer["state"] == "evicted")

        await wait_until(evicted_while_posting, "evicted", 10)

        assert len(proxy.events("instance_evicted")) == 1
        assert len(proxy.events("instance_registered")) == 1


async def test_eviction_and_readmission_without_registering_again(tmp_path: Path) -> None:
    """A worker that dies and comes back on its URL gets traffic again by itself."""
    port = free_port()
    async with serving(tmp_path) as proxy:
        async with StubInstance(Role.ENCODE, port=port) as stub:
            await proxy.register("encode", stub.url)
        await proxy.wait_state(stub.url, "evicted")
        entry = await proxy.one(stub.url)
        assert entry is not None
        assert entry["last_probe"]["error"] == "connection refused"

        async with StubInstance(Role.ENCODE, port=port):
            await proxy.wait_state(stub.url, "ready")

        assert len(proxy.events("instance_readmitted")) == 1


async def test_single_failures_between_successes_evict_nobody(tmp_path: Path) -> None:
    """An instance that fails every other probe stays; three failures in a row evict it exactly once."""
    health = {"sequence": [200, 503] * 10 + [503, 503, 200]}
    async with (
        StubInstance(Role.ENCODE, {"health": health}) as stub,
        serving(tmp_path, "--fail-threshold", "3") as proxy,
    ):
        await proxy.register("encode", stub.url)
        await wait_until(lambda: len(stub.calls_to("/health")) >= 19, "the sequence is nearly through")
        assert proxy.events("instance_evicted") == []

        await wait_until(lambda: len(proxy.events("instance_readmitted")) == 1, "evicted and readmitted")

        assert len(proxy.events("instance_evicted")) == 1
        assert await proxy.state(stub.url) == "ready"


async def test_registrations_survive_a_crash(tmp_path: Path) -> None:
    """After kill -9 the instances are back with their generation: pending first, ready by themselves."""
    async with (
        StubInstance(Role.ENCODE) as encoder,
        StubInstance(Role.PREFILL_DECODE) as consumer,
        serving(tmp_path) as proxy,
    ):
        await proxy.register("encode", encoder.url)
        await proxy.register("prefill_decode", consumer.url)
        await proxy.register("prefill_decode", consumer.url, labels={"zone": "z"}, dp_size=2)
        removed = f"http://127.0.0.1:{free_port()}"
        await proxy.register("encode", removed)
        await proxy.remove(removed)

        await proxy.kill()
        await encoder.set_behaviour({"health": {"hang": True}})
        await proxy.start()

        assert await proxy.state(encoder.url) == "pending"
        await proxy.wait_state(consumer.url, "ready")
        entry = await proxy.one(consumer.url)
        assert entry is not None
        assert (entry["generation"], entry["labels"], entry["dp_size"]) == (2, {"zone": "z"}, 2)
        assert await proxy.state(removed) is None
        await encoder.set_behaviour({})
        await proxy.wait_state(encoder.url, "ready")
        assert await proxy.get("/ready") == (200, {"ready": True, "topology": "e_pd", "reason": None})


async def test_what_stays_down_is_forgotten(tmp_path: Path) -> None:
    """After the time to live, an instance that never answers is gone, also from the store."""
    url = f"http://127.0.0.1:{free_port()}"
    async with StubInstance(Role.ENCODE) as other, serving(tmp_path, "--evicted-ttl", "0.5") as proxy:
        assert (await proxy.register("encode", url))[1]["state"] == "pending"

        await proxy.wait_state(url, None)
        (line,) = proxy.events("instance_removed")
        assert (line["cause"], line["instance"]) == ("expired", url)
        # The store is written in order, and a registration's answer waits for it: so the removal is kept.
        await proxy.register("encode", other.url)
        await proxy.kill()
        await proxy.start()

        assert await proxy.state(url) is None
        assert await proxy.state(other.url) is not None


async def test_refusals(tmp_path: Path) -> None:
    """Wrong keys, mixed topologies and role changes are refused, and change nothing."""
    async with StubInstance(Role.PREFILL) as prefill, serving(tmp_path) as proxy:
        await proxy.register("prefill", prefill.url)
        wrong = await proxy.call(
            "POST", "/instances", body={"role": "encode", "url": "http://127.0.0.1:1"}, key="wrong"
        )
        mixed = await proxy.register("prefill_decode", "http://127.0.0.1:1")
        changed = await proxy.register("decode", prefill.url)

        assert [(status, answer["error"]["code"]) for status, answer in (wrong, mixed, changed)] == [
            (403, "forbidden"),
            (409, "topology_conflict"),
            (409, "role_change"),
        ]
        assert KEY not in proxy.process.logs  # type: ignore[union-attr]
        assert len((await proxy.get("/instances", view="detail"))[1]["instances"]) == 1


async def test_a_conflict_with_one_that_is_down_is_decided_the_same(tmp_path: Path) -> None:
    """An evicted decode instance still refuses a prefill_decode one, until it is removed."""
    async with serving(tmp_path, "--fail-threshold", "1") as proxy, StubInstance(Role.DECODE) as decode:
        await proxy.register("decode", decode.url)
        await decode.set_behaviour(SICK)
        await proxy.wait_state(decode.url, "evicted")

        before = await proxy.register("prefill_decode", "http://127.0.0.1:1")
        await proxy.remove(decode.url)
        after = await proxy.register("prefill_decode", "http://127.0.0.1:1")

        assert (before[0], after[0]) == (409, 200)


async def test_many_hanging_instances_do_not_delay_a_verdict(tmp_path: Path) -> None:
    """With fifteen instances that hang, another one's failure is noticed in its own time."""
    async with serving(tmp_path, "--fail-threshold", "2", "--probe-timeout", "2") as proxy:
        hanging = [StubInstance(Role.ENCODE, {"health": {"hang": True}}) for _ in range(15)]
        async with StubInstance(Role.ENCODE) as good, StubInstance(Role.ENCODE):
            try:
                for stub in hanging:
                    await stub.start()
                await asyncio.gather(*(proxy.register("encode", stub.url) for stub in hanging))
                await proxy.register("encode", good.url)
                await good.set_behaviour(SICK)

                await proxy.wait_state(good.url, "evicted", 2.0)

                assert max(stub.most_concurrent_health for stub in hanging) == 1
            finally:
                for stub in hanging:
                    await stub.stop()


async def test_when_everybody_fails_at_once_evictions_are_held(tmp_path: Path) -> None:
    """Three instances on two hosts that fail together are evicted one interval late, with a warning."""
    binds = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
    flags = ("--probe-interval", "1", "--fail-threshold", "3")
    stubs = [StubInstance(Role.ENCODE, {"bind": bind}) for bind in binds]
    async with serving(tmp_path, *flags) as proxy, stubs[0], stubs[1], stubs[2]:
        for stub in stubs:
            assert (await proxy.register("encode", stub.url))[1]["state"] == "ready"

        await asyncio.gather(
            *(stub.set_behaviour(SICK | {"bind": bind}) for stub, bind in zip(stubs, binds, strict=True))
        )
        for stub in stubs:
            await proxy.wait_state(stub.url, "evicted", 20)

        assert len(proxy.events("evictions_held")) == 1
        names = [line["event"] for line in proxy.log()]
        assert names.index("evictions_held") < names.index("instance_evicted")


async def test_drain_waits_for_the_stream_and_gives_no_new_work(tmp_path: Path) -> None:
    """A draining consumer finishes its stream whole, takes nothing new, and is then removed."""
    slow = {"chat": {"chunks": 10, "gap_ms": 100}}
    async with (
        StubInstance(Role.PREFILL_DECODE, slow) as old,
        StubInstance(Role.PREFILL_DECODE) as new,
        serving(tmp_path) as proxy,
    ):
        await proxy.register("prefill_decode", old.url)
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
        async with proxy.session.post(f"{proxy.url}/v1/chat/completions", json=body) as stream:
            assert stream.status == 200
            await proxy.register("prefill_decode", new.url)
            drain = asyncio.create_task(proxy.remove(old.url, drain="true", timeout="20"))
            await proxy.wait_state(old.url, "draining")
            listed = (await proxy.get("/instances"))[1]["prefill_decode"]
            for _ in range(4):
                status, _ = await proxy.call("POST", "/v1/chat/completions", body=body | {"stream": False})
                assert status == 200
            assert not drain.done()
            text = await stream.text()

        assert await drain == (200, {"removed": True, "drained": True, "in_flight": 0})
        assert listed == {"live": [new.url], "evicted": [], "pending": [], "draining": [old.url]}
        assert text.rstrip().endswith("data: [DONE]")
        assert (len(old.chats), len(new.chats)) == (1, 4)
        assert await proxy.state(old.url) is None


async def test_drain_ends_at_its_timeout_and_says_so(tmp_path: Path) -> None:
    """A request that does not end does not hold the drain beyond its timeout."""
    async with (
        StubInstance(Role.PREFILL_DECODE, {"chat": {"chunks": 1, "end": "hang"}}) as stub,
        serving(tmp_path) as proxy,
    ):
        await proxy.register("prefill_decode", stub.url)
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
        async with proxy.session.post(f"{proxy.url}/v1/chat/completions", json=body) as stream:
            assert stream.status == 200

            answer = await proxy.remove(stub.url, drain="true", timeout="0.3")

        assert answer == (200, {"removed": True, "drained": False, "in_flight": 1})


async def test_static_and_stored_that_contradict_stop_the_start(tmp_path: Path) -> None:
    """A stored prefill beside a static prefill_decode: exit 1, both named, nothing served."""
    async with serving(tmp_path) as proxy:
        stored = f"http://127.0.0.1:{free_port()}"
        await proxy.register("prefill", stored)
        await proxy.kill()
        static = "http://127.0.0.1:1"
        proxy.flags += ("--decode-servers-urls", static)

        with pytest.raises(AssertionError):
            await proxy.start()

        assert proxy.process is not None
        assert await proxy.process.wait_exit() == 1
        assert f"{stored} (prefill)" in proxy.process.stderr
        assert f"{static} (prefill_decode)" in proxy.process.stderr
        assert "Traceback" not in proxy.process.stderr


async def test_static_instances_are_probed_and_cannot_be_removed(tmp_path: Path) -> None:
    """Instances of the command line join by themselves, are evicted and readmitted, and stay."""
    async with StubInstance(Role.ENCODE) as encoder, StubInstance(Role.PREFILL_DECODE) as consumer:
        flags = ("--encode-servers-urls", encoder.url, "--decode-servers-urls", consumer.url)
        async with serving(tmp_path, *flags, "--evicted-ttl", "0.3") as proxy:
            await proxy.wait_state(encoder.url, "ready")
            assert (await proxy.remove(encoder.url))[0] == 409
            await encoder.set_behaviour(SICK)
            await proxy.wait_state(encoder.url, "evicted")
            entry = await proxy.one(encoder.url)
            assert entry is not None
            probes = len(encoder.calls_to("/health"))
            # With its back-off that takes longer than the time to live.
            await wait_until(lambda: len(encoder.calls_to("/health")) > probes + 3, "four more probes", 20)

            await encoder.set_behaviour({})

            await proxy.wait_state(encoder.url, "ready")
