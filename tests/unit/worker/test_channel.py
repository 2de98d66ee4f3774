"""Messages between front and engine: packing, failures that cross, metric samples that are merged."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from epdctl import errors
from epdctl.errors import (
    ConsumerFull,
    EngineUnavailable,
    EpdError,
    MediaUnavailable,
    NoInstance,
    UpstreamRefused,
)
from epdctl.metrics import WorkerMetrics
from epdctl.worker.channel import (
    ErrorBody,
    MalformedMessage,
    bind_channel,
    error_message,
    error_of,
    message,
    pack,
    unpack,
)
from epdctl.worker.samples import lasting, merge, render, snapshot
from epdctl.worker.supervisor import restart_delay

pytestmark = pytest.mark.unit


class Body(msgspec.Struct):
    """A body."""

    number: int


def as_frames(parts: list[bytes | bytearray | memoryview]) -> list[zmq.Frame]:
    """Return `parts` as they come out of a socket."""
    return [zmq.Frame(bytes(part)) for part in parts]


def test_message_survives_the_wire() -> None:
    """Kind, call, body and frames come out as they went in."""
    sent = message("encode", Body(7), call_id="c", frames=(b"", b"abc"))

    received = unpack(as_frames(pack(sent)))

    assert (received.kind, received.call_id, received.parse(Body)) == ("encode", "c", Body(7))
    assert [bytes(frame) for frame in received.frames] == [b"", b"abc"]


@pytest.mark.parametrize(
    "frames", [[], [b""], [b"\x80\x04."], [b"not msgpack"], [msgspec.msgpack.encode([1])]]
)
def test_what_is_no_message_is_said_to_be_none(frames: list[bytes]) -> None:
    """Frames that are no message, a pickle among them, are refused."""
    with pytest.raises(MalformedMessage):
        unpack([zmq.Frame(frame) for frame in frames])


def test_body_of_another_kind_is_refused() -> None:
    """A body is checked against what its reader expects."""
    with pytest.raises(MalformedMessage):
        message("x", {"number": "seven"}).parse(Body)


REBUILT = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type)
    and issubclass(kind, EpdError)
    and kind not in (EpdError, NoInstance, UpstreamRefused)
]


@pytest.mark.parametrize("kind", REBUILT, ids=lambda kind: kind.__name__)
def test_failure_crosses_the_border_whole(kind: type[EpdError]) -> None:
    """Every failure that an engine may report arrives with its class, text, field and retry hint."""
    sent = kind("text", param="p", retry_after_s=3)

    received = error_of(error_message(sent, call_id="c").parse(ErrorBody))

    assert type(received) is kind
    assert (received.message, received.param, received.retry_after_s) == ("text", "p", 3)


@pytest.mark.parametrize("name", ["NoSuchFailure", "EpdError", "Fault", "NoInstance"])
def test_unknown_failure_is_the_engines(name: str) -> None:
    """A name that is no failure of ours becomes EngineUnavailable, never an arbitrary object."""
    assert type(error_of(ErrorBody(name=name, message="x"))) is EngineUnavailable


async def test_path_that_is_too_long_is_explained() -> None:
    """A socket folder with too long a path names the variable that helps."""
    context = zmq.asyncio.Context()
    try:
        with pytest.raises(OSError, match="TMPDIR"):
            bind_channel(context, Path("/" + "x" * 120))
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize(
    ("failures", "expected"), [(0, 0.0), (1, 0.5), (2, 1.0), (5, 8.0), (9, 30.0), (1000, 30.0)]
)
def test_restarts_back_off(failures: int, expected: float) -> None:
    """The wait before a restart doubles up to its bound."""
    assert restart_delay(failures, (0.5, 30.0)) == expected


def test_samples_of_processes_are_added() -> None:
    """Counters and histograms of several processes add up; the text is valid exposition."""
    first, second = WorkerMetrics(), WorkerMetrics()
    first.ec_bytes.labels("producer").inc(3)
    second.ec_bytes.labels("producer").inc(4)
    second.encode_seconds.observe(0.2)
    first.cache_bytes.labels("l1").set(5)

    text = render(merge([snapshot(first.registry), snapshot(second.registry)])).decode()

    assert 'epdctl_ec_bytes_total{side="producer"} 7.0' in text
    assert "epdctl_encode_seconds_count 1.0" in text
    assert "# TYPE epdctl_ec_bytes_total counter" in text
    assert text.count("# TYPE epdctl_encode_seconds histogram") == 1


def test_gauges_of_a_dead_process_are_forgotten() -> None:
    """What lasts of a process are its counters and histograms."""
    metrics = WorkerMetrics()
    metrics.cache_bytes.labels("l1").set(5)
    metrics.ec_bytes.labels("producer").inc(3)

    kinds = {family.type for family in lasting(snapshot(metrics.registry))}

    assert kinds == {"counter", "histogram"}


def test_failures_keep_their_status() -> None:
    """Statuses are class facts, so a rebuilt failure has the right one."""
    assert error_of(ErrorBody(name="ConsumerFull", message="x")).http_status == ConsumerFull.http_status
    assert (
        error_of(ErrorBody(name="MediaUnavailable", message="x")).http_status == MediaUnavailable.http_status
    )
