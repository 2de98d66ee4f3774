"""Logits to tokens: transformers' warpers, and draws that depend on the request alone.

Rules of this file: a token is a function of its row of logits, the request's sampling and seed, the choice
and the position. No generator lives from one token to the next, so a request gives the same tokens whatever
runs beside it, and goes on identically in another process.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import blake3
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from epdctl.worker.language.params import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A token; `logprob` and `top` (id, logprob; best first) only where the request asked for them."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def draw_seed(seed: int, choice: int, position: int) -> int:
    """Return the seed of one draw, in [0, 2^63)."""
    packed = struct.pack("<qqq", seed, choice, position)
    return int.from_bytes(blake3.blake3(packed).digest(8), "little") >> 1


class Sampler:
    """The token choice of one request; made once, used for all its tokens."""

    def __init__(self, sampling: Sampling, eos: Sequence[int]) -> None:
        self._sampling = sampling
        self._forbidden_at_first = sorted({*eos, *sampling.stop_token_ids})
        self._warpers = _warpers(sampling)

    @property
    def is_plain(self) -> bool:
        """Whether a token is just the row's maximum, with nothing to report."""
        sampling = self._sampling
        return sampling.temperature == 0 and sampling.logprobs is None and sampling.min_tokens == 0

    def choose(self, logits: Tensor, *, choice: int, position: int) -> Chosen:
        """Choose the token at `position` (0 is the first generated) of `choice` from `logits` `[vocab]`."""
        allowed = logits
        if position < self._sampling.min_tokens and self._forbidden_at_first:
            allowed = logits.clone()
            allowed[self._forbidden_at_first] = -torch.inf
        token = self._pick(allowed, choice, position)
        return self._report(logits, token)

    def _pick(self, logits: Tensor, choice: int, position: int) -> int:
        if self._sampling.temperature == 0:
            return int(logits.argmax())
        # The warpers want the ids so far, and none of the ones used here looks at them.
        scores = self._warpers(torch.zeros((1, 0), dtype=torch.long), logits.unsqueeze(0))
        # Drawn on the CPU: its generator gives the same numbers on every machine.
        weights = torch.softmax(scores[0].double().cpu(), dim=-1)
        generator = torch.Generator().manual_seed(draw_seed(self._sampling.seed, choice, position))
        return int(torch.multinomial(weights, 1, generator=generator))

    def _report(self, logits: Tensor, token: int) -> Chosen:
        """Add log probabilities of the model itself: before temperature and filters, as vLLM reports them."""
        count = self._sampling.logprobs
        if count is None:
            return Chosen(token=token)
        logprobs = torch.log_softmax(logits, dim=-1)
        best = torch.topk(logprobs, count)
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return Chosen(token=token, logprob=float(logprobs[token]), top=top)


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    warpers = LogitsProcessorList()
    if sampling.temperature not in (0, 1):
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers
