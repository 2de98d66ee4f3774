"""Cutting data URLs out of a body, putting them back, and the nesting limit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epdctl.proxy.cut import CUT_FROM_BYTES, body_length, cut_body, is_deeper_than
from tests.unit.proxy.build import TOKEN, body_of

pytestmark = pytest.mark.unit

LONG = "data:image/png;base64," + "Q" * CUT_FROM_BYTES

strings = st.one_of(
    st.text(max_size=40),
    st.just(LONG),
    st.text(max_size=3).map(lambda tail: LONG + tail),
    st.sampled_from(["data:", '"data:', '\\"data:' + "A" * 2000, "\\", '"', TOKEN.decode(), "[{]}"]),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), strings),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(strings, inner, max_size=4)),
    max_leaves=20,
)


def depth_of(value: Any) -> int:
    """Return how deep the containers of `value` nest."""
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    return 0


@given(values)
def test_restored_skeleton_is_the_body(value: Any) -> None:
    """Whatever is cut out of any JSON text comes back byte for byte."""
    body = body_of(value)
    cut = cut_body(body, TOKEN)

    assert b"".join(cut.restore(bytes(cut.skeleton))) == body


@given(values)
def test_skeleton_is_json_with_the_same_shape(value: Any) -> None:
    """A cut body is still JSON, so what is parsed is what the client sent."""
    cut = cut_body(body_of(value), TOKEN)
    again = json.loads(b"".join(cut.restore(json.dumps(json.loads(cut.skeleton)).encode())))

    assert again == value


@given(values, st.integers(min_value=0, max_value=8))
def test_depth_is_that_of_the_value(value: Any, limit: int) -> None:
    """The nesting check agrees with a count on the parsed value, whatever is inside its strings."""
    assert is_deeper_than(limit, body_of(value)) == (depth_of(value) > limit)


def test_media_are_slices_of_the_body() -> None:
    """A long data URL is not copied: what goes out is a view of what came in."""
    body = body_of({"url": LONG})
    cut = cut_body(body, TOKEN)
    pieces = cut.restore(bytes(cut.skeleton))

    assert any(isinstance(piece, memoryview) and piece.obj is body for piece in pieces)
    assert body_length(pieces) == len(body)


def test_short_data_urls_stay() -> None:
    """A short data URL is parsed like any string."""
    assert cut_body(body_of({"url": "data:image/png;base64,AAAA"}), TOKEN).spans == ()


def test_a_body_that_names_the_token_is_not_cut() -> None:
    """A client that guessed the placeholder gains nothing: its body is parsed whole."""
    body = body_of({"url": LONG, "forged": TOKEN.decode() + "000000"})

    assert cut_body(body, TOKEN).skeleton == body


def test_an_escaped_data_url_is_not_cut() -> None:
    """A string with an escape in it may end elsewhere than at the next quote, so it stays."""
    body = b'{"url": "' + LONG.encode() + b'\\/AAA"}'

    assert cut_body(body, TOKEN).spans == ()


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_a_hundred_thousand_levels_are_too_deep(opening: str) -> None:
    """A nesting bomb is refused without recursion."""
    assert is_deeper_than(64, b'{"a":' + opening.encode() * 100_000)


def test_a_long_flat_list_is_not_deep() -> None:
    """Many containers side by side are no nesting."""
    assert not is_deeper_than(3, body_of({"a": [[], {}] * 5000}))
