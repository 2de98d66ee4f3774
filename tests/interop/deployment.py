"""A deployment under test: a proxy, its taps, its witnesses, and the plain vLLM's answers to the same
requests.

Rules of this file: `judge` is the whole verdict on one request; a test asserts that it finds nothing, and
the tests of deliberate faults assert that it finds them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.interop.answers import Answer, ask
from tests.interop.evidence import Evidence, consumer_problems, encoder_problems
from tests.interop.scenarios import Scenario
from tests.interop.tap import HttpTap
from tests.stubs.process import POLL_S

LOGPROB_TOLERANCE = 0.01
WITNESS_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What `judge` needs: where to send, who listens in, and what is right."""

    name: str
    url: str
    encoders: Sequence[HttpTap]
    consumers: Sequence[HttpTap]
    witnesses: Sequence[Evidence]
    scenarios: Mapping[str, Scenario]
    plain: Mapping[str, Answer]

    async def judge(self, name: str) -> list[str]:
        """Send scenario `name` and return all that is wrong with its answer and with the way it took."""
        scenario = self.scenarios[name]
        for tap in (*self.encoders, *self.consumers):
            tap.exchanges.clear()
        for witness in self.witnesses:
            await witness.mark()
        answer = await ask(self.url, scenario.body)
        problems = answer_problems(answer, self.plain[name])
        if not scenario.refused:
            problems += await self._path_problems(scenario)
        return problems

    async def _path_problems(self, scenario: Scenario) -> list[str]:
        encoded = [call for tap in self.encoders for call in tap.calls]
        consumed = [call for tap in self.consumers for call in tap.calls]
        problems = encoder_problems(encoded, scenario) + consumer_problems(consumed, scenario)
        for witness in self.witnesses:
            problems += await _lasting_problems(witness, scenario)
        return problems


async def _lasting_problems(witness: Evidence, scenario: Scenario) -> list[str]:
    """Return a witness's problems; what it counts may trail the answer by a moment."""
    deadline = asyncio.get_running_loop().time() + WITNESS_S
    while problems := await witness.problems(scenario):
        if asyncio.get_running_loop().time() > deadline:
            break
        await asyncio.sleep(POLL_S)
    return problems


def answer_problems(answer: Answer, plain: Answer) -> list[str]:
    """Return how `answer` differs from what one plain vLLM said."""
    if plain.status != 200:
        same = answer.status == plain.status
        return [] if same else [f"status {answer.status} instead of {plain.status}: {answer.error}"]
    if answer.greedy != plain.greedy:
        return [f"{answer.greedy} instead of {plain.greedy} {answer.error}"]
    worst = max((abs(a - b) for a, b in zip(answer.logprobs, plain.logprobs, strict=True)), default=0.0)
    return [] if worst < LOGPROB_TOLERANCE else [f"log-probabilities differ by {worst:.4f}"]
