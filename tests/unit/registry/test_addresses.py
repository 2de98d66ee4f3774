"""Instance URLs and EC control addresses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epdctl.errors import SchemaViolation
from epdctl.registry.addresses import check_consumer_addresses, normalise_url

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("given_url", "normal"),
    [
        ("http://e1:8001", "http://e1:8001"),
        ("HTTP://E1.Example:8001/", "http://e1.example:8001"),
        ("http://e1:80", "http://e1"),
        ("https://e1:443/", "https://e1"),
        ("https://e1:80", "https://e1:80"),
        ("http://e1:8001/Base/", "http://e1:8001/Base"),
        ("http://e1:8001//", "http://e1:8001"),
        (" http://10.0.0.5:8001 ", "http://10.0.0.5:8001"),
        ("http://[FE80::1]:8001", "http://[fe80::1]:8001"),
        ("http://e1:08001", "http://e1:8001"),
    ],
)
def test_normal_form(given_url: str, normal: str) -> None:
    """Spellings of one address become one identity."""
    assert normalise_url(given_url) == normal


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("", "characters"),
        ("e1:8001", "scheme"),
        ("ftp://e1", "scheme"),
        ("http://", "host"),
        ("http://:8001", "host"),
        ("http://user:pw@e1", "user info"),
        ("http://@e1", "user info"),
        ("http://e1?a=b", "query"),
        ("http://e1/?", "query"),
        ("http://e1#f", "fragment"),
        ("http://e1:99999", "port"),
        ("http://e1:0", "port"),
        ("http://e1:", "port"),
        ("http://e1:x", "port"),
        ("http://e1/../x", "dot segments"),
        ("http://e 1", "spaces"),
        ("http://e1\\x", "backslashes"),
        ("http://e1/\n", "scheme|spaces|host"),
        ("http://e1" + "a" * 3000, "characters"),
        ("http://[::1", "parsed"),
        ("http://-e1", "host"),
        ("http://ex%41mple", "host"),
        ("http://a..b:5", "host is no name"),
        (f"http://{'a' * 70}:5", "host is no name"),
        (f"http://{'.'.join(['a' * 60] * 5)}:5", "host is no name"),
        ("http://e1.:5", "host is no name"),
        ("http://[:::]:5", "parsed|host is no name"),
        ("http://bücher:5", "host is no name"),
    ],
)
def test_bad_urls_are_refused_with_the_reason(bad: str, why: str) -> None:
    """What is no plain http(s) base URL is refused, and the message says why."""
    if bad.endswith("\n"):
        bad = bad + "x"
    with pytest.raises(SchemaViolation, match=why) as raised:
        normalise_url(bad)

    assert raised.value.param == "url"


@given(st.text(max_size=60))
def test_any_text_is_refused_or_normal(text: str) -> None:
    """Whatever is given, the answer is a refusal or a URL that is its own normal form."""
    try:
        normal = normalise_url("http://" + text)
    except SchemaViolation:
        return
    assert normalise_url(normal) == normal


@pytest.mark.parametrize(
    ("addresses", "dp_size"),
    [
        ([], 1),
        ([], 4),
        (["tcp://10.0.0.1:5001"], 1),
        (["tcp://h-1.example:1", "tcp://h-1.example:65535"], 2),
        (["tcp://[::1]:5001"], 1),
    ],
)
def test_good_addresses(addresses: list[str], dp_size: int) -> None:
    """One address a replica, or none at all, is fine."""
    check_consumer_addresses(addresses, dp_size)


@pytest.mark.parametrize(
    ("addresses", "dp_size", "why"),
    [
        (["tcp://h:1", "tcp://h:2", "tcp://h:3"], 4, "dp_size is 4, got 3"),
        (["tcp://h:1", "tcp://h:1"], 2, "share"),
        (["tcp://0.0.0.0:5001"], 1, "wildcard"),
        (["tcp://*:5001"], 1, "wildcard"),
        (["tcp://[::]:5001"], 1, "wildcard"),
        (["tcp://host"], 1, "tcp://host:port"),
        (["tcp://h:99999"], 1, "65535"),
        (["tcp://h:0"], 1, "65535"),
        ([""], 1, "tcp://host:port"),
        (["ipc:///tmp/x"], 1, "tcp://host:port"),
        (["tcp://h:1\n"], 1, "tcp://host:port"),
        (["tcp://[0::0]:5001"], 1, "wildcard"),
        (["tcp://a..b:5"], 1, "a name or an IP address"),
        ([f"tcp://{'a' * 64}:5"], 1, "a name or an IP address"),
        (["tcp://[1:2]:5"], 1, "a name or an IP address"),
    ],
)
def test_bad_addresses_are_refused_with_the_reason(addresses: list[str], dp_size: int, why: str) -> None:
    """A wrong count, form, host or port is refused at registration, not at the first request."""
    with pytest.raises(SchemaViolation, match=why) as raised:
        check_consumer_addresses(addresses, dp_size)

    assert raised.value.param == "ec_zmq_addrs"
