"""What an embedding's cache key covers, and how transfer ids are resolved."""

from __future__ import annotations

import subprocess
import sys

import pytest

from epdctl.domain import Modality
from epdctl.worker.encode.keys import NamedTransfer, cache_key, content_digest, identity_of, transfer_id_of

pytestmark = pytest.mark.unit

BASE = {"content": "c", "modality": Modality.IMAGE, "options": {"max_pixels": 100}, "identity": "m"}


@pytest.mark.parametrize(
    "change",
    [
        {"content": "d"},
        {"modality": Modality.VIDEO},
        {"options": {}},
        {"options": {"max_pixels": 101}},
        {"options": {"min_pixels": 100}},
        {"identity": "other"},
    ],
    ids=["content", "modality", "no options", "option value", "option name", "model or processor"],
)
def test_key_changes_with_all_that_changes_the_rows(change: dict[str, object]) -> None:
    """Any difference in content, modality, options or model gives another key."""
    assert cache_key(**BASE) != cache_key(**{**BASE, **change})  # type: ignore[arg-type]


def test_key_is_the_same_for_the_same_facts_in_every_process() -> None:
    """Keys are comparable between processes, and do not depend on the order of options."""
    code = (
        "from epdctl.worker.encode.keys import cache_key; from epdctl.domain import Modality;"
        "print(cache_key(content='c', modality=Modality.IMAGE, options={'b': 1, 'a': 2}, identity='m'))"
    )
    elsewhere = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    here = cache_key(content="c", modality=Modality.IMAGE, options={"a": 2, "b": 1}, identity="m")

    assert elsewhere.stdout.strip() == here


def test_identity_does_not_blur_its_parts() -> None:
    """Parts are kept apart: text may not move from one to the next unseen."""
    assert identity_of("ab", "c") != identity_of("a", "bc")


def test_digest_is_of_the_bytes() -> None:
    """Equal bytes give equal digests, whatever holds them."""
    assert content_digest(b"xy") == content_digest(bytearray(b"xy")) != content_digest(b"xz")


NAMED = (NamedTransfer(transfer_id="t0"), NamedTransfer(transfer_id="t1", mm_hash="h1"))


@pytest.mark.parametrize(
    ("index", "mm_hash", "expected"),
    [
        (0, "h0", "t0"),
        (1, "h1", "t1"),
        (1, "h0", "own:1"),
        (2, "h1", "t1"),
        (2, "h0", "own:2"),
    ],
    ids=["by place", "by place and name", "place names another", "by name", "neither"],
)
def test_transfer_id_is_resolved_as_a_vllm_producer_does(index: int, mm_hash: str, expected: str) -> None:
    """The entry at the item's place, else the first one that names it, else an id of our own."""
    assert transfer_id_of(index, mm_hash, NAMED, "own") == expected
