"""The one adapter between the neutral names of the case files and `epdctl serve`.

Rules of this file: every neutral option, state, metric and call that means something else here is in one of
its tables; a neutral name without an entry raises NoCounterpart, it is never dropped.
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

ADMIN_KEY = "case-admin-key"
TINY_MODEL = Path(__file__).parents[2] / "models" / "tiny-vlm" / "qwen2_5_vl"

FLAGS: Mapping[str, str] = {
    "probe_interval_s": "--probe-interval",
    "probe_timeout_s": "--probe-timeout",
    "fail_threshold": "--fail-threshold",
    "evicted_ttl_s": "--evicted-ttl",
    "max_body_bytes": "--max-body-bytes",
    "shutdown_grace_s": "--shutdown-grace",
    "log_level": "--log-level",
}
STAGES: Mapping[str, tuple[str, ...]] = {
    "connect_timeout_s": ("connect",),
    "encode_timeout_s": ("encode",),
    "prefill_timeout_s": ("prefill",),
    "decode_first_byte_timeout_s": ("first_byte",),
    "stream_idle_timeout_s": ("idle",),
    "stage_timeout_s": ("encode", "prefill", "first_byte", "idle"),
}
MEANINGLESS: Mapping[str, str] = {
    "allowed_media_hosts": "the proxy never fetches media; a worker's --allowed-media-domains",
    "cache_bytes": "the proxy caches no embeddings; a worker's --cache-bytes",
}
STATES: Mapping[str, tuple[str, ...]] = {
    "live": ("live",),
    "ready": ("live",),
    "evicted": ("evicted",),
    "pending": ("pending",),
    "draining": ("draining",),
}
OWN_UPSTREAM_PATHS = ("/v1/models",)
"""Paths that the product asks of its own accord, besides health probes: it learns which models are served."""

METRIC_SUMS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "in_flight": ("epdctl_in_flight", {}),
    "retries": ("epdctl_retries_total", {}),
    "cancels": ("epdctl_cancels_total", {}),
}
WORKER_METRIC_SUMS: Mapping[str, tuple[str, str, frozenset[str]]] = {
    "transfer_failures": ("epdctl_ec_transfers_total", "outcome", frozenset({"failed", "refused"})),
    "staged_bytes": ("epdctl_arena_bytes", "state", frozenset({"pinned", "quarantined"})),
}
"""Meanings that only a worker's exposition has: series, label, and the values that count."""
COUNTERS_OF_SHARED = frozenset({"transfer_failures"})
GOOD_OUTCOMES = frozenset({"ok", "client_disconnect"})
UNCOUNTED = frozenset({"stranded_handoffs"})
"""Meanings without a metric here; a case may ask for them only as `optional`."""


class NoCounterpart(ValueError):
    """A neutral name that has no meaning here."""


def serve_arguments(config: Mapping[str, Any], port: int, folder: Path) -> list[str]:
    """Return the command line of `epdctl serve` for a case's options."""
    stages: dict[str, Any] = {}
    arguments = [
        *("--host", "127.0.0.1", "--port", str(port), "--dynamic-registration", "--log-format", "json"),
        *("--store", _store(config.get("store"), folder)),
        # The cases take the registry as closed to readers without a key, and a stop as immediate.
        *("--protect-reads", "--drain-delay", "0"),
    ]
    for name, value in config.items():
        if name in STAGES:
            stages |= dict.fromkeys(STAGES[name], value)
        elif name in FLAGS:
            arguments += [FLAGS[name], str(value)]
        elif name not in MEANINGLESS and name != "store":
            raise NoCounterpart(f"config: {name}")
    if stages:
        arguments += ["--stage-timeouts", ",".join(f"{name}={value}" for name, value in stages.items())]
    return arguments


def _store(value: str | None, folder: Path) -> str:
    if value in (None, "file", "sqlite"):
        return f"sqlite:{folder / 'serve.db'}"
    if value == "memory":
        return "memory"
    raise NoCounterpart(f"config: store {value!r}")


def worker_arguments(config: Mapping[str, Any], port: int) -> list[str]:
    """Return the command line of the bundled encode worker that a `proxy+worker` case runs for `encode`."""
    hosts = config.get("allowed_media_hosts") or []
    return [
        *("worker", "encode", "--model", str(TINY_MODEL), "--served-model-name", "m", "--host", "127.0.0.1"),
        *("--port", str(port), "--log-format", "json"),
        *(("--allowed-media-domains", ",".join(hosts)) if hosts else ()),
    ]


def consumer_arguments(port: int, control_port: int) -> list[str]:
    """Return the command line of a bundled consumer of embeddings on one control port."""
    return [
        *("worker", "prefill-decode", "--model", str(TINY_MODEL), "--served-model-name", "m"),
        *("--host", "127.0.0.1", "--port", str(port), "--ec-port", str(control_port), "--log-format", "json"),
    ]


def tower_fault(wanted: Mapping[str, Any]) -> str:
    """Return our test engine's word for a fault of the tower; "" is none."""
    if wanted == {"forward_raises": True}:
        return "raise"
    if wanted:
        raise NoCounterpart(f"worker_fault: {wanted}")
    return ""


def control_message(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a control message as the protocol has it: `status` asks about one transfer."""
    return {**body, "transfer_id": "nobody"} if body == {"op": "status"} else dict(body)


def environment(folder: Path) -> dict[str, str | None]:
    """Return the variables `epdctl serve` gets on top of the test's own."""
    return {"ADMIN_API_KEY": ADMIN_KEY, "XDG_STATE_HOME": str(folder), "ENCODER_MAX_BATCH_SIZE": None}


def registration(entry: Mapping[str, Any], url: str) -> dict[str, Any]:
    """Return the body of `POST /instances` for one instance of a set-up."""
    body: dict[str, Any] = {"role": entry["role"], "url": url}
    for neutral in ("dp_size", "zmq", "labels", "model", "kv_bootstrap_addr"):
        if entry.get(neutral) is not None:
            body["ec_zmq_addrs" if neutral == "zmq" else neutral] = entry[neutral]
    return body


def translate_call(method: str, path: str, body: Any) -> tuple[str, Any]:
    """Return path and body as ours: `DELETE /instances` names the instance in its query."""
    if method == "DELETE" and path == "/instances" and isinstance(body, Mapping) and "url" in body:
        query = {key: value for key, value in body.items() if key in ("url", "drain", "timeout")}
        return f"{path}?{urllib.parse.urlencode(query)}", None
    return path, body


def states_of(listing: Any, url: str) -> list[str]:
    """Return every state under which a listing names a URL."""
    return [state for state, listed in _rows(listing) if listed == url]


def all_states(listing: Any) -> set[str]:
    """Return the states that occur in a listing."""
    return {state for state, _ in _rows(listing)}


def _rows(listing: Any) -> Iterator[tuple[str, str]]:
    for states in listing.values() if isinstance(listing, dict) else []:
        for state, urls in states.items():
            yield from ((state, url) for url in urls)


def state_names(neutral: str) -> tuple[str, ...]:
    """Return our names of a neutral state."""
    if neutral not in STATES:
        raise NoCounterpart(f"state: {neutral}")
    return STATES[neutral]


def metric_value(meaning: str, exposition: str) -> float:
    """Return the number that a meaning has in our exposition text."""
    samples = list(metric_samples(exposition))
    if meaning == "failure_count":
        return sum(
            value
            for name, labels, value in samples
            if name == "epdctl_requests_total" and labels.get("outcome") not in GOOD_OUTCOMES
        )
    if meaning in WORKER_METRIC_SUMS:
        series, label, counted = WORKER_METRIC_SUMS[meaning]
        return sum(value for name, labels, value in samples if name == series and labels[label] in counted)
    if meaning not in METRIC_SUMS:
        raise NoCounterpart(f"metrics: {meaning}")
    wanted, only = METRIC_SUMS[meaning]
    return sum(value for name, labels, value in samples if name == wanted and only.items() <= labels.items())


def metric_samples(exposition: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield name, labels and value of each sample of a text exposition."""
    for line in exposition.splitlines():
        if not line or line.startswith("#"):
            continue
        series, _, value = line.rpartition(" ")
        name, brace, labels = series.partition("{")
        pairs = labels.rstrip("}") if brace else ""
        yield name, dict(_label_pairs(pairs)), float(value)


def _label_pairs(text: str) -> Iterator[tuple[str, str]]:
    while text:
        name, _, rest = text.partition('="')
        end = 0
        while rest[end] != '"':
            end += 2 if rest[end] == "\\" else 1
        yield name.lstrip(","), rest[:end]
        text = rest[end + 1 :]


def in_flight_of(detail: Any, url: str) -> int | None:
    """Return the in-flight count of an instance in the detail listing, or None when it is not listed."""
    for entry in _detail_rows(detail):
        if entry.get("url") == url:
            return int(entry["in_flight"])
    return None


def _detail_rows(detail: Any) -> Sequence[Mapping[str, Any]]:
    rows = detail.get("instances", []) if isinstance(detail, dict) else detail
    return rows if isinstance(rows, list) else []


def json_bytes(value: Any) -> bytes:
    """Return compact JSON, as clients send it."""
    # Several times faster than the standard library on megabytes of base64: the harness shares one loop with
    # its stubs, and must not look like a slow proxy.
    return msgspec.json.encode(value)


def request_lines(log: str) -> list[dict[str, Any]]:
    """Return the log lines that are JSON objects."""
    found = []
    for line in log.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found
