"""The file in which an embedding crosses a shared folder, as vLLM's ECExampleConnector reads it (0.32, 0.33).

`<folder>/<identifier>/encoder_cache.safetensors` holds one tensor named `ec_cache`; that it exists means that
it is whole. Ours carry the digest of the rows in the header's metadata, which readers ignore.

Rules of this file: pure; bytes in, bytes out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from epdctl.errors import InvalidRequest

FILE_NAME = "encoder_cache.safetensors"
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 64 * 1024
"""A header of one tensor is a few hundred bytes; what claims more is no such file."""

_TENSOR = "ec_cache"
_METADATA = "__metadata__"
_ALIGNMENT = 8
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_IDENTIFIER = re.compile(r"[A-Za-z0-9_-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredItem:
    """What a file says of its rows: shape in elements, dtype (torch's name), bytes, blake3 of the bytes."""

    identifier: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    digest: str | None


def check_identifier(identifier: str, *, param: str | None = None) -> None:
    """Refuse an identifier that must not become a folder's name; raises InvalidRequest."""
    if _IDENTIFIER.fullmatch(identifier) is None:
        text = "names a folder in shared storage: 1 to 128 of the characters A-Z a-z 0-9 _ and - are allowed"
        raise InvalidRequest(f"the item's identifier {text}", param=param)


def header_of(item: StoredItem) -> bytes:
    """Return all bytes of the file before the rows: length, JSON, padding."""
    tensor = {"dtype": _DTYPES[item.dtype], "shape": list(item.shape), "data_offsets": [0, item.nbytes]}
    metadata = {"digest": item.digest} if item.digest is not None else {}
    text = json.dumps({_METADATA: metadata, _TENSOR: tensor}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRows:
    """Where a file that says it holds an item has the rows, and the digest that they must have.

    A file of another writer has no digest; its rows are believed when shape, type and length are right.
    """

    offset: int
    digest: str | None


def rows_in(item: StoredItem, head: bytes, file_bytes: int) -> FoundRows | None:
    """Return where a file that begins with `head` and has `file_bytes` bytes has `item`; None: it has not."""
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    text = head[LENGTH_BYTES : LENGTH_BYTES + length]
    if len(head) < LENGTH_BYTES or len(text) < length or file_bytes != LENGTH_BYTES + length + item.nbytes:
        return None
    try:
        header = json.loads(text)
        tensor = header[_TENSOR]
        digest = header.get(_METADATA, {}).get("digest")
        found: Sequence[object] = (tensor["dtype"], tensor["shape"], tensor["data_offsets"])
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    expected = (_DTYPES[item.dtype], list(item.shape), [0, item.nbytes])
    if tuple(found) != expected or digest not in (None, item.digest):
        return None
    return FoundRows(offset=LENGTH_BYTES + length, digest=digest)
