"""Which tokens the engine computes next: admission, chunked prefill, interleaved decoding, ends, cancels.

A step is one forward over a packed row of segments: one token of every running sequence, and what is left of
the token budget goes to prompts, oldest first. So a long prompt is prefilled over several steps, and every
running stream gets a token in each of them.

Rules of this file:
- Every change of a sequence happens in `Batch`. It never awaits, reads a clock, logs or sees a tensor.
- A request is admitted only when the KV of all it may ever need is allocated: nothing is evicted later.
- Admission is first come, first served: a large request waits at the head, nobody passes it.
- A sequence leaves once (end, cancel or failure), and its KV is handed back in that moment, unless its order
  says `hold`: then the caller that gets the region owns it.
- `plan` and `commit` alternate. Cancels come between a commit and the next plan; a caller that computes
  elsewhere keeps them until then.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from epdctl.errors import InvalidRequest, Overloaded

Region = TypeVar("Region")

FINISH_STOP = "stop"
FINISH_LENGTH = "length"


class KvSpace(Protocol[Region]):
    """Where KV memory comes from."""

    def allocate(self, tokens: int) -> Region | None:
        """Return room for `tokens` tokens, or None while there is none."""
        ...

    def free(self, region: Region) -> None:
        """Take the room back; nobody reads or writes it any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`step_tokens` per forward, `sequences` running at once, `waiting` requests behind them."""

    step_tokens: int
    sequences: int
    waiting: int

    def __post_init__(self) -> None:
        if self.step_tokens <= self.sequences:
            raise ValueError("a step must hold one token of every running sequence and one of a prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a request needs of the batch.

    `stops` are the tokens that end it, from `min_tokens` generated ones on. With `imported` its KV comes from
    elsewhere and it computes nothing before `Batch.imported`. With `hold` its KV outlives it.
    """

    request_id: str
    prompt_tokens: int
    max_tokens: int
    min_tokens: int = 0
    choices: int = 1
    stops: frozenset[int] = frozenset()
    imported: bool = False
    hold: bool = False

    @property
    def capacity(self) -> int:
        """Tokens of KV that one of its sequences may come to hold."""
        return self.prompt_tokens + self.max_tokens


@dataclass(frozen=True, slots=True)
class Key:
    """One sequence: a request's choice."""

    request_id: str
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens `[start, start + count)` of a sequence in this step.

    `samples` are the sequences that take a token from its last row: none within a prompt, all choices at a
    prompt's end, itself while decoding. Those other than `key` start with a copy of its KV.
    """

    key: Key
    start: int
    count: int
    samples: tuple[Key, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Generic[Region]):
    """One step; `imports` were admitted just now and wait for KV that is to be written to their regions."""

    segments: tuple[Segment, ...]
    imports: Mapping[Key, Region]
    regions: Mapping[Key, Region]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled(Generic[Region]):
    """A sequence got `token`; with `finish` it has left, and `held` is its region if the order said so."""

    key: Key
    token: int
    position: int
    finish: str | None
    held: Region | None = None


@dataclass(slots=True)
class _Sequence(Generic[Region]):
    region: Region
    computed: int = 0
    generated: int = 0


@dataclass(slots=True)
class _Request(Generic[Region]):
    order: Order
    sequences: dict[int, _Sequence[Region]] = field(default_factory=dict)
    importing: bool = False

    @property
    def lead(self) -> int:
        """The choice that computes the prompt for all of them."""
        return next(iter(self.sequences))

    @property
    def prefilling(self) -> bool:
        """Whether the prompt is not done yet; all choices get their first token in the step that ends it."""
        return self.sequences[self.lead].generated == 0


class Batch(Generic[Region]):
    """All requests of an engine, running and waiting."""

    def __init__(self, limits: Limits, kv: KvSpace[Region], *, kv_tokens: int) -> None:
        self._limits = limits
        self._kv = kv
        self._kv_tokens = kv_tokens
        self._waiting: deque[Order] = deque()
        self._running: OrderedDict[str, _Request[Region]] = OrderedDict()

    @property
    def waiting(self) -> int:
        """Requests that are not admitted yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences that hold KV."""
        return sum(len(request.sequences) for request in self._running.values())

    def submit(self, order: Order) -> None:
        """Queue a request.

        Raises:
            InvalidRequest: it could not run even if it were alone.
            Overloaded: too many are waiting.
        """
        if order.choices > self._limits.sequences:
            text = f"n must be at most {self._limits.sequences} here (--max-batch-items)"
            raise InvalidRequest(text, param="n")
        needed = order.capacity * order.choices
        if needed > self._kv_tokens:
            raise InvalidRequest(
                f"the request may need {needed} tokens of KV (prompt and max_tokens, n times) and this worker"
                f" has {self._kv_tokens}: lower max_tokens or n, or raise --kv-bytes",
                param="max_tokens",
            )
        if len(self._waiting) >= self._limits.waiting:
            raise Overloaded("too many requests are waiting for this worker (--queue-size)", retry_after_s=1)
        self._waiting.append(order)

    def imported(self, request_id: str) -> None:
        """Note that the KV of the whole prompt is there; its last token is computed again for its logits."""
        request = self._running.get(request_id)
        if request is not None and request.importing:
            request.importing = False
            request.sequences[request.lead].computed = request.order.prompt_tokens - 1

    def cancel(self, request_id: str, index: int | None = None) -> bool:
        """Drop a request, or one choice of it; False when it is not there (any more)."""
        for order in self._waiting:
            if order.request_id == request_id and index is None:
                self._waiting.remove(order)
                return True
        request = self._running.get(request_id)
        if request is None:
            return False
        gone = [i for i in request.sequences if index is None or i == index]
        for i in gone:
            self._kv.free(request.sequences.pop(i).region)
        self._forget_if_empty(request)
        return bool(gone)

    def detach(self, request_id: str) -> None:
        """Drop a request whose import did not succeed; the region that was written to is not freed here."""
        request = self._running.pop(request_id, None)
        if request is None:
            return
        lead = request.lead
        for index, sequence in request.sequences.items():
            if index != lead:
                self._kv.free(sequence.region)

    def region(self, key: Key) -> Region:
        """Return the KV of a running sequence."""
        return self._running[key.request_id].sequences[key.index].region

    def plan(self) -> Plan[Region] | None:
        """Admit what fits and return the next step; None when there is nothing to compute or to import."""
        imports = self._admit()
        segments = [segment for request in self._running.values() for segment in _decoding(request)]
        budget = self._limits.step_tokens - len(segments)
        for request in self._running.values():
            if budget > 0 and request.prefilling and not request.importing:
                segment = _chunk(request, budget)
                segments.append(segment)
                budget -= segment.count
        if not segments and not imports:
            return None
        keys = {key for segment in segments for key in (segment.key, *segment.samples)}
        regions = {key: self.region(key) for key in keys}
        return Plan(segments=tuple(segments), imports=imports, regions=regions)

    def commit(self, plan: Plan[Region], tokens: Mapping[Key, int]) -> list[Sampled[Region]]:
        """Take the tokens that the step of `plan` chose, and return what became of their sequences."""
        events: list[Sampled[Region]] = []
        for segment in plan.segments:
            request = self._running[segment.key.request_id]
            request.sequences[segment.key.index].computed = segment.start + segment.count
            events.extend(self._take(request, key, tokens[key]) for key in segment.samples)
            self._forget_if_empty(request)
        return events

    def _take(self, request: _Request[Region], key: Key, token: int) -> Sampled[Region]:
        sequence = request.sequences[key.index]
        sequence.computed = max(sequence.computed, request.order.prompt_tokens)
        position = sequence.generated
        sequence.generated += 1
        finish = _finish(request.order, token, sequence.generated)
        held = None
        if finish is not None:
            del request.sequences[key.index]
            held = sequence.region if request.order.hold else None
            if not request.order.hold:
                self._kv.free(sequence.region)
        return Sampled(key=key, token=token, position=position, finish=finish, held=held)

    def _forget_if_empty(self, request: _Request[Region]) -> None:
        if not request.sequences:
            del self._running[request.order.request_id]

    def _admit(self) -> Mapping[Key, Region]:
        imports: dict[Key, Region] = {}
        while self._waiting and self.running + self._waiting[0].choices <= self._limits.sequences:
            request = self._allocate(self._waiting[0])
            if request is None:
                break
            order = self._waiting.popleft()
            self._running[order.request_id] = request
            if order.imported:
                imports[Key(order.request_id, request.lead)] = request.sequences[request.lead].region
        return imports

    def _allocate(self, order: Order) -> _Request[Region] | None:
        request: _Request[Region] = _Request(order=order, importing=order.imported)
        for index in range(order.choices):
            region = self._kv.allocate(order.capacity)
            if region is None:
                for sequence in request.sequences.values():
                    self._kv.free(sequence.region)
                return None
            request.sequences[index] = _Sequence(region=region)
        return request


def _decoding(request: _Request[Region]) -> list[Segment]:
    keys = [Key(request.order.request_id, i) for i, s in request.sequences.items() if s.generated > 0]
    return [
        Segment(key=key, start=request.sequences[key.index].computed, count=1, samples=(key,)) for key in keys
    ]


def _chunk(request: _Request[Region], budget: int) -> Segment:
    order, done = request.order, request.sequences[request.lead].computed
    count = min(budget, order.prompt_tokens - done)
    ends = done + count == order.prompt_tokens
    samples = tuple(Key(order.request_id, i) for i in request.sequences) if ends else ()
    return Segment(key=Key(order.request_id, request.lead), start=done, count=count, samples=samples)


def _finish(order: Order, token: int, generated: int) -> str | None:
    if token in order.stops and generated > order.min_tokens:
        return FINISH_STOP
    return FINISH_LENGTH if generated >= order.max_tokens else None
