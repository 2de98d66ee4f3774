"""Finds and reads case files, and says which part of the product each belongs to.

Rules of this file: every file of the folder is accounted for: it runs against the proxy or against bundled
workers, or it is judged wrong with a reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA_FOLDER = Path(__file__).parent / "data"
OWN_FOLDER = Path(__file__).parent / "own"
PROXY_TARGETS = frozenset({"proxy", "config", "proxy+worker"})
WORKER_TARGETS: Mapping[str, str] = {
    "worker": "the encode worker over HTTP",
    "worker-zmq": "the control socket of the bundled worker's EC consumer",
    "mooncake": "the real transfer engine between two processes",
}


class BadCase(ValueError):
    """A case file that cannot be run: its name and what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case file: `raw` is its JSON object, unexpanded."""

    id: str
    path: Path
    target: str
    nightly: bool
    raw: Mapping[str, Any]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The steps, in order."""
        return list(self.raw.get("steps") or [])

    @property
    def expectations(self) -> list[dict[str, Any]]:
        """What must hold at the end."""
        return list(self.raw.get("expect") or [])

    @property
    def instances(self) -> list[dict[str, Any]]:
        """The stubs of the set-up."""
        return list((self.raw.get("setup") or {}).get("instances") or [])

    def list_named(self, name: str) -> list[Any]:
        """Return the list a `for_each` walks through."""
        found = self.raw.get(name)
        if not isinstance(found, list):
            raise BadCase(f"{self.id}: for_each in {name!r}: no such list")
        return found


def load_case(path: Path) -> Case:
    """Return the case in a file; raise BadCase when it has no id, target, steps or expectations."""
    raw = json.loads(path.read_text())
    for key in ("id", "target", "steps", "expect"):
        if key not in raw:
            raise BadCase(f"{path.name}: no {key!r}")
    return Case(id=raw["id"], path=path, target=raw["target"], nightly=bool(raw.get("nightly")), raw=raw)


def load_folder(folder: Path) -> list[Case]:
    """Return all cases of a folder, by number."""
    paths = [path for path in folder.glob("*.json") if path.name != "INDEX.json"]
    if not paths:
        raise BadCase(f"no case files in {folder}")
    return sorted((load_case(path) for path in paths), key=lambda case: (_number(case.id), case.id))


def _number(case_id: str) -> int:
    digits = "".join(c for c in case_id if c.isdigit())
    return int(digits) if digits else 0


def picture_folders(folder: Path) -> tuple[Path, ...]:
    """Return where pictures are looked for: the folder's own first, then ours."""
    folders = (folder / "images", DATA_FOLDER / "images")
    return tuple(dict.fromkeys(path for path in folders if path.is_dir()))
