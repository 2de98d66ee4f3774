"""The line and the count of a finished request."""

from __future__ import annotations

import asyncio
import json

import pytest

from epdctl.domain import InstanceUrl, Stage, Topology
from epdctl.metrics import ControlMetrics
from epdctl.proxy.record import OK, Leg, Record, RequestLog

pytestmark = pytest.mark.unit


def finished(request_id: str, **fields: object) -> Record:
    """Return the record of a request that one instance served."""
    leg = Leg(stage=Stage.DECODE, instance=InstanceUrl("http://d0"), elapsed_s=0.5, outcome=OK)
    return Record(
        request_id=request_id,
        route="/v1/x",
        topology=Topology.E_PD,
        legs=[leg],
        outcome=OK,
        status=200,
        **fields,
    )


async def test_lines_of_one_turn_leave_together(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """Each request has one JSON line with its instances, and nothing waits beyond the turn of the loop."""
    log = RequestLog(ControlMetrics(), is_on=True, as_json=True)
    log.finish(finished("one"))
    log.finish(finished("two", error_code="aborted"))
    assert capfdbinary.readouterr().err == b""
    await asyncio.sleep(0)
    one, two = map(json.loads, capfdbinary.readouterr().err.splitlines())

    assert (one["event"], one["request_id"], one["status"], one["outcome"]) == (
        "request_finished",
        "one",
        200,
        "ok",
    )
    assert one["stages"] == [{"stage": "decode", "instance": "http://d0", "elapsed_s": 0.5, "outcome": "ok"}]
    assert "error_code" not in one
    assert (two["request_id"], two["error_code"]) == ("two", "aborted")


async def test_a_quiet_log_still_counts(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """Above the info level no line is written; the metric has the request all the same."""
    metrics = ControlMetrics()
    RequestLog(metrics, is_on=False, as_json=True).finish(finished("one"))
    await asyncio.sleep(0)

    assert capfdbinary.readouterr().err == b""
    assert b'epdctl_requests_total{outcome="ok",route="/v1/x",topology="e_pd"} 1.0' in metrics.render()
