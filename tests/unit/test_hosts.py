"""What a host is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epdctl.hosts import ascii_form, is_host, is_wildcard

pytestmark = pytest.mark.unit

LONGEST = ".".join(["a" * 63, "b" * 63, "c" * 63, "d" * 61])


@pytest.mark.parametrize(
    "text",
    [
        *(
            "localhost",
            "pd-0.pd",
            "my_host-1",
            "a.",
            "A",
            "10.0.0.5",
            "::1",
            "fe80::1%eth0",
            "::ffff:10.0.0.5",
        ),
        *("x" * 63, LONGEST, LONGEST + "."),
    ],
)
def test_names_and_addresses_are_hosts(text: str) -> None:
    """A name of up to 253 characters in labels of up to 63, with or without a final dot, or an IP address."""
    assert is_host(text)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            ".",
            "..",
            "a..b",
            ".a",
            "a..",
            "-a",
            "a-",
            "a b",
            "a/b",
            "a:1",
            "[::1]",
            "*",
            "é",
            "a\n",
            "a\0",
        ),
        *("x" * 64, LONGEST + "e", ":::", "1::2::3", "::1%", "::1%a b", "fe80::1%eth0\n"),
    ],
)
def test_other_texts_are_none(text: str) -> None:
    """Empty and too long labels, other characters, brackets and ports are no part of a host."""
    assert not is_host(text)


@given(st.text(st.sampled_from("ab-_.0é\0/ "), max_size=70))
def test_every_host_can_be_asked_for(text: str) -> None:
    """A name that is a host can be encoded for the resolver, which raises no error of its caller's for it."""
    if is_host(text):
        assert text.encode("idna") == text.encode()


@pytest.mark.parametrize(
    ("text", "form"),
    [("bücher.example", "xn--bcher-kva.example"), ("a..b", "a..b"), ("é..b", ""), ("é" * 64, "")],
)
def test_names_of_other_letters_have_an_ascii_form(text: str, form: str) -> None:
    """What has none is told by an empty text, which is no host."""
    assert ascii_form(text) == form
    assert not is_host(text)


def test_wildcards_are_told_from_addresses() -> None:
    """Every spelling of "all addresses" is one, and nothing else is."""
    assert [text for text in ("*", "0.0.0.0", "::", "0::0", "::1", "a", "") if is_wildcard(text)] == [
        *("*", "0.0.0.0", "::", "0::0")
    ]
