"""What a client gets: the greedy tokens of an answer, streamed or not.

Rules of this file: `parse_` functions are pure; a stream that is cut or carries an error raises BadStream.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import aiohttp

END_OF_TURN = "<|im_end|>"


class BadStream(AssertionError):
    """A stream that ended without [DONE], or carried an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer: `tokens` are the generated tokens without the end of the turn, as the engine names them."""

    status: int
    text: str = ""
    tokens: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    error: str = ""

    @property
    def greedy(self) -> tuple[Any, ...]:
        """What two engines with the same weights must agree on exactly."""
        return (self.status, self.text, self.tokens, self.finish_reason, self.prompt_tokens)


async def ask(url: str, body: dict[str, Any], timeout_s: float = 120.0) -> Answer:
    """Send `body` to the chat endpoint at `url` and return its answer, whatever its status is."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(f"{url}/v1/chat/completions", json=body) as answer,
    ):
        return parse_answer(answer.status, answer.content_type, await answer.text())


def parse_answer(status: int, content_type: str, text: str) -> Answer:
    """Return the answer in a response's body."""
    if status != 200:
        return Answer(status=status, error=text)
    if content_type == "text/event-stream":
        return _joined(status, _stream_events(text), delta="delta")
    return _joined(status, [json.loads(text)], delta="message")


def _stream_events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if not lines or lines[-1] != "[DONE]":
        raise BadStream(f"the stream ended without [DONE]: {text[-500:]!r}")
    events = [json.loads(line) for line in lines[:-1]]
    for event in events:
        if "error" in event:
            raise BadStream(f"the stream carried an error: {event['error']}")
    return events


def _joined(status: int, events: list[dict[str, Any]], *, delta: str) -> Answer:
    choices = [choice for event in events for choice in event["choices"]]
    generated = [entry for choice in choices for entry in (choice.get("logprobs") or {}).get("content") or ()]
    kept = [entry for entry in generated if entry["token"] != END_OF_TURN]
    usage: dict[str, Any] = next((event["usage"] for event in events if event.get("usage")), {})
    return Answer(
        status=status,
        text="".join(choice[delta].get("content") or "" for choice in choices),
        tokens=tuple(entry["token"] for entry in kept),
        logprobs=tuple(entry["logprob"] for entry in kept),
        finish_reason=next((c["finish_reason"] for c in choices if c.get("finish_reason")), None),
        prompt_tokens=usage.get("prompt_tokens"),
    )
