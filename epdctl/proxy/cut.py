"""Cuts long data URLs out of a request body before JSON is parsed, and puts them back into what is sent on.

Rules of this file:
- Pure. The body is one immutable buffer; media are slices of it and are never decoded, copied or re-encoded.
- A placeholder is a random token of this process (handed in) and a number. A body in which the token turns
  up by itself is not cut at all, so a client cannot forge one.
- Everything is built in "skeleton space" (small JSON with placeholders) and restored once, at the end: it
  does not matter where a placeholder has travelled to, the text it stands for comes back there.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

Piece = bytes | memoryview
Body = tuple[Piece, ...]
"""A body to send: pieces in order, some of them slices of the client's body."""

CUT_FROM_BYTES = 1024
"""Shorter data URLs stay: parsing them costs less than a placeholder."""

_NUMBER_DIGITS = 6
_MAX_SPANS = 10**_NUMBER_DIGITS
_OPENING = b'"data:'
_BRACKETS = b"[]{}"
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'"' + _BRACKETS))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """A body and its skeleton: the same JSON with a placeholder instead of each long data URL.

    `spans` are offsets in `source` of the text between the quotes. Without spans the skeleton is the body.
    """

    source: memoryview
    skeleton: bytes | bytearray
    spans: tuple[tuple[int, int], ...] = ()
    token: bytes = b""

    def restore(self, text: bytes) -> Body:
        """Return `text` (JSON in skeleton space) with the cut strings put back where placeholders are."""
        if not self.spans or text.find(self.token) < 0:
            return (text,)
        return tuple(self._pieces(text))

    def _pieces(self, text: bytes) -> Iterator[Piece]:
        view, at, size = memoryview(text), 0, len(self.token)
        found = text.find(self.token)
        while found >= 0:
            end = found + size + _NUMBER_DIGITS
            yield view[at:found]
            begin, stop = self.spans[int(text[found + size : end])]
            yield self.source[begin:stop]
            at = end
            found = text.find(self.token, at)
        yield view[at:]


def cut_body(body: bytes | bytearray, token: bytes) -> Cut:
    """Return `body` with its long data URLs cut out.

    Holds for every valid JSON text: a quote before `data:` opens a string or, escaped, stands inside one; in
    both cases the text up to the next quote belongs to that string if no backslash is in it. What is cut is
    not checked for control characters; the encoder that decodes the media refuses those.
    """
    source = memoryview(body)
    spans = _find_spans(body)
    if not spans:
        return Cut(source=source, skeleton=body)
    skeleton = _join_skeleton(source, spans, token)
    if skeleton.count(token) != len(spans):
        return Cut(source=source, skeleton=body)
    return Cut(source=source, skeleton=skeleton, spans=tuple(spans), token=token)


def _find_spans(body: bytes | bytearray) -> list[tuple[int, int]]:
    # A search for one byte runs at memory speed, one for several bytes 30 times slower: so the long jump over
    # the media is a search for its closing quote.
    spans: list[tuple[int, int]] = []
    opening = body.find(_OPENING)
    while opening >= 0 and len(spans) < _MAX_SPANS:
        begin = opening + 1
        end = body.find(b'"', begin)
        if end < 0:
            break
        is_long = end - begin >= CUT_FROM_BYTES
        if is_long and body.find(b"\\", begin, end) < 0:
            spans.append((begin, end))
        opening = body.find(_OPENING, end)
    return spans


def _join_skeleton(source: memoryview, spans: list[tuple[int, int]], token: bytes) -> bytes:
    parts: list[Piece] = []
    at = 0
    for number, (begin, end) in enumerate(spans):
        parts += [source[at:begin], token, b"%0*d" % (_NUMBER_DIGITS, number)]
        at = end
    return b"".join([*parts, source[at:]])


def is_deeper_than(limit: int, text: bytes | bytearray) -> bool:
    """Say whether the JSON in `text` nests more than `limit` arrays and objects.

    Runs on C-speed byte operations, without recursion, before any parser sees the text. For text that is not
    JSON the answer means nothing; the parser refuses that afterwards.
    """
    if text.count(b"[") + text.count(b"{") <= limit:
        return False
    structure = _outside_strings(text)
    for _ in range(limit):
        if not structure:
            return False
        structure = structure.replace(b"[]", b"")
    return bool(structure)


def _outside_strings(text: bytes | bytearray) -> bytes:
    """Return the brackets of `text` that are not inside a string, all of one kind."""
    if text.find(b"\\") >= 0:
        # Escapes are read from the left: pairs of backslashes first, what is left before a quote escapes it.
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(bytes(text.translate(_ONE_KIND, _NOT_STRUCTURE)).split(b'"')[::2])


def body_length(body: Body) -> int:
    """Return the number of bytes in `body`."""
    return sum(map(len, body))
