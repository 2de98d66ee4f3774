"""What `scripts/capture-wire` recorded of real vLLM instances, behind epdctl and behind vLLM's own example
proxy.

Both proxies were sent the same requests, so what they send on, and what the client gets, must be the same.
The difference that is meant: a client's uuid goes no further than our proxy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from epdctl.ec.protocol import parse_request

pytestmark = pytest.mark.contract

CAPTURES = Path(__file__).parent / "captures"
DEPLOYMENTS = ("example-1e1pd", "mooncake-1e1pd", "nixl-1e1p1d")
NUMBERED = re.compile(r"<(id|request|address) \d+>")
CLIENT_UUID = re.compile(r"uuid-of-capture-[a-z0-9-]+")


def folder(deployment: str, proxy: str) -> Path:
    """Return a recording's folder."""
    return CAPTURES / f"{deployment}-{proxy}"


def hops(deployment: str, proxy: str, scenario: str, hop: str) -> list[dict[str, Any]]:
    """Return the records of one hop of one scenario, in order."""
    files = sorted((folder(deployment, proxy) / scenario).glob(f"*-{hop}.json"))
    return [json.loads(file.read_text()) for file in files]


def renumbered(value: Any) -> Any:
    """Return a record with its numbered names counted anew, in order of appearance in it alone."""
    text = CLIENT_UUID.sub("<id 0>", json.dumps(value))
    names: dict[str, str] = {}
    for match in NUMBERED.finditer(text):
        names.setdefault(match[0], f"<{match[1]} #{len(names)}>")
    return json.loads(NUMBERED.sub(lambda match: names[match[0]], text))


def scenarios() -> list[Any]:
    """Return every recorded scenario of every deployment."""
    return [
        pytest.param(deployment, scenario.name, id=f"{deployment}/{scenario.name}")
        for deployment in DEPLOYMENTS
        for scenario in sorted(folder(deployment, "reference").iterdir())
        if scenario.is_dir()
    ]


def test_every_deployment_is_recorded_behind_both_proxies() -> None:
    """The same scenarios of the same versions lie there for epdctl and for the reference proxy."""
    for deployment in DEPLOYMENTS:
        ours, theirs = (folder(deployment, proxy) for proxy in ("epdctl", "reference"))
        versions = [json.loads((f / "header.json").read_text())["versions"] for f in (ours, theirs)]

        assert versions[0] == versions[1]
        assert sorted(f.name for f in ours.iterdir()) == sorted(f.name for f in theirs.iterdir())


@pytest.mark.parametrize(("deployment", "scenario"), scenarios())
@pytest.mark.parametrize("hop", ["encode", "prefill", "prefill_decode", "decode"])
def test_instances_are_sent_what_the_reference_sends(deployment: str, scenario: str, hop: str) -> None:
    """Every instance gets the same calls with the same bodies from both proxies."""
    ours, theirs = (
        [renumbered((call["request"]["path"], call["request"]["body"])) for call in found]
        for found in (hops(deployment, proxy, scenario, hop) for proxy in ("epdctl", "reference"))
    )

    assert ours == theirs


@pytest.mark.parametrize(("deployment", "scenario"), scenarios())
def test_clients_get_the_same_answer(deployment: str, scenario: str) -> None:
    """Status and generated text do not depend on the proxy; an instance's refusal is passed on unwrapped."""
    (ours,), (theirs,) = (hops(deployment, proxy, scenario, "client") for proxy in ("epdctl", "reference"))

    assert ours["response"]["status"] == theirs["response"]["status"]
    if ours["response"]["status"] == 200:
        assert generated(ours["response"]["body"]) == generated(theirs["response"]["body"])
    else:
        (refusal,) = hops(deployment, "epdctl", scenario, "encode")
        assert ours["response"]["body"] == refusal["response"]["body"]


def generated(body: Any) -> str:
    """Return the text of an answer, streamed or not."""
    events = [event for event in body if isinstance(event, dict)] if isinstance(body, list) else [body]
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(
        (choice.get("delta") or choice.get("message") or {}).get("content") or "" for choice in choices
    )


@pytest.mark.parametrize("proxy", ["epdctl", "reference"])
def test_recorded_control_messages_are_understood(proxy: str) -> None:
    """Every control message that a vLLM encoder sent is one that our consumer can read."""
    folders = [f for f in folder("mooncake-1e1pd", proxy).iterdir() if f.is_dir()]
    recorded = [hop for f in folders for hop in hops("mooncake-1e1pd", proxy, f.name, "control")]
    operations = {parse_request(readable(hop["request"])).__class__.__name__ for hop in recorded}

    assert len(operations) >= 4


def readable(request: dict[str, Any]) -> bytes:
    """Return a recorded control message as bytes, with ids where the recording has names."""
    return NUMBERED.sub("0" * 32, json.dumps(request)).encode()
