"""The steps of cases for a bundled worker: faults of its tower, starts, signals, control messages, pushes.

Rules of this file: as in `steps`.
"""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

from tests.cases import product
from tests.cases.control_messages import ask, burst, race
from tests.cases.http_client import Request, Result
from tests.cases.loader import BadCase
from tests.cases.placeholders import Placeholders, merge
from tests.cases.stalls import wait_for_a_core
from tests.cases.steps import Step, Steps
from tests.cases.worker_pictures import gradient_pngs
from tests.cases.worker_world import WorkerWorld
from tests.faults.transfer_ends import digest
from tests.stubs.process import wait_until

SHORT_S = 1.0
PUSH_TRIES = 2


class WorkerSteps(Steps):
    """The run of one case's steps against a bundled worker."""

    def __init__(self, world: WorkerWorld) -> None:
        super().__init__(world)
        self.here = world
        self._made: list[str] = []
        self._operations |= {
            "worker_fault": self._worker_fault,
            "start_workers": self._start_workers,
            "signal": self._signal,
            "zmq": self._zmq,
            "zmq_race": self._zmq_race,
            "zmq_burst": self._zmq_burst,
            "push": self._push,
            "restart_receiver": self._restart_receiver,
            "signal_receiver": self._signal_receiver,
        }

    async def run(self) -> None:
        """Run all steps, then ask how many rows the pictures have that a rule is about."""
        await super().run()
        for words in self.here.case.expectations:
            if "rows" in str(words.get("if_200")):
                for result in self.here.records.results[words["step"]]:
                    if result.status == 200:
                        result.reply = {"rows": await self.here.rows_of(result)}

    async def _send(self, step: Step, request: Request, result: Result) -> None:
        """Send; a deadline below a second is about the worker, not about how busy the machine is."""
        assert self.here.process is not None
        pid, short = self.here.process.pid, step.get("deadline_s", SHORT_S)
        patience = {"deadline_s": short + 5.0} if short < SHORT_S else {}
        before = wait_for_a_core(pid)
        await super()._send({**step, **patience}, request, result)
        result.starved_s = wait_for_a_core(pid) - before
        if patience:
            stalled = self.here.stalls.within(result.started, result.ended) + result.starved_s
            if result.ended - result.started - stalled > short:
                result.status, result.failure = None, "timeout"

    async def _burst(self, step: Step, scope: Placeholders) -> None:
        generator = self.here.case.raw.get("generator")
        if generator is None:
            await super()._burst(step, scope)
            return
        if not self._made:
            self._made = await asyncio.to_thread(gradient_pngs, generator["images"])
        slots = asyncio.Semaphore(step["concurrency"])

        async def one(i: int) -> None:
            async with slots:
                await self._step(step["step"], scope.having(i=i, item=self._made[i % len(self._made)]))

        await asyncio.gather(*(one(i) for i in range(step["n"])))

    async def _worker_fault(self, step: Step, scope: Placeholders) -> None:
        worker = self.here.worker
        assert worker is not None
        worker.set_fault(product.tower_fault(step["set"]))

    async def _start_workers(self, step: Step, scope: Placeholders) -> None:
        args, count = step.get("args") or {}, step["n"]
        if "zmq_port" in args:
            group = await self.here.pool.consumers(count, args["zmq_port"])
        elif count > 1:
            group = await self.here.pool.crew()
            if len(group) != count:
                raise BadCase(f"the crew has {len(group)} workers, not {count}")
        else:
            group = [await self.here.pool.own()]
        self.here.records.groups.append(list(group))
        alive = [worker for worker in group if worker.healthy]
        if alive:
            self.here.take(alive[0])

    async def _signal(self, step: Step, scope: Placeholders) -> None:
        assert self.here.process is not None
        self.here.records.stop_signalled_at = time.monotonic()
        self.here.process.send_signal(_signal_number(step))

    async def _zmq(self, step: Step, scope: Placeholders) -> None:
        result = self._new_result(step, scope)
        body = product.control_message(scope.expand(step["send_json"]))
        if "merge" in step:
            body = merge(body, scope.expand(step["merge"]))
        result.started = time.monotonic()
        result.reply = [await ask(address, body) for address in self.here.control_addresses]
        result.ended = time.monotonic()

    async def _zmq_race(self, step: Step, scope: Placeholders) -> None:
        low, high = step["reply_delay_ms"]
        self.here.records.control["race"] = await race(
            step["rounds"], timeout_s=step["timeout_ms"] / 1000, delays_s=(low / 1000, high / 1000)
        )

    async def _zmq_burst(self, step: Step, scope: Placeholders) -> None:
        for address in self.here.control_addresses:
            self.here.records.control[f"burst to {address}"] = await burst(address, step["n"])

    async def _push(self, step: Step, scope: Placeholders) -> None:
        """Push one item; one that must arrive is given a second try, with a new transfer id."""
        result = self._new_result(step, scope)
        result.started = time.monotonic()
        tries = PUSH_TRIES if step.get("verify") else 1
        for attempt in range(tries):
            result.reply = await self._push_once(step, result, attempt)
            if result.reply["push"] == "ok":
                break
        result.ended = time.monotonic()

    async def _push_once(self, step: Step, result: Result, attempt: int) -> dict[str, Any]:
        source, target = self.here.sender, self.here.receiver
        assert source is not None and target is not None
        if result.step == "push" and result.index % 2:
            source, target = target, source
        name, nbytes = f"{result.step}-{result.index}-{attempt}", step["nbytes"]
        number = len(self.here.records.results["a"]) + len(self.here.records.results["b"])
        seed = 1 + 7 * result.index + number
        # Named pushes lie side by side, as items of their own; the others take turns in what is left.
        offset = (number - 1) * nbytes if step.get("id") else (result.index // 2 % 8) * nbytes
        if offset + nbytes > source.settings["nbytes"]:
            raise BadCase(f"{name}: no room for its source")
        answer = await source.push(target, name, nbytes, seed=seed, offset=offset, timeout_s=60)
        outcome = "ok" if answer.get("outcome") == "delivered" else "error"
        if outcome == "ok" and step.get("verify"):
            taken = await target.take(name, nbytes)
            outcome = "ok" if taken == {"id": taken["id"], **digest(nbytes, seed)} else "wrong bytes"
        sessions = [(await end.stats())["session"] for end in (source, target)] if outcome == "ok" else []
        return {"push": outcome, "answer": answer, "sessions": sessions}

    async def _restart_receiver(self, step: Step, scope: Placeholders) -> None:
        await self.here.restart_receiver(same_port=bool(step.get("same_port")))

    async def _signal_receiver(self, step: Step, scope: Placeholders) -> None:
        receiver = self.here.receiver
        assert receiver is not None
        if "after_ms" in step:
            await wait_until(self._is_writing, "a push is under way", 30.0)
            await asyncio.sleep(step["after_ms"] / 1000)
        receiver.process.send_signal(_signal_number(step))

    async def _is_writing(self) -> bool:
        assert self.here.receiver is not None
        return bool((await self.here.receiver.stats())["reservations"]["writing"])


def _signal_number(step: Step) -> int:
    return int(getattr(signal, f"SIG{step['signal']}"))
