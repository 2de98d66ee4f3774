"""What one choice of an answer has said so far: tokens in, text and log probabilities out.

Rules of this file: no JSON shapes here (see `answers.py`), no I/O. Each token that the engine chose is taken
once and in order; after a delta with `finish` the choice takes nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from epdctl.worker.language.detokenise import Detokeniser
from epdctl.worker.language.messages import Token
from epdctl.worker.language.stops import StopMatcher


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """How tokens become text: what a token is in bytes, whether it is a special one, what ends the text."""

    token_bytes: Callable[[int], bytes]
    is_special: Callable[[int], bool]
    stops: Sequence[str] = ()
    stop_token_ids: frozenset[int] = frozenset()
    keep_stop: bool = False
    keep_special: bool = False
    min_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What came new: `text`, the `tokens` taken since the last delta that had any, and how it ended."""

    text: str
    tokens: tuple[Token, ...] = ()
    finish: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Choice:
    """One choice: its rules, and everything it has taken."""

    rules: TextRules
    tokens: list[Token] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    stop_reason: str | int | None = None
    _detokeniser: Detokeniser = field(init=False)
    _matcher: StopMatcher = field(init=False)

    def __post_init__(self) -> None:
        self._detokeniser = Detokeniser(self._bytes)
        self._matcher = StopMatcher(self.rules.stops, keep=self.rules.keep_stop)

    def take(self, token: Token) -> Delta:
        """Take the next token and return what it adds."""
        self.tokens.append(token)
        text = "" if self._is_silent(token) else self._detokeniser.push(token.id)
        if token.finish is not None:
            text += self._detokeniser.flush()
        out = self._cut(text)
        if self.finish is None and token.finish is not None:
            out += self._matcher.flush()
            self.finish = token.finish
            if token.id in self.rules.stop_token_ids and token.finish == "stop":
                self.stop_reason = token.id
        self.text += out
        return Delta(text=out, tokens=(token,), finish=self.finish, stop_reason=self.stop_reason)

    def _cut(self, text: str) -> str:
        """Return what of `text` may go out; sets `finish` when a stop string ends it."""
        if len(self.tokens) <= self.rules.min_tokens:
            return self._matcher.flush() + text
        cut = self._matcher.push(text)
        if cut.stop is not None:
            self.finish, self.stop_reason = "stop", cut.stop
        return cut.text

    def _is_silent(self, token: Token) -> bool:
        """The token that ends a text is not part of it, unless the request wants it."""
        return token.finish == "stop" and not self.rules.keep_stop

    def _bytes(self, token_id: int) -> bytes:
        if self.rules.is_special(token_id) and not self.rules.keep_special:
            return b""
        return self.rules.token_bytes(token_id)
