"""The front of a language worker: from a parsed request to a generation, with all checks before the engine.

Rules of this file: order of steps. The tokenizer runs on one thread, never on the event loop. What can be
refused is refused here, with the field's name, before anything reaches the engine.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import Gauge

from epdctl.domain import Role
from epdctl.errors import EngineUnavailable, InvalidRequest, UnknownModel
from epdctl.worker.language.checkpoint import Checkpoint, UnsupportedCheckpoint, open_checkpoint
from epdctl.worker.language.choice import TextRules
from epdctl.worker.language.content import MediaRules
from epdctl.worker.language.generation import Generation
from epdctl.worker.language.handover import KvPlan, one_token, plan_kv
from epdctl.worker.language.messages import Generate, PromptImage
from epdctl.worker.language.params import AnswerRoom, Sampling
from epdctl.worker.language.placement import place_images
from epdctl.worker.language.prompt import Tokenizer
from epdctl.worker.language.replicas import choose_replica, parse_rank
from epdctl.worker.language.request import (
    ChatRequest,
    CompletionRequest,
    TokenRules,
    parse_chat,
    parse_completion,
)
from epdctl.worker.language.spec import ModelSpec
from epdctl.worker.supervisor import EngineState, Supervisor

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What the front has read of the checkpoint; `max_model_len` in tokens, prompt and answer together."""

    spec: ModelSpec
    tokenizer: Tokenizer
    max_model_len: int


class LanguageFront:
    """Serves generation requests with one engine per replica."""

    def __init__(
        self,
        model: str,
        name: str,
        role: Role,
        engines: Sequence[Supervisor],
        *,
        max_model_len: int | None,
        default_max_tokens: int | None,
        kv_bytes: int,
        in_flight: Gauge,
    ) -> None:
        self._model = model
        self._name = name
        self._role = role
        self._engines = engines
        self._max_model_len = max_model_len
        self._default_max_tokens = default_max_tokens
        self._kv_bytes = kv_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._loaded: Loaded | None = None
        self._in_flight = in_flight
        self._open = [0] * len(engines)
        self._turn = 0

    async def start(self, dtype: str) -> Loaded:
        """Load configuration and tokenizer on the thread; raises UnsupportedCheckpoint."""
        self._loaded = await self._on_thread(self._load, dtype)
        return self._loaded

    def _load(self, dtype: str) -> Loaded:
        checkpoint: Checkpoint = open_checkpoint(self._model, dtype)
        limit = checkpoint.spec.max_positions
        if self._max_model_len is not None and self._max_model_len > limit:
            raise UnsupportedCheckpoint(f"--max-model-len {self._max_model_len} is above the model's {limit}")
        return Loaded(
            spec=checkpoint.spec,
            tokenizer=Tokenizer(checkpoint),
            max_model_len=self._max_model_len or limit,
        )

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def trouble(self) -> str | None:
        """Return why the front cannot serve, or None."""
        return None if self._loaded is not None else "the tokenizer is loading"

    def loads(self) -> Sequence[int]:
        """Return how many requests each replica has now."""
        return tuple(self._open)

    @property
    def loaded(self) -> Loaded:
        """What was loaded; raises EngineUnavailable before that."""
        if self._loaded is None:
            raise EngineUnavailable("the tokenizer is loading", retry_after_s=1)
        return self._loaded

    async def chat(self, body: Mapping[str, Any], rank: str | None) -> tuple[ChatRequest, Generation]:
        """Return a chat request and its generation, ready to be entered."""
        loaded = self.loaded
        request = parse_chat(body, _rules(loaded.spec))
        self._check_model(request.model)
        ids = await self._on_thread(self._chat_ids, request)
        expanded, images = place_images(
            ids,
            request.images,
            request.ec_items,
            spec=loaded.spec,
        )
        plan = plan_kv(self._role, request.kv_transfer_params, expanded, has_images=bool(images))
        tokens = request.tokens if not plan.hold else one_token(request.tokens)
        generate = self._body(expanded, images, tokens, "messages", plan)
        return request, self._generation([generate], tokens, rank)

    async def completion(
        self, body: Mapping[str, Any], rank: str | None
    ) -> tuple[CompletionRequest, Generation]:
        """Return a completion request and its generation, ready to be entered."""
        request = parse_completion(body)
        self._check_model(request.model)
        bodies = []
        if request.kv_transfer_params is not None and len(request.prompts) > 1:
            raise InvalidRequest(
                "kv_transfer_params belong to one prompt, and this request has several", param="prompt"
            )
        tokens = request.tokens
        for prompt in request.prompts:
            ids = await self._on_thread(self._text_ids, prompt)
            if {self.loaded.spec.image_token_id, self.loaded.spec.video_token_id} & set(ids):
                raise InvalidRequest("a prompt must not contain the model's placeholders", param="prompt")
            plan = plan_kv(self._role, request.kv_transfer_params, ids, has_images=False)
            tokens = request.tokens if not plan.hold else one_token(request.tokens)
            bodies.append(self._body(ids, (), tokens, "prompt", plan))
        return request, self._generation(bodies, tokens, rank)

    def _chat_ids(self, request: ChatRequest) -> list[int]:
        return self.loaded.tokenizer.chat(
            request.messages,
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            template_kwargs=request.template_kwargs,
            most=self.loaded.max_model_len,
        )

    def _text_ids(self, prompt: str | tuple[int, ...]) -> list[int]:
        if isinstance(prompt, str):
            return self.loaded.tokenizer.text(prompt, self.loaded.max_model_len, "prompt")
        if max(prompt) >= self.loaded.spec.vocab_size:
            raise InvalidRequest(f"token ids must be below {self.loaded.spec.vocab_size}", param="prompt")
        return list(prompt)

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self._name:
            raise UnknownModel(f"this worker serves {self._name}, not the model asked for", param="model")

    def _body(
        self, ids: list[int], images: tuple[PromptImage, ...], tokens: TokenRules, param: str, plan: KvPlan
    ) -> Generate:
        limit, length = self.loaded.max_model_len, len(ids)
        if not ids:
            raise InvalidRequest(f"{param} is empty: at least one token is needed", param=param)
        if length >= limit:
            raise InvalidRequest(
                f"the prompt has {length} tokens, which leaves no room for an answer: this model takes"
                f" {limit} tokens, prompt and answer together (--max-model-len)",
                param=param,
            )
        if tokens.max_tokens is not None and length + tokens.max_tokens > limit:
            raise InvalidRequest(
                f"prompt ({length} tokens) and max_tokens ({tokens.max_tokens}) together are more than this"
                f" model's {limit} tokens (--max-model-len)",
                param="max_tokens",
            )
        sampling = self._sampling(tokens, length, limit - length)
        return Generate(
            token_ids=ids, sampling=sampling, images=images, hold_kv=plan.hold, ticket=plan.ticket
        )

    def _most_tokens(self, tokens: TokenRules, prompt: int, left: int) -> int:
        if tokens.max_tokens is not None:
            return tokens.max_tokens
        kv_tokens = self._kv_bytes // self.loaded.spec.kv_bytes_per_token
        room = AnswerRoom(default=self._default_max_tokens, kv_tokens=kv_tokens)
        return room.most(prompt=prompt, left=left, choices=tokens.n, minimum=tokens.min_tokens)

    def _sampling(self, tokens: TokenRules, prompt: int, left: int) -> Sampling:
        if any(token >= self.loaded.spec.vocab_size for token in tokens.stop_token_ids):
            raise InvalidRequest(
                f"stop_token_ids must be below {self.loaded.spec.vocab_size}", param="stop_token_ids"
            )
        return Sampling(
            max_tokens=self._most_tokens(tokens, prompt, left),
            min_tokens=min(tokens.min_tokens, left),
            temperature=tokens.temperature,
            top_p=tokens.top_p,
            top_k=min(tokens.top_k, self.loaded.spec.vocab_size),
            min_p=tokens.min_p,
            seed=tokens.seed if tokens.seed is not None else secrets.randbits(62),
            n=tokens.n,
            logprobs=tokens.logprobs,
            ignore_eos=tokens.ignore_eos,
            stop_token_ids=tokens.stop_token_ids,
        )

    def _generation(self, bodies: Sequence[Generate], tokens: TokenRules, rank: str | None) -> Generation:
        tokenizer = self.loaded.tokenizer
        rules = TextRules(
            token_bytes=tokenizer.token_bytes,
            is_special=tokenizer.is_special,
            stops=tokens.stops,
            stop_token_ids=frozenset(tokens.stop_token_ids),
            keep_stop=tokens.keep_stop,
            keep_special=tokens.keep_special,
            min_tokens=tokens.min_tokens,
        )
        replica = self._replica(rank)

        def count(change: int) -> None:
            self._open[replica] += change
            self._in_flight.inc(change)

        return Generation(self._engines[replica], bodies, rules, count=count)

    def _replica(self, rank: str | None) -> int:
        named = parse_rank(rank, len(self._engines))
        if named is not None:
            return named
        ready = [engine.status().state is EngineState.READY for engine in self._engines]
        chosen = choose_replica(ready, self._open, self._turn)
        self._turn = chosen + 1
        return chosen

    async def _on_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


def _rules(spec: ModelSpec) -> MediaRules:
    return MediaRules(merge=spec.merge, videos=spec.video_token_id is not None)
