"""The tokenizer: chat templates in, token ids out, and what a token is in bytes.

Rules of this file: the front's only contact with transformers. Calls are made from one thread at a time, the
tokenizer is not safe for several. Its errors become ours at the call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from epdctl.errors import InvalidRequest
from epdctl.worker.language.checkpoint import Checkpoint, UnsupportedCheckpoint
from epdctl.worker.language.detokenise import byte_level_alphabet


class Tokenizer:
    """A byte-level tokenizer with its chat template."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Load it; raises UnsupportedCheckpoint when it is absent or of another kind."""
        from transformers import AutoTokenizer

        name = checkpoint.folder.name
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder)
        except (OSError, ValueError, KeyError) as error:
            raise UnsupportedCheckpoint(f"{name}: its tokenizer cannot be loaded") from error
        if not getattr(self._tokenizer, "is_fast", False):
            raise UnsupportedCheckpoint(f"{name}: only fast tokenizers (tokenizer.json) are served")
        self._special = frozenset(self._tokenizer.all_special_ids) | _special_added(self._tokenizer)
        self._bytes = _token_bytes(self._tokenizer)
        self._longest = max(map(len, self._bytes.values()))

    @property
    def has_chat_template(self) -> bool:
        """Whether chat requests can be served."""
        return self._tokenizer.chat_template is not None

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; none for an id that the vocabulary leaves out."""
        return self._bytes.get(token_id, b"")

    def is_special(self, token_id: int) -> bool:
        """Whether the token steers the model and is no text."""
        return token_id in self._special

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: Mapping[str, Any],
        most: int,
    ) -> list[int]:
        """Return the ids of a conversation of at most `most` tokens.

        Raises:
            InvalidRequest: the template does not take these messages, there is no template, or the text is
                certainly too long.
        """
        if not self.has_chat_template:
            raise InvalidRequest("this model has no chat template: use /v1/completions")
        extra = {name: value for name, value in template_kwargs.items() if name not in _OWN_ARGUMENTS}
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **extra,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise InvalidRequest(
                "the model's chat template does not take these messages", param="messages"
            ) from error
        return self.text(text, most, "messages")

    def text(self, text: str, most: int, param: str) -> list[int]:
        """Return the ids of a plain text; special tokens in it count as such.

        A text that cannot have as few as `most` tokens is refused unread: the thread belongs to everybody.
        """
        if len(text) > most * self._longest:
            raise InvalidRequest(
                f"{param}: the text has {len(text)} characters, more than this model's {most} tokens can hold"
                " (--max-model-len)",
                param=param,
            )
        return list(self._tokenizer.encode(text, add_special_tokens=False))


_OWN_ARGUMENTS = frozenset(
    {"conversation", "tools", "tokenize", "add_generation_prompt", "continue_final_message", "chat_template"}
)


def _special_added(tokenizer: Any) -> frozenset[int]:
    return frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)


def _token_bytes(tokenizer: Any) -> dict[int, bytes]:
    """Return every token's bytes; raises UnsupportedCheckpoint unless the vocabulary is byte-level."""
    added = {i: token.content.encode() for i, token in tokenizer.added_tokens_decoder.items()}
    alphabet = byte_level_alphabet()
    try:
        plain = {
            i: bytes(alphabet[character] for character in text)
            for text, i in tokenizer.get_vocab().items()
            if i not in added
        }
    except KeyError as error:
        raise UnsupportedCheckpoint("its tokenizer is not byte-level") from error
    return plain | added
