"""Tokens to text, one at a time.

A token of a byte-level vocabulary is a few bytes, and a character may be spread over several tokens. Text
comes out as soon as its bytes are whole, so the pieces joined equal the text of all tokens at once.

Rules of this file: no tokenizer here, only a function from a token id to its bytes.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable

_BYTE_LEVEL_PRINTABLE = (range(0x21, 0x7F), range(0xA1, 0xAD), range(0xAE, 0x100))


def byte_level_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for (GPT-2's table)."""
    plain = [byte for run in _BYTE_LEVEL_PRINTABLE for byte in run]
    others = [byte for byte in range(256) if byte not in set(plain)]
    alphabet = {chr(byte): byte for byte in plain}
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


class Detokeniser:
    """Text of one sequence of tokens, as it grows."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Return the text that `token` completes, which may be none."""
        return self._decoder.decode(self._token_bytes(token))

    def flush(self) -> str:
        """Return what is left when no token follows: a replacement character for half a character."""
        return self._decoder.decode(b"", final=True)
