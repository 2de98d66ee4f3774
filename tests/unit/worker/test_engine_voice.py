"""What an engine tells its front beside the answers: its health and its counts, in time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from epdctl.metrics import WorkerMetrics
from epdctl.worker import engine
from epdctl.worker.channel import Message, message
from epdctl.worker.duties import Duties
from epdctl.worker.engine import Beat, _Voice

pytestmark = pytest.mark.unit


class Ear:
    """Implements what a voice needs of a channel: hears what is sent."""

    def __init__(self) -> None:
        self.heard: list[Message] = []

    async def send(self, outgoing: Message) -> None:
        """Hear it."""
        self.heard.append(outgoing)

    @property
    def kinds(self) -> list[str]:
        """What was heard, in order."""
        return [one.kind for one in self.heard]

    def counted(self) -> list[float]:
        """Return the steps in each beat."""
        beats = [one.parse(Beat) for one in self.heard if one.kind == "beat"]
        return [
            sample.value
            for beat in beats
            for family in beat.families
            for sample in family.samples
            if sample.name == "epdctl_steps_total"
        ]


def speaking() -> tuple[Ear, _Voice, WorkerMetrics]:
    """Return a voice with its ear and its numbers."""
    ear, metrics = Ear(), WorkerMetrics()
    channel: Any = ear
    return ear, _Voice(channel, metrics, Duties()), metrics


async def test_counts_come_before_the_answer() -> None:
    """A lone answer is preceded by the counts of its work."""
    ear, voice, metrics = speaking()

    metrics.steps.inc()
    await voice.send(message("done"))

    assert (ear.kinds, ear.counted()) == (["beat", "done"], [1.0])


async def test_many_answers_share_a_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers in quick succession cost one beat before the first, and one soon after the others."""
    monkeypatch.setattr(engine, "NEWS_INTERVAL_S", 0.5)
    monkeypatch.setattr(engine, "BEAT_INTERVAL_S", 3600.0)
    ear, voice, metrics = speaking()

    for _ in range(5):
        metrics.steps.inc()
        await voice.send(message("done"))
    async with asyncio.timeout(20):
        await voice.rest()
    await voice.beat()

    assert (ear.kinds, ear.counted()) == (["beat", *["done"] * 5, "beat"], [1.0, 5.0])


async def test_without_news_the_next_beat_has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """When nothing was sent since the last beat, the next one is not due before its second is over."""
    monkeypatch.setattr(engine, "BEAT_INTERVAL_S", 3600.0)
    _, voice, _ = speaking()

    await voice.send(message("done"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await voice.rest()
