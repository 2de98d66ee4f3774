"""Placeholders of the case files: `{{img:NAME}}`, `{{url:e0}}`, `{{repeat:C:N}}` and the rest.

Rules of this file: pure, but for reading a case folder's pictures; a token nobody knows raises
UnknownPlaceholder by name. `{{item}}`, `{{img_item}}`, `{{i}}` live only inside a `for_each` or `repeat`.
"""

from __future__ import annotations

import base64
import copy
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

DELETE = "{{delete}}"
_TOKEN = re.compile(r"\{\{(repeat:.:\d+|[A-Za-z_][A-Za-z_0-9.:\-]*)\}\}", re.DOTALL)
_MIME = {".png": "image/png", ".gif": "image/gif", ".jpg": "image/jpeg", ".wav": "audio/wav"}
_BOMB_SIDE = 30_000


class UnknownPlaceholder(ValueError):
    """A placeholder outside the vocabulary, or one that has no value here."""


@dataclass(frozen=True)
class Pictures:
    """The media files of a case folder, with a second folder to fall back to."""

    folders: tuple[Path, ...]

    def read(self, name: str) -> bytes:
        """Return the bytes of a media file."""
        for folder in self.folders:
            if (folder / name).is_file():
                return (folder / name).read_bytes()
        raise UnknownPlaceholder(f"no media file {name!r}")

    def base64(self, name: str) -> str:
        """Return a media file as base64."""
        return base64.b64encode(self.read(name)).decode()

    def data_url(self, name: str) -> str:
        """Return a media file as a data URL."""
        return f"data:{_MIME[Path(name).suffix]};base64,{self.base64(name)}"

    @cached_property
    def names_by_url(self) -> dict[str, str]:
        """Every media file's data URL, mapped to its name."""
        found = {}
        for folder in reversed(self.folders):
            for path in folder.iterdir():
                if path.suffix in _MIME:
                    found[self.data_url(path.name)] = path.name
        return found


@dataclass(frozen=True)
class Placeholders:
    """Expands tokens: `values` holds what is known only at run time (`url:e0`, `admin_key`, `item`)."""

    pictures: Pictures
    values: Mapping[str, Any] = field(default_factory=dict)

    def having(self, **values: Any) -> Placeholders:
        """Return these placeholders with more values."""
        return Placeholders(self.pictures, {**self.values, **values})

    def expand(self, value: Any) -> Any:
        """Return `value` with the tokens in all its strings and keys replaced."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.expand(entry) for entry in value]
        if isinstance(value, dict):
            return {self.text(key): self.expand(entry) for key, entry in value.items()}
        return value

    def text(self, text: str) -> Any:
        """Return a string expanded; a string that is one `{{item}}` token becomes the item itself."""
        if "{{" not in text:
            return text
        whole = _TOKEN.fullmatch(text)
        if whole and whole.group(1).split(".")[0] == "item":
            return copy.deepcopy(self._item(whole.group(1)))
        return _TOKEN.sub(lambda match: str(self._value(match.group(1))), text)

    def string(self, text: str) -> str:
        """Return a string expanded, always as a string."""
        return str(self.text(text))

    def _value(self, token: str) -> Any:
        if token in self.values:
            return self.values[token]
        kind, _, rest = token.partition(":")
        if kind in ("img", "wav") and rest:
            return self.pictures.data_url(rest)
        if kind == "b64" and rest:
            return self.pictures.base64(rest)
        if kind == "repeat":
            return rest[0] * int(rest[2:])
        if token == "bomb":
            return "data:image/png;base64," + base64.b64encode(png_bomb()).decode()
        if token == "img_item" and "item" in self.values:
            return self.pictures.data_url(str(self.values["item"]))
        if token == "delete":
            return DELETE
        if kind.split(".")[0] == "item":
            return self._item(token)
        raise UnknownPlaceholder(f"{{{{{token}}}}}")

    def _item(self, token: str) -> Any:
        if "item" not in self.values:
            raise UnknownPlaceholder(f"{{{{{token}}}}} outside for_each")
        value = self.values["item"]
        for word in token.split(".")[1:]:
            value = value[word]
        return value


def merge(body: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return `body` with the keys of `patch` put in; the value `{{delete}}` takes a key out."""
    merged = {**body, **patch}
    return {key: value for key, value in merged.items() if value != DELETE}


def merge_items(value: Any, item: Any) -> Any:
    """Return `value` where every object with `merge_item` is the item with that object's other keys added."""
    if isinstance(value, list):
        return [merge_items(entry, item) for entry in value]
    if isinstance(value, dict):
        if value.get("merge_item") is True:
            return {**item, **{key: entry for key, entry in value.items() if key != "merge_item"}}
        return {key: merge_items(entry, item) for key, entry in value.items()}
    return value


def png_bomb(side: int = _BOMB_SIDE) -> bytes:
    """Return a PNG of about 110 kB that unpacks to gigabytes of pixels."""
    packer = zlib.compressobj(9)
    row = bytes(1 + (side + 7) // 8)
    data = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_part(tag, body) for tag, body in parts)


def png_part(tag: bytes, body: bytes) -> bytes:
    """Return one chunk of a PNG."""
    return struct.pack(">I", len(body)) + tag + body + struct.pack(">I", zlib.crc32(tag + body))
