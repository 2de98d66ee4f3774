"""The decode's end of a hand-over: each import ends once, whatever goes wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from epdctl.errors import EpdError
from epdctl.metrics import WorkerMetrics
from epdctl.worker.language.kv import KvPool
from epdctl.worker.language.kv_import import ImportEvents, KvImporter
from epdctl.worker.language.kv_layout import shape_of
from epdctl.worker.language.kv_messages import KvTicket
from tests.stubs.process import wait_until
from tests.unit.language.small_spec import SPEC

pytestmark = [pytest.mark.unit, pytest.mark.worker]


async def test_a_bug_in_an_import_costs_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no name fails the import as internal, once; its region is kept from others while bytes may
    still arrive."""
    ended: list[tuple[str, str]] = []

    def failed(call_id: str, error: EpdError) -> None:
        ended.append((call_id, type(error).__name__))

    pool = KvPool(SPEC, 2**20, torch.device("cpu"))
    events = ImportEvents(done=lambda call_id: ended.append((call_id, "done")), failed=failed)
    importer = KvImporter(SPEC, pool, "s", events, WorkerMetrics(), wait_s=1.0)

    async def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(importer._client, "fetch", broken)
    region = pool.allocate(8)
    assert region is not None
    ticket = KvTicket(
        remote_engine_id="e",
        remote_request_id="r",
        remote_host="127.0.0.1",
        remote_port=1,
        remote_num_tokens=7,
        lease_s=10,
        kv_shape=shape_of(SPEC),
        prompt_digest="d",
    )

    importer.begin("c", region, ticket)
    await wait_until(lambda: bool(ended), "the import has ended")

    assert ended == [("c", "InternalFailure")]
    assert pool.arena.bytes_by_state()["quarantined"] > 0
    await importer.close()
