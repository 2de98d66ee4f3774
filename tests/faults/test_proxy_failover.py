"""Retries and cancels: what a second attempt cures, what it must not repeat, and what is given up."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.e2e.proxy_world import PAIR, SPLIT, ProxyWorld, picture_request, proxy_world, text_request
from tests.stubs.process import wait_until

pytestmark = pytest.mark.fault


def transfer_ids(call: Any) -> list[str]:
    """Return the transfer ids that an encoder was told in one call."""
    return [entry["transfer_id"] for entry in call.json["ec_transfer_params"]["ec_items"]]


def items_of(call: Any) -> list[dict[str, str]]:
    """Return the entries that a consumer was told in one call."""
    return call.json["ec_transfer_params"]["ec_items"]


class TestEncoders:
    """An encoder that fails costs only its own items."""

    @pytest.mark.parametrize(
        "fault",
        [{"fail": "refuse"}, {"fail": "reset_after_body"}, {"status": 500}, {"status": 503}, {"text": "x"}],
    )
    async def test_another_encoder_takes_over(self, tmp_path: Path, fault: dict[str, Any]) -> None:
        """Hazard 15: the items of a broken encoder are encoded elsewhere, under new ids; the others once."""
        roles = {"e0": "encode", "e1": "encode", "pd0": "prefill_decode"}
        async with proxy_world(tmp_path, roles, with_consumer=True) as world:
            await world["e0"].set_behaviour({"chat": fault})
            started = time.monotonic()
            reply = await world.chat(picture_request(4))

            assert reply.status == 200
            assert time.monotonic() - started < 2
            first, second = world["e1"].chats
            assert sum(len(call.json["messages"][0]["content"]) for call in (first, second)) == 4
            told = items_of(world["pd0"].chats[0])
            assert len({entry["transfer_id"] for entry in told}) == 4
            fresh = {*transfer_ids(first), *transfer_ids(second)}
            assert {entry["transfer_id"] for entry in told} == fresh
            lost = [id_ for call in world["e0"].chats if call.body for id_ in transfer_ids(call)]
            assert not fresh & set(lost)
            assert await world.metric("epdctl_retries_total", stage="encode") == 1
            await world.wait_quiet()

    async def test_the_abandoned_ids_are_cancelled(self, tmp_path: Path) -> None:
        """What a broken encoder may have reserved at the consumer is given up there, in the background."""
        roles = {"e0": "encode", "e1": "encode", "pd0": "prefill_decode"}
        async with proxy_world(tmp_path, roles, with_consumer=True) as world:
            await world["e0"].set_behaviour({"chat": {"fail": "reset_after_body"}})
            assert (await world.chat(picture_request())).status == 200
            lost = transfer_ids(world["e0"].chats[0])

            assert world.consumer is not None
            consumer = world.consumer
            await wait_until(lambda: consumer.cancelled_ids() == lost, "the lost ids are cancelled")

    async def test_without_another_encoder_the_failure_is_told_at_once(self, tmp_path: Path) -> None:
        """Hazard 15: with a single encoder dead the client hears within two seconds; text is served."""
        async with proxy_world(tmp_path, PAIR) as world:
            await world["e0"].set_behaviour({"chat": {"fail": "refuse"}})
            started = time.monotonic()
            reply = await world.chat(picture_request())

            assert (reply.status, reply.code) == (502, "upstream_unreachable")
            assert time.monotonic() - started < 2
            assert (await world.chat(text_request())).status == 200

    async def test_a_client_mistake_is_not_tried_elsewhere(self, tmp_path: Path) -> None:
        """A picture that one encoder refuses is not shown to the next."""
        roles = {"e0": "encode", "e1": "encode", "pd0": "prefill_decode"}
        async with proxy_world(tmp_path, roles) as world:
            told = {"error": {"message": "broken image"}}
            await world["e0"].set_behaviour({"chat": {"status": 400, "json": told}})
            reply = await world.chat(picture_request())

            assert (reply.status, reply.json) == (400, told)
            assert not world["e1"].chats


class TestConsumers:
    """New attempts of the whole request."""

    @pytest.mark.parametrize("code", ["consumer_full", "consumer_unavailable"])
    async def test_another_consumer_takes_over_from_a_full_one(self, tmp_path: Path, code: str) -> None:
        """What an encoder could not deliver goes to another consumer; no other encoder is asked in vain."""
        roles = {"e0": "encode", "e1": "encode", "pd0": "prefill_decode", "pd1": "prefill_decode"}
        async with proxy_world(tmp_path, roles) as world:
            told = {"status": 503, "json": {"error": {"message": "x", "code": code}}}
            await world["e0"].set_behaviour({"chat": {"sequence": [told]}})
            reply = await world.chat(picture_request())

            assert reply.status == 200
            line = await world.line_of(reply.headers["x-request-id"])
            assert line["attempts"] == 2
            assert [len(world[name].chats) for name in ("pd0", "pd1")] == [0, 1]
            assert len([*world["e0"].chats, *world["e1"].chats]) == 2
            assert await world.metric("epdctl_retries_total", stage="encode", reason="busy") == 1
            await world.wait_quiet()

    async def test_without_another_consumer_the_client_is_told_to_come_back(self, tmp_path: Path) -> None:
        """A consumer that stays full: both encoders are asked, then 503 `consumer_full` with Retry-After."""
        roles = {"e0": "encode", "e1": "encode", "pd0": "prefill_decode"}
        async with proxy_world(tmp_path, roles) as world:
            told = {"status": 503, "json": {"error": {"message": "x", "code": "consumer_full"}}}
            for name in ("e0", "e1"):
                await world[name].set_behaviour({"chat": told | {"headers": {"Retry-After": "3"}}})
            reply = await world.chat(picture_request())

            assert (reply.status, reply.code, reply.headers["Retry-After"]) == (503, "consumer_full", "3")
            assert [len(world[name].chats) for name in ("e0", "e1", "pd0")] == [1, 1, 0]
            assert (await world.chat(text_request())).status == 200
            await world.wait_quiet()

    async def test_decodes_500_asks_for_every_item_again(self, tmp_path: Path) -> None:
        """An undelivered embedding: all items are encoded again under new ids, from the original body."""
        async with proxy_world(tmp_path, PAIR, with_consumer=True) as world:
            await world["pd0"].set_behaviour({"chat": {"sequence": [{"status": 500, "text": "x"}]}})
            reply = await world.chat(picture_request(2, max_tokens=33))

            assert reply.status == 200
            first, second = world["e0"].chats
            assert not set(transfer_ids(first)) & set(transfer_ids(second))
            assert first.json["messages"] == second.json["messages"]
            one, two = (call.json for call in world["pd0"].chats)
            assert one["messages"] == two["messages"]
            assert two["max_tokens"] == 33
            assert await world.metric("epdctl_retries_total", stage="decode", reason="failed") == 1

    async def test_retries_can_be_off(self, tmp_path: Path) -> None:
        """`--decode-retries 0`: decode's 500 is told at once."""
        async with proxy_world(tmp_path, PAIR, "--decode-retries", "0") as world:
            await world["pd0"].set_behaviour({"chat": {"sequence": [{"status": 500, "text": "x"}]}})

            assert (await world.chat(picture_request())).status == 502
            assert len(world["e0"].chats) == 1

    async def test_prefills_500_is_final(self, tmp_path: Path) -> None:
        """Hazard 35: a prefill that fails once makes nobody encode twice, and decode is not asked."""
        roles = SPLIT | {"p1": "prefill"}
        async with proxy_world(tmp_path, roles) as world:
            for name in ("p0", "p1"):
                await world[name].set_behaviour({"chat": {"sequence": [{"status": 500, "text": "x"}]}})
            reply = await world.chat(picture_request(stream=True))

            assert (reply.status, reply.code) == (502, "upstream_failed")
            assert (len(world["e0"].chats), len(world["d0"].chats)) == (1, 0)
            assert len(world["p0"].chats) + len(world["p1"].chats) == 1
            await world.wait_quiet()

    @pytest.mark.parametrize("fault", [{"fail": "refuse"}, {"fail": "reset_before_body"}, {"status": 503}])
    async def test_another_prefill_takes_over(self, tmp_path: Path, fault: dict[str, Any]) -> None:
        """A prefill that is gone or busy is replaced; the new body is built from the original."""
        roles = SPLIT | {"p1": "prefill"}
        async with proxy_world(tmp_path, roles) as world:
            await world["p0"].set_behaviour({"chat": fault})
            reply = await world.chat(picture_request(max_tokens=33, stream=True))

            assert (reply.status, reply.events[-1]) == (200, "[DONE]")
            (body,) = (call.json for call in world["p1"].chats)
            assert (body["max_tokens"], body["stream"]) == (1, False)
            assert body["kv_transfer_params"]["remote_engine_id"] is None
            assert world["d0"].chats[0].json["max_tokens"] == 33

    async def test_another_decode_takes_over(self, tmp_path: Path) -> None:
        """A decode that cannot be reached is replaced before anything reached the client."""
        roles = {"e0": "encode", "pd0": "prefill_decode", "pd1": "prefill_decode"}
        async with proxy_world(tmp_path, roles) as world:
            await world["pd0"].set_behaviour({"chat": {"fail": "refuse"}})
            replies = [await world.chat(picture_request(stream=True)) for _ in range(2)]

            assert [reply.status for reply in replies] == [200, 200]
            line = await world.line_of(replies[0].headers["x-request-id"])
            assert line["attempts"] == 2
            await world.wait_quiet()

    async def test_retries_stay_within_a_budget(self, tmp_path: Path) -> None:
        """When everything fails, not everything is asked twice."""
        async with proxy_world(tmp_path, PAIR) as world:
            await world["pd0"].set_behaviour({"chat": {"status": 500, "text": "x"}})
            for _ in range(30):
                assert (await world.chat(picture_request())).status == 502

            assert 30 < len(world["e0"].chats) <= 30 + 10 + 6


class TestCancel:
    """A request that is given up takes all its legs along."""

    @pytest.mark.parametrize("stage", ["e0", "p0", "d0"])
    async def test_the_client_leaves(self, tmp_path: Path, stage: str) -> None:
        """Whatever stage is at work, its connection is closed within a second and no counter stays."""
        async with proxy_world(tmp_path, SPLIT) as world:
            await world[stage].set_behaviour({"chat": {"hang": True}})
            _, writer = await world.open_raw(picture_request())
            await wait_until(lambda: bool(world[stage].chats), f"{stage} is at work")
            writer.close()

            call = world[stage].chats[0]
            await wait_until(lambda: call.client_left_at is not None, f"{stage} is let go", 1.0)
            await world.wait_quiet()
            names = {"e0": "encode", "p0": "prefill", "d0": "decode"}
            assert await world.metric("epdctl_cancels_total", stage=names[stage]) == 1
            assert await world.metric("epdctl_requests_total", outcome="client_disconnect") == 1

    async def test_the_client_leaves_a_stream(self, tmp_path: Path) -> None:
        """A stream that nobody reads any more ends at the instance too, and is no instance's failure."""
        async with proxy_world(tmp_path, PAIR) as world:
            await world["pd0"].set_behaviour({"chat": {"chunks": 1000, "gap_ms": 20}})
            reader, writer = await world.open_raw(text_request(stream=True))
            await reader.readuntil(b"data: ")
            writer.transport.abort()

            call = world["pd0"].chats[0]
            await wait_until(lambda: call.client_left_at is not None, "decode is let go", 1.0)
            await world.wait_quiet()
            assert await world.metric("epdctl_requests_total", outcome="client_disconnect") == 1

    async def test_transfers_are_cancelled_when_decode_was_not_opened(self, tmp_path: Path) -> None:
        """Hazard 38: the client leaves while pictures are encoded: each id is cancelled at the consumer."""
        async with proxy_world(tmp_path, PAIR, with_consumer=True) as world:
            await world["e0"].set_behaviour({"chat": {"hang": True}})
            body = picture_request(3)
            body["messages"][0]["content"].append(body["messages"][0]["content"][0])
            _, writer = await world.open_raw(body)
            await wait_until(lambda: bool(world["e0"].chats), "the encoder is at work")
            told = transfer_ids(world["e0"].chats[0])
            writer.close()

            assert world.consumer is not None
            consumer = world.consumer
            await wait_until(
                lambda: sorted(consumer.cancelled_ids()) == sorted(told), "all ids are cancelled"
            )
            assert len(set(told)) == 4

    async def test_transfers_of_a_request_that_decode_took_are_left_alone(self, tmp_path: Path) -> None:
        """Once decode has answered, the engine owns the embeddings."""
        async with proxy_world(tmp_path, PAIR, with_consumer=True) as world:
            assert (await world.chat(picture_request(2))).status == 200
            await world.wait_quiet()

            assert world.consumer is not None
            assert world.consumer.calls_to("cancel") == []

    async def test_a_silent_consumer_holds_nothing_up(self, tmp_path: Path) -> None:
        """Cancels are bounded and in the background: the client's answer does not wait for them."""
        async with proxy_world(tmp_path, PAIR, with_consumer=True) as world:
            assert world.consumer is not None
            world.consumer.set_behaviour({"*": "silent"})
            await world["pd0"].set_behaviour({"chat": {"status": 400, "text": "{}"}})
            started = time.monotonic()
            replies = await asyncio.gather(*(world.chat(picture_request()) for _ in range(20)))

            assert {reply.status for reply in replies} == {400}
            assert time.monotonic() - started < 2
            await world.wait_quiet()

    async def test_the_first_failing_leg_ends_the_others(self, tmp_path: Path) -> None:
        """One encoder refuses its picture: the other's call is given up at once."""
        roles = {"e0": "encode", "e1": "encode", "pd0": "prefill_decode"}
        async with proxy_world(tmp_path, roles) as world:
            await world["e0"].set_behaviour({"chat": {"status": 400, "json": {"error": {}}, "delay_ms": 100}})
            await world["e1"].set_behaviour({"chat": {"hang": True}})
            reply = await world.chat(picture_request(2))

            assert reply.status == 400
            call = world["e1"].chats[0]
            await wait_until(lambda: call.client_left_at is not None, "the other encoder is let go", 1.0)
            await world.wait_quiet()


class TestIdleConnections:
    """Servers that close connections when they like."""

    async def test_a_reset_of_an_idle_connection_is_not_seen(self, tmp_path: Path) -> None:
        """Instances that drop their idle connections cost no request."""
        async with proxy_world(tmp_path, PAIR) as world:
            for _ in range(10):
                assert (await world.chat(picture_request())).status == 200
                for stub in world.stubs.values():
                    await stub.drop_connections()

            assert len(world["pd0"].chats) == 10


async def in_flight_of(world: ProxyWorld, name: str) -> int:
    """Return the leases on one instance."""
    detail = (await world.ask("GET", "/instances?view=detail")).json
    return next(entry["in_flight"] for entry in detail["instances"] if entry["url"] == world[name].url)


async def test_a_stream_counts_as_in_flight_to_its_end(tmp_path: Path) -> None:
    """A lease lives as long as the response body, so a drain waits for it."""
    async with proxy_world(tmp_path, PAIR) as world:
        await world["pd0"].set_behaviour({"chat": {"chunks": 10, "gap_ms": 100}})
        stream = asyncio.create_task(world.chat(text_request(stream=True)))
        await wait_until(lambda: bool(world["pd0"].chats and world["pd0"].chats[0].sent), "the stream runs")

        assert await in_flight_of(world, "pd0") == 1
        assert await world.metric("epdctl_in_flight", stage="decode") == 1
        assert (await stream).events[-1] == "[DONE]"
        await world.wait_quiet()


class TestSlowClients:
    """Clients that do not read what they asked for."""

    LINE = "data: " + "x" * 500_000 + "\n\n"
    STREAM: ClassVar[dict[str, Any]] = {"sse": [LINE] * 80 + ["data: [DONE]\n\n"]}

    async def test_a_slow_client_slows_the_instance_and_loses_nothing(self, tmp_path: Path) -> None:
        """What the client does not take is not gathered: the instance waits, and then all of it arrives."""
        async with proxy_world(tmp_path, PAIR) as world:
            await world["pd0"].set_behaviour({"chat": self.STREAM})
            reader, writer = await world.open_raw(text_request(stream=True))
            writer.transport.pause_reading()
            await wait_until(lambda: bool(world["pd0"].chats), "decode is asked")
            call = world["pd0"].chats[0]
            before = -1
            while before != len(call.sent):
                before = len(call.sent)
                await asyncio.sleep(0.5)
            assert before < 30_000_000
            assert world.process is not None
            assert world.process.rss_bytes() < 150 * 1024 * 1024
            writer.transport.resume_reading()
            received = 0
            tail = b""
            while b"0\r\n\r\n" not in tail[-5:]:
                piece = await reader.read(1 << 20)
                assert piece
                received += len(piece)
                tail = (tail + piece)[-64:]
            assert received > len(call.sent) > 40_000_000
            assert b"[DONE]" in tail
            writer.close()

    async def test_a_client_that_reads_nothing_is_given_up(self, tmp_path: Path) -> None:
        """After the idle time the instance is let go, and the request is recorded as left."""
        async with proxy_world(tmp_path, PAIR, "--stage-timeouts", "idle=0.5") as world:
            await world["pd0"].set_behaviour({"chat": self.STREAM})
            _, writer = await world.open_raw(text_request(stream=True))
            writer.transport.pause_reading()
            await wait_until(lambda: bool(world["pd0"].chats), "decode is asked")
            call = world["pd0"].chats[0]
            await wait_until(lambda: call.client_left_at is not None, "decode is let go", 5.0)
            await world.wait_quiet()
            assert await world.metric("epdctl_requests_total", outcome="client_disconnect") == 1
            writer.close()
