"""What prefill and decode are told about the KV cache."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from epdctl.domain import Role
from epdctl.errors import UpstreamProtocol
from epdctl.proxy.kv_handoff import (
    MooncakeHandoff,
    NixlHandoff,
    connector_of,
    read_engine_id,
    read_kv_params,
)
from tests.unit.proxy.build import member

pytestmark = pytest.mark.unit

MOONCAKE = MooncakeHandoff(transfer_id="xfer-1", engine_id="e", bootstrap_addr="http://b:1")


def test_nixl_passes_the_answer_on_word_for_word() -> None:
    """Decode gets prefill's parameters byte for byte, empty lists included."""
    params = b'{"remote_block_ids": [], "remote_port" : 1}'

    assert NixlHandoff().decode_params(b'{"id":"x","kv_transfer_params":' + params + b"}") == params


@pytest.mark.parametrize("reply", [b"{}", b'{"kv_transfer_params":null}', b'{"kv_transfer_params":{ }}'])
def test_nothing_handed_over(reply: bytes) -> None:
    """Absent, null and empty parameters all mean that there is nothing to fetch."""
    assert read_kv_params(reply) is None


@pytest.mark.parametrize(
    "reply", [b"", b"x", b"[]", b'{"kv_transfer_params":"x"}', b'{"kv_transfer_params":[1]}']
)
def test_an_answer_that_is_none(reply: bytes) -> None:
    """Parameters of another type, or an answer that is no JSON, are a protocol error."""
    with pytest.raises(UpstreamProtocol):
        read_kv_params(reply)


def test_mooncake_names_the_transfer_to_both() -> None:
    """Both legs know the transfer id, and decode whom to ask for it; the legs run at once."""
    assert json.loads(MOONCAKE.prefill_params()) == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": "xfer-1",
    }
    assert json.loads(MOONCAKE.decode_params(None) or b"") == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": "e",
        "remote_bootstrap_addr": "http://b:1",
        "transfer_id": "xfer-1",
    }
    assert MOONCAKE.is_concurrent
    assert not NixlHandoff().is_concurrent


def test_the_connector_is_chosen_per_pair() -> None:
    """What an instance says about itself wins over the flag."""
    prefill, decode = member("p", Role.PREFILL), member("d", Role.DECODE)

    assert connector_of(prefill, decode, "nixl") == "nixl"
    assert connector_of(prefill, replace(decode, kv_connector="mooncake"), "nixl") == "mooncake"
    assert connector_of(replace(prefill, kv_connector="nixl"), decode, "mooncake") == "nixl"


def test_the_engine_of_a_rank() -> None:
    """The bootstrap server names an engine for each data-parallel rank."""
    reply = b'{"0": {"engine_id": "a", "worker_addr": {}}, "1": {"engine_id": "b"}}'

    assert (read_engine_id(reply, 0), read_engine_id(reply, 1)) == ("a", "b")


@pytest.mark.parametrize("reply", [b"", b"[]", b"{}", b'{"0": {}}', b'{"0": {"engine_id": 1}}'])
def test_a_bootstrap_answer_that_is_none(reply: bytes) -> None:
    """An answer without the rank's engine is a protocol error."""
    with pytest.raises(UpstreamProtocol):
        read_engine_id(reply, 0)
