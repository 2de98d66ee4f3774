"""Requests under way in the front: one engine call a prompt, its tokens turned into deltas.

Rules of this file: leaving the context ends every call of the request, whatever the reason: the engine is
told, unless it has told us that all choices are over. Tokens of a choice whose text has ended are dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from epdctl.worker.language.choice import Choice, Delta, TextRules
from epdctl.worker.language.kv_messages import KvTicket
from epdctl.worker.language.messages import Drop, Generate, Tokens
from epdctl.worker.supervisor import EngineCall, Supervisor


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one choice gained: `choice` counts through all prompts of the request."""

    choice: int
    delta: Delta


class PromptRun:
    """One prompt at the engine; its choices are numbered from `first_choice` in the answer."""

    def __init__(self, call: EngineCall, body: Generate, rules: TextRules, first_choice: int) -> None:
        self._call = call
        self._body = body
        self._first_choice = first_choice
        self.choices = tuple(Choice(rules) for _ in range(body.sampling.n))
        self.ticket: KvTicket | None = None
        self._at_engine = set(range(body.sampling.n))

    @property
    def token_ids(self) -> Sequence[int]:
        """The prompt."""
        return self._body.token_ids

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish is not None for choice in self.choices)

    async def begin(self) -> None:
        """Send the prompt; raises EngineUnavailable."""
        await self._call.send("generate", self._body)

    async def next(self) -> list[Piece]:
        """Wait for the engine's next tokens; raises what the engine reports."""
        tokens = (await self._call.receive()).parse(Tokens)
        self.ticket = tokens.ticket or self.ticket
        pieces = []
        for token in tokens.tokens:
            choice = self.choices[token.choice]
            if choice.finish is None:
                delta = choice.take(token)
                pieces.append(Piece(choice=self._first_choice + token.choice, delta=delta))
                if delta.finish is not None and token.finish is None:
                    await self._drop(token.choice)
            if token.finish is not None:
                self._at_engine.discard(token.choice)
        if not self._at_engine:
            self._call.end()
        return pieces

    async def _drop(self, choice: int) -> None:
        """Tell the engine that a choice's text has met a stop string; the last one ends with the call."""
        if not self.finished:
            await self._call.send("drop", Drop(choice))
            self._at_engine.discard(choice)


class Generation:
    """All prompts of a request; use as an async context manager."""

    def __init__(
        self,
        engine: Supervisor,
        bodies: Sequence[Generate],
        rules: TextRules,
        *,
        count: Callable[[int], None],
    ) -> None:
        """`count` is told +1 when the generation begins and -1 when it ends."""
        self._engine = engine
        self._count = count
        self._bodies = bodies
        self.rules = rules
        self._stack = AsyncExitStack()
        self._pumps: list[asyncio.Task[None]] = []
        self.runs: list[PromptRun] = []

    async def __aenter__(self) -> Generation:
        self._count(1)
        try:
            for body in self._bodies:
                call = await self._stack.enter_async_context(self._engine.call())
                run = PromptRun(call, body, self.rules, sum(len(r.choices) for r in self.runs))
                await run.begin()
                self.runs.append(run)
        except BaseException:
            await self._leave()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        await self._leave()

    async def _leave(self) -> None:
        self._count(-1)
        await self._stack.aclose()

    @property
    def choices(self) -> list[Choice]:
        """All choices, in the order of the answer."""
        return [choice for run in self.runs for choice in run.choices]

    @property
    def ticket(self) -> KvTicket | None:
        """The ticket of the prompt's KV, if the engine keeps it."""
        return self.runs[0].ticket

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(run.token_ids) for run in self.runs)

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(len(choice.tokens) for choice in self.choices)

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """Yield what the engine sends until every choice has ended; raises the first failure."""
        if len(self.runs) == 1:
            while not self.runs[0].finished:
                yield await self.runs[0].next()
            return
        queue: asyncio.Queue[list[Piece] | None] = asyncio.Queue(1)
        self._pumps = [asyncio.create_task(_pump(run, queue)) for run in self.runs]
        left = len(self._pumps)
        while left:
            pieces = await queue.get()
            if pieces is None:
                left -= 1
                for pump in self._pumps:
                    if pump.done():
                        pump.result()
            else:
                yield pieces


async def _pump(run: PromptRun, queue: asyncio.Queue[list[Piece] | None]) -> None:
    try:
        while not run.finished:
            await queue.put(await run.next())
    finally:
        # The reader looks at the task's outcome when it gets this; a cancelled pump has no reader left.
        task: asyncio.Task[Any] | None = asyncio.current_task()
        if task is not None and not task.cancelling():
            await queue.put(None)
