"""How one request wants its tokens chosen; what front and engine process both know of it.

Rules of this file: plain msgspec structs with OpenAI's names and vLLM's meaning of them. They are checked
where a body is parsed (`request.py`); whoever builds one elsewhere keeps the ranges written here.
"""

from __future__ import annotations

import msgspec


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Token choice of one request.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 keep every token. Draws depend on `seed`, the choice's
    index and the token's position alone, never on what else is in the batch. `logprobs` is how many
    alternatives to report beside the chosen token, None for no report at all.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    n: int = 1
    logprobs: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


class AnswerRoom(msgspec.Struct, frozen=True, kw_only=True):
    """How long an answer may become whose request does not say: `default` tokens, None for all that fit.

    `kv_tokens` is what the whole KV memory holds. KV is reserved for the longest answer, so one that may fill
    the memory runs alone, and one that may overfill it would never run.
    """

    default: int | None
    kv_tokens: int

    def most(self, *, prompt: int, left: int, choices: int, minimum: int) -> int:
        """Return the most tokens of each of `choices` answers to `prompt` tokens; the context has `left`."""
        fits = max(1, min(left, self.kv_tokens // choices - prompt))
        return fits if self.default is None else min(fits, max(self.default, minimum))
