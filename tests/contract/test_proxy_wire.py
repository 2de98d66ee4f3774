"""The HTTP wire between proxy and instances, against hops recorded from vLLM, both ways.

Recorded: the reference proxy of vLLM 0.33.0 in front of instances of vLLM 0.32.0 (`captures/http-*.json`).
What we build must equal what the reference sent, after ids are given common names; what the instances
answered must be understood. Differences that are meant, and so are undone before comparing:

- an item's uuid is our digest, also where the client gave one (the reference passes a client's uuid on);
- an absent `model` stays absent (the reference sends null).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from epdctl.domain import InstanceUrl, Role, Stage, Topology, TransferId
from epdctl.errors import UpstreamRefused
from epdctl.proxy.content import Request
from epdctl.proxy.encode_reply import read_encode_reply
from epdctl.proxy.encode_request import build_encode_body
from epdctl.proxy.keys import digest, key_material
from epdctl.proxy.kv_handoff import MooncakeHandoff, NixlHandoff, read_engine_id
from epdctl.proxy.plan import Cursors, Demand, ItemDemand, Policies, find_able, plan_route
from epdctl.proxy.retry import error_of_status
from epdctl.proxy.rewrite import (
    NOTHING_ENCODED,
    Encoded,
    build_decode_body,
    build_prefill_body,
    gather_reports,
)
from epdctl.registry.policies import Policy
from epdctl.registry.snapshot import Member, Roster
from tests.unit.proxy.build import chat, sent

pytestmark = pytest.mark.contract

CAPTURES = Path(__file__).parent / "captures"
CONFIGURATIONS = ("mooncake-1e1pd-static", "example-1e1pd-static", "nixl-1e1p1d-static")
ROUND = Policies(encode=Policy.ROUND_ROBIN, prefill=Policy.ROUND_ROBIN, decode=Policy.ROUND_ROBIN)

Hop = dict[str, Any]


def load(name: str) -> dict[str, Any]:
    """Return a capture file."""
    loaded: dict[str, Any] = json.loads((CAPTURES / f"http-{name}.json").read_text())
    return loaded


def scenarios() -> list[Any]:
    """Return every recorded scenario."""
    return [
        pytest.param(hops, id=f"{configuration}/{name}")
        for configuration in CONFIGURATIONS
        for name, hops in load(configuration)["scenarios"].items()
    ]


def hops_of(hops: list[Hop], kind: str) -> list[Hop]:
    """Return the hops of one kind, in order."""
    return [hop for hop in hops if hop["hop"] == kind]


def named(value: Any) -> Any:
    """Return `value` with uuids and transfer ids replaced by their order of appearance in it."""
    text = json.dumps(value, sort_keys=True)
    uuids: dict[str, str] = {}
    for found in re.findall(r'"uuid": "([^"]+)"', json.dumps(value)):
        uuids.setdefault(found, f"uuid-{len(uuids)}")
    for identifier, name in uuids.items():
        text = text.replace(f'"{identifier}"', f'"{name}"')
    transfers: dict[str, str] = {}
    for found in re.findall(r'"transfer_id": "([0-9a-f]{32})"', json.dumps(value)):
        transfers.setdefault(found, f"transfer-{len(transfers)}")
    for identifier, name in transfers.items():
        text = text.replace(f'"{identifier}"', f'"{name}"')
    return json.loads(text)


class Ours:
    """What we would send for a recorded client request, with the recorded answers of the instances."""

    def __init__(self, hops: list[Hop]) -> None:
        self.hops = hops
        self.request: Request = chat(hops_of(hops, "client")[0]["request"])
        self.uuids = {item.index: digest(key_material(self.request, item)) for item in self.request.items}
        self.transfer_ids = {
            item.index: (TransferId(f"{item.index + 1:032x}"),) for item in self.request.items
        }
        consumers = [
            hop["request"]["ec_transfer_params"]["consumer_zmq"]
            for hop in hops_of(hops, "encoder")
            if "ec_transfer_params" in hop["request"]
        ]
        self.consumer_zmq = consumers[0] if consumers else None

    def batches(self) -> list[tuple[int, ...]]:
        """Return the items of each encoder call that we plan with one encoder."""
        members = [
            Member(url=InstanceUrl(f"http://{role.value}"), role=role, generation=1)
            for role in (Role.ENCODE, Role.PREFILL_DECODE)
        ]
        items = tuple(
            ItemDemand(index=item.index, modality=item.modality, key=b"") for item in self.request.items
        )
        roster = Roster(version=1, topology=Topology.E_PD, members=tuple(members))
        plan, _ = plan_route(
            find_able(roster, None, has_media=bool(items)),
            Cursors(),
            Demand(items=items),
            policies=ROUND,
            loads={},
            draw=lambda: 0.0,
        )
        return [batch.items for batch in plan.batches]

    def encode_body(self, batch: tuple[int, ...]) -> Any:
        """Return the request for one encoder call."""
        body = build_encode_body(
            self.request,
            [self.request.items[index] for index in batch],
            uuids=self.uuids,
            transfer_ids=self.transfer_ids,
            consumer_zmq=self.consumer_zmq,
        )
        return sent(body)

    def encoded(self) -> Encoded:
        """Return what the recorded encoder answers say about our items."""
        if not self.request.items:
            return NOTHING_ENCODED
        reports = []
        for batch, hop in zip(self.batches(), hops_of(self.hops, "encoder"), strict=True):
            reports.append(
                read_encode_reply(
                    self._as_told_ours(hop),
                    [self.request.items[index] for index in batch],
                    uuids=self.uuids,
                    transfer_ids=self.transfer_ids,
                    is_pushed=self.consumer_zmq is not None,
                )
            )
        return gather_reports(reports, self.transfer_ids, self.uuids)

    def _as_told_ours(self, hop: Hop) -> bytes:
        """Return the encoder's answer as it would be, had it been told our uuids and transfer ids."""
        text = json.dumps(hop["response"])
        parts = hop["request"]["messages"][0]["content"]
        ours = self.encode_body(tuple(range(len(parts))))["messages"][0]["content"]
        for theirs, mine in zip(parts, ours, strict=True):
            text = text.replace(theirs["uuid"], mine["uuid"])
        told = hop["request"].get("ec_transfer_params", {}).get("ec_items", [])
        for theirs, mine in zip(told, self.transfer_ids.values(), strict=False):
            text = text.replace(theirs["transfer_id"], mine[0])
        return text.encode()


def answered(hops: list[Hop]) -> bool:
    """Say whether the recorded request got past the encoders."""
    return all(hop["status"] == 200 for hop in hops_of(hops, "encoder"))


@pytest.mark.parametrize("hops", scenarios())
def test_encode_requests_equal_the_references(hops: list[Hop]) -> None:
    """One call with the same media, options and push parameters."""
    ours = Ours(hops)
    calls = [ours.encode_body(batch) for batch in ours.batches()]

    assert named(calls) == named([hop["request"] for hop in hops_of(hops, "encoder")])


@pytest.mark.parametrize("hops", scenarios())
def test_encode_replies_are_understood(hops: list[Hop]) -> None:
    """Every item finds its metadata, under the hash that the encoder reported."""
    if not answered(hops):
        (hop,) = hops_of(hops, "encoder")
        error = error_of_status_of(hop)
        assert (error.http_status, json.loads(error.body)) == (hop["status"], hop["response"])
        return
    ours = Ours(hops)
    encoded = ours.encoded()

    for item in ours.request.items:
        (feature,) = encoded.features[item.index]
        assert feature.mm_hash == ours.uuids[item.index]
        assert len(feature.metadata[f"{item.modality}_grid_thw"]) == 3
        assert feature.transfer_id == ours.transfer_ids[item.index][0]


def error_of_status_of(hop: Hop) -> UpstreamRefused:
    """Return our error for a recorded refusal."""
    error = error_of_status(
        Stage.ENCODE, hop["status"], json.dumps(hop["response"]).encode(), "application/json", None
    )
    assert isinstance(error, UpstreamRefused)
    return error


@pytest.mark.parametrize("hops", [p for p in scenarios() if "nixl" in str(p.id)])
def test_prefill_requests_equal_the_references(hops: list[Hop]) -> None:
    """One token, no stream, the hand-off asked for, media as metadata."""
    for hop in hops_of(hops, "prefill"):
        ours = Ours(hops)
        body = sent(build_prefill_body(ours.request, ours.encoded(), NixlHandoff().prefill_params()))

        assert named(body) == named(hop["request"])


@pytest.mark.parametrize("hops", scenarios())
def test_decode_requests_equal_the_references(hops: list[Hop]) -> None:
    """The client's fields, media as metadata, the transfers, and what prefill handed over."""
    for hop in hops_of(hops, "decode"):
        ours = Ours(hops)
        prefills = hops_of(hops, "prefill")
        params = (
            NixlHandoff().decode_params(json.dumps(prefills[0]["response"]).encode()) if prefills else None
        )
        body = sent(build_decode_body(ours.request, ours.encoded(), params))

        assert named(body) == named(hop["request"])


def test_mooncake_kv_parameters_equal_the_recorded_ones() -> None:
    """Both legs of vLLM's MooncakeConnector: the same transfer id, and decode knows where to ask."""
    recorded = load("mooncake-kv-1p1d")
    prefill, decode = (recorded[leg]["request"]["kv_transfer_params"] for leg in ("prefill", "decode"))
    handoff = MooncakeHandoff(
        transfer_id=prefill["transfer_id"],
        engine_id=read_engine_id(json.dumps(recorded["bootstrap_query"]).encode(), 0),
        bootstrap_addr=decode["remote_bootstrap_addr"],
    )

    assert json.loads(handoff.prefill_params()) == prefill
    assert json.loads(handoff.decode_params(None) or b"") == decode


def test_the_captures_are_all_there() -> None:
    """The recorded scenarios cover pictures, videos, streams, text and refusals on each configuration."""
    for configuration in CONFIGURATIONS:
        names: Mapping[str, Any] = load(configuration)["scenarios"]
        assert {
            "one_image",
            "one_video",
            "two_images_identical",
            "text_only_stream",
            "err_bad_base64",
        } <= names.keys()
