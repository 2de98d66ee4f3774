"""Runs the steps of a case, in order, against a World.

Rules of this file: one method per step operation, found by its name; an operation that belongs to another
part of the product fails the case by name.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import re
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import epdctl
from tests.cases import product
from tests.cases.http_client import Request, Result, send, send_raw
from tests.cases.loader import BadCase
from tests.cases.placeholders import Placeholders, merge, merge_items
from tests.cases.vocabulary import word_set
from tests.cases.world import Memory, World
from tests.stubs.process import NotInTime

WORKER_OPS = word_set(
    "worker_fault engine_fault start_workers signal zmq zmq_burst zmq_race push restart_receiver "
    "signal_receiver drive_to_state_and_end"
)
EXIT_PATIENCE_S = 15.0
Step = Mapping[str, Any]


class Steps:
    """The run of one case's steps."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._background: list[tuple[str, asyncio.Task[None]]] = []
        self._operations: dict[str, Callable[[Step, Placeholders], Awaitable[None]]] = {
            "http": self._http,
            "raw": self._raw,
            "raw_body": self._raw_body,
            "many_parts": self._many_parts,
            "wait": self._wait,
            "join": self._join,
            "fault": self._fault,
            "repeat": self._repeat,
            "burst": self._burst,
            "loop": self._every,
            "every": self._every,
            "for_each": self._for_each,
            "proxy": self._proxy,
            "announce": self._announce,
            "source_scan": self._source_scan,
            "mark_memory": self._mark_memory,
        }

    @property
    def operations(self) -> frozenset[str]:
        """The operations that are implemented here."""
        return frozenset(self._operations)

    async def run(self) -> None:
        """Run all steps, then wait for the background ones that an expectation names."""
        for step in self.world.case.steps:
            await self._step(step, self.world.placeholders)
        named = {entry.get("step") for entry in self.world.case.expectations}
        named |= {name for e in self.world.case.expectations for name in e.get("exactly_one_of", ())}
        for step_id, task in self._background:
            if step_id in named:
                await task
        self.world.records.steps_ended = time.monotonic()

    async def close(self) -> None:
        """End what still runs in the background."""
        for _, task in self._background:
            task.cancel()
        await asyncio.gather(*(task for _, task in self._background), return_exceptions=True)

    async def _step(self, step: Step, scope: Placeholders) -> None:
        name = step["op"]
        if name not in self._operations:
            whose = "belongs to the encode worker's part" if name in WORKER_OPS else "is unknown"
            raise BadCase(f"{self.world.case.id}: op {name!r} {whose}")
        work = self._operations[name](step, scope)
        if step.get("background"):
            step_id = step.get("id") or (step.get("step") or {}).get("id") or ""
            self._background.append((step_id, asyncio.ensure_future(work)))
            await asyncio.sleep(0)
        else:
            await work

    async def _wait(self, step: Step, scope: Placeholders) -> None:
        # The format's own pause: what happens meanwhile is the point.
        await asyncio.sleep(step.get("seconds", step.get("ms", 0) / 1000))

    async def _join(self, step: Step, scope: Placeholders) -> None:
        for step_id, task in self._background:
            if step_id == step["id"]:
                await task

    async def _http(self, step: Step, scope: Placeholders) -> None:
        result = self._new_result(step, scope)
        # In a thread: megabytes of base64 must not hold up the stubs and the other steps.
        body = await asyncio.to_thread(self._body, step, scope)
        path, body = product.translate_call(step["method"], scope.string(step["path"]), body)
        headers = dict(scope.expand(step.get("headers") or {}))
        data = None if body is None else await asyncio.to_thread(product.json_bytes, body)
        if step.get("gzip_request") and data is not None:
            data = gzip.compress(data, mtime=0)
            headers["Content-Encoding"] = "gzip"
        result.request_json = body
        await self._send(step, Request(method=step["method"], path=path, headers=headers, body=data), result)

    async def _send(self, step: Step, request: Request, result: Result) -> None:
        aborts = result.index % step["abort_every"] == 0 if "abort_every" in step else True
        kinds = step.get("abort_kind", "fin")
        request = Request(
            method=request.method,
            path=request.path,
            headers=request.headers,
            body=request.body,
            deadline_s=step.get("deadline_s", 60.0),
            abort_after_s=step.get("abort_after_s") if aborts else None,
            abort_after_chunks=step.get("abort_after_chunks") if aborts else None,
            abort_kind=kinds if isinstance(kinds, str) else kinds[result.index % len(kinds)],
        )
        await send("127.0.0.1", self.world.port, request, result)

    def _body(self, step: Step, scope: Placeholders) -> Any:
        if "json" not in step:
            return None
        body = step["json"]
        if "item" in scope.values:
            body = merge_items(body, scope.values["item"])
        body = scope.expand(body)
        return merge(body, scope.expand(step["merge"])) if "merge" in step else body

    def _new_result(self, step: Step, scope: Placeholders) -> Result:
        step_id = step.get("id") or step["op"]
        listed = self.world.records.results[step_id]
        result = Result(step=step_id, index=len(listed), item=scope.values.get("item"))
        listed.append(result)
        return result

    async def _raw(self, step: Step, scope: Placeholders) -> None:
        result = self._new_result(step, scope)
        data = _bytes_of(step, scope)
        await send_raw("127.0.0.1", self.world.port, data, step.get("deadline_s", 10.0), result)

    async def _raw_body(self, step: Step, scope: Placeholders) -> None:
        headers = dict(scope.expand(step.get("headers") or {}))
        data = _bytes_of(step, scope)
        request = Request(method=step.get("method", "POST"), path=step["path"], headers=headers, body=data)
        await self._send(step, request, self._new_result(step, scope))

    async def _many_parts(self, step: Step, scope: Placeholders) -> None:
        url = self.world.pictures.data_url(step["image"])
        part = {"type": "image_url", "image_url": {"url": url}}
        content = [{"type": "text", "text": "What is shown?"}, *([part] * step["n"])]
        body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 8}
        request = Request(method="POST", path="/v1/chat/completions", body=product.json_bytes(body))
        await self._send(step, request, self._new_result(step, scope))

    async def _fault(self, step: Step, scope: Placeholders) -> None:
        names = step.get("instances") or [step["instance"]]
        for name in names:
            await self.world.set_fault(name, scope.expand(step["set"]))

    async def _repeat(self, step: Step, scope: Placeholders) -> None:
        for i in range(step["n"]):
            if i and "gap_s" in step:
                await asyncio.sleep(_gap(step["gap_s"], i, step["n"]))
            await self._step(step["step"], scope.having(i=i))

    async def _burst(self, step: Step, scope: Placeholders) -> None:
        slots = asyncio.Semaphore(step.get("concurrency", step["n"]))

        async def one(i: int) -> None:
            async with slots:
                await self._step(step["step"], scope.having(i=i))

        await asyncio.gather(*(one(i) for i in range(step["n"])))

    async def _every(self, step: Step, scope: Placeholders) -> None:
        """Start the inner step at fixed times, each when the one before has ended."""
        period = step["every_s"] if "every_s" in step else step["ms"] / 1000
        began = time.monotonic()
        i = 0
        while time.monotonic() - began < step["for_s"]:
            await self._step(step["step"], scope.having(i=i))
            i += 1
            await asyncio.sleep(max(0.0, began + i * period - time.monotonic()))

    async def _for_each(self, step: Step, scope: Placeholders) -> None:
        items = self.world.case.list_named(step["in"])
        inner = {**step["step"]}
        if "merge" in step:
            inner["merge"] = step["merge"]
        for i, raw in enumerate(items):
            item = scope.expand(raw)
            here = scope.having(item=item, i=i)
            chosen = inner
            if step.get("as") == "headers":
                chosen = {**inner, "headers": {**(inner.get("headers") or {}), **item}}
            if "apply_to" in step:
                self.world.records.variants.append(item)
                await self._apply(here.string(step["apply_to"]), item)
            await self._step(chosen, here)
            if "apply_to" in step:
                await self._reset_stubs()

    async def _apply(self, target: str, item: Any) -> None:
        """Give an item to a stub as its `chat` (or another) behaviour; `*` takes a mapping by stub name."""
        name, _, part = target.partition(".")
        changes = item if name == "*" else {name: item.get(part, item)}
        for stub, value in changes.items():
            await self.world.set_fault(stub, {part: value})

    async def _reset_stubs(self) -> None:
        for entry in self.world.case.instances:
            name = entry["name"]
            stub = self.world.stubs.get(name)
            initial = self.world.initial_behaviour(name)
            if stub is not None and initial is not None and stub.behaviour != initial:
                await stub.set_behaviour(initial)

    async def _proxy(self, step: Step, scope: Placeholders) -> None:
        doing, world = step["do"], self.world
        number = getattr(signal, f"SIG{step.get('signal', 'KILL')}")
        if doing == "start":
            await world.start_product()
        elif doing == "kill" and world.process is not None:
            await world.process.stop(number)
        elif doing == "signal" and world.process is not None:
            world.records.stop_signalled_at = time.monotonic()
            world.process.send_signal(number)
        elif doing == "start_expect_exit":
            await self._start_expect_exit(step, scope)
        else:
            raise BadCase(f"{world.case.id}: proxy do {doing!r}")

    async def _start_expect_exit(self, step: Step, scope: Placeholders) -> None:
        item = scope.values.get("item") or {}
        extra = [*scope.expand(step.get("args") or []), *(item.get("args") or [])]
        base = {"--host": "127.0.0.1", "--port": str(self.world.port), "--store": "memory"}
        arguments = ["--dynamic-registration"]
        for flag, value in base.items():
            if flag not in extra:
                arguments += [flag, value]
        began = time.monotonic()
        process = self.world.start_process(
            [*arguments, *extra], {**(step.get("env") or {}), **(item.get("env") or {})}
        )
        with contextlib.suppress(NotInTime):
            await process.wait_exit(EXIT_PATIENCE_S)
        self.world.records.exits.append((process, time.monotonic() - began))

    async def _announce(self, step: Step, scope: Placeholders) -> None:
        for name in step.get("instances") or [step["instance"]]:
            await self.world.register(name)

    async def _source_scan(self, step: Step, scope: Placeholders) -> None:
        texts = [path.read_text() for path in Path(epdctl.__file__).parent.rglob("*.py")]
        patterns = [re.compile(pattern) for pattern in step["patterns"]]
        self.world.records.scan_hits += sum(len(p.findall(text)) for p in patterns for text in texts)

    async def _mark_memory(self, step: Step, scope: Placeholders) -> None:
        assert self.world.process is not None
        self.world.records.memory[step["id"]] = Memory(self.world.process.rss_bytes())


def _bytes_of(step: Step, scope: Placeholders) -> bytes:
    if "send_b64" in step:
        return base64.b64decode(scope.string(step["send_b64"]))
    value = scope.text(step["send"])
    return value.encode() if isinstance(value, str) else product.json_bytes(value)


def _gap(gap: float | list[float], i: int, n: int) -> float:
    """Return a pause: fixed, or spread evenly over a range so that every run tries the same ones."""
    if not isinstance(gap, list):
        return gap
    low, high = gap
    return low + (high - low) * i / max(1, n - 1)
