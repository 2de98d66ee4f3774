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
