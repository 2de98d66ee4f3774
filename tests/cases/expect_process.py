"""Expectations on the product's process and its outputs: logs, metrics, registry, memory, exits.

Rules of this file: numbers that settle a moment after the steps (gauges, closed connections) are waited for,
at most PATIENCE_S; everything else is judged as it stands.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.cases import answers_view as view
from tests.cases import product
from tests.cases.verdict import as_list, cut
from tests.cases.vocabulary import word_set
from tests.cases.world import World, time_wait_sockets

PATIENCE_S = 3.0
MEGABYTE = 1_000_000
Failures = AsyncIterator[str]


async def _log(world: World, words: Mapping[str, Any]) -> Failures:
    """Judge the log; a line that should be there may come a moment after the answer it is about."""

    async def problems() -> list[str]:
        return list(_log_problems(world, words))

    async def holds() -> bool:
        return not await problems()

    if not await settles(holds, 0 if words["log"] in ("absent", "lines_printable") else PATIENCE_S):
        for problem in await problems():
            yield problem


def _log_problems(world: World, words: Mapping[str, Any]) -> Iterator[str]:
    logs, kind = world.logs, words["log"]
    texts = as_list(words.get("text", ""))
    if kind == "absent":
        for text in texts:
            lines = [line for line in logs.splitlines() if text in line]
            if lines:
                yield f"the log has {text!r}: {cut(lines[0])}"
    elif kind == "contains":
        yield from (f"the log lacks {text!r}" for text in texts if text not in logs)
    elif kind == "count":
        found = _count_lines(world, logs, texts[0], words.get("instance"))
        most, exact = words.get("max"), words.get("equals")
        if (most is not None and found > most) or (exact is not None and found != exact):
            yield f"the log has {found} lines with {texts[0]!r}"
    elif kind == "json_line":
        problem = _json_line(logs, words.get("where") or {}, words.get("has") or [])
        if problem is not None:
            yield problem
    elif kind == "lines_printable":
        bad = [line for line in logs.splitlines() if not line.isprintable()]
        if bool(bad) is words.get("value", True):
            yield f"not printable: {cut(bad[0]) if bad else 'nothing'}"
    else:
        yield f"log {kind!r} is not coded here"


def _count_lines(world: World, logs: str, text: str, instance: str | None) -> int:
    url = world.url_of(instance) if instance else ""
    return sum(1 for line in logs.splitlines() if text.lower() in line.lower() and url in line)


def _json_line(logs: str, where: Mapping[str, Any], has: list[str]) -> str | None:
    lines = [line for line in product.request_lines(logs) if where.items() <= line.items()]
    if any(all(view.at_path(line, key) is not view.MISSING for key in has) for line in lines):
        return None
    return f"no JSON line with {dict(where)} and {has}; of {len(lines)} lines: {cut(lines)}"


async def _metrics(world: World, words: Mapping[str, Any]) -> Failures:
    meaning = words["metrics"]
    if meaning in product.UNCOUNTED and words.get("optional"):
        return

    async def value() -> float:
        return product.metric_value(meaning, (await world.ask("GET", "/metrics")).text)

    at_start = product.metric_value(meaning, world.records.metrics_at_start)
    # A shared process has counted for other cases too.
    before = at_start if meaning in product.COUNTERS_OF_SHARED else 0
    tests: dict[str, Callable[[float], bool]] = {
        "equals": lambda now: now - before == words["equals"],
        "value": lambda now: now == words["value"],
        "max": lambda now: now <= words["max"],
        "delta": lambda now: now - at_start == words["delta"],
        "equals_baseline": lambda now: now == at_start,
    }
    chosen = [test for word, test in tests.items() if word in words]
    if not chosen:
        yield f"nothing to check in {dict(words)}"
        return

    async def holds() -> bool:
        now = await value()
        return all(test(now) for test in chosen)

    if not await settles(holds):
        yield f"metric {meaning} is {await value()}, was {at_start} at the start; wanted {dict(words)}"


async def settles(holds: Callable[[], Awaitable[bool]], patience_s: float = PATIENCE_S) -> bool:
    """Return whether a condition holds within `patience_s`."""
    deadline = time.monotonic() + patience_s
    while not await holds():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


async def _series_growth(world: World, words: Mapping[str, Any]) -> Failures:
    counts = [
        len(list(product.metric_samples(world.records.results[words[end]][-1].text)))
        for end in ("from", "to")
    ]
    if counts[1] - counts[0] > words["series_growth_max"]:
        yield f"metric series grew from {counts[0]} to {counts[1]}"


async def _listing(world: World, words: Mapping[str, Any]) -> Any:
    if "step" in words:
        return view.parse(world.records.results[words["step"]][-1].body)
    return view.parse((await world.ask("GET", "/instances")).body)


async def _state(world: World, words: Mapping[str, Any]) -> Failures:
    listing = await _listing(world, words)
    states = product.states_of(listing, world.url_of(words["instance"]))
    wanted = product.state_names(words["state"])
    if len(states) != 1 or states[0] not in wanted:
        yield f"{words['instance']} is listed as {states}, not {wanted}: {cut(listing, 600)}"


async def _all_state(world: World, words: Mapping[str, Any]) -> Failures:
    listing = await _listing(world, words)
    others = product.all_states(listing) - set(product.state_names(words["all_state"]))
    if others:
        yield f"some instances are {others}: {cut(listing, 600)}"


async def _count(world: World, words: Mapping[str, Any]) -> Failures:
    listing = await _listing(world, words)
    for name, wanted in words["count"].items():
        found = len(product.states_of(listing, world.url_of(name)))
        if found != wanted:
            yield f"{name} is listed {found} times, not {wanted}"


async def _in_flight(world: World, words: Mapping[str, Any]) -> Failures:
    for name, wanted in words["in_flight"].items():
        url = world.url_of(name)

        async def holds(url: str = url, wanted: int = wanted) -> bool:
            return product.in_flight_of(await _detail(world), url) == wanted

        if not await settles(holds):
            yield f"{name} has not {wanted} requests in flight: {cut(await _detail(world), 900)}"


async def _detail(world: World) -> Any:
    return view.parse((await world.ask("GET", "/instances?view=detail")).body)


async def _canary(world: World, words: Mapping[str, Any]) -> Failures:
    wanted = words.get("equals", words.get("value", 0))
    if words["canary"] != "connections" or world.canary.connections != wanted:
        yield f"the canary saw {world.canary.connections} {words['canary']}, not {wanted}"


async def _sum_calls(world: World, words: Mapping[str, Any]) -> Failures:
    found = sum(len(world.stubs[name].chats) for name in words["sum_calls"])
    if found > words.get("max", found) or found != words.get("equals", found):
        yield f"{words['sum_calls']} got {found} calls together; wanted {dict(words)}"


async def _pairing(world: World, words: Mapping[str, Any]) -> Failures:
    """Judge which stubs served one request together; the only rule coded is that they share a group."""
    if "group" not in str(words["pairing"]):
        yield f"the pairing {words['pairing']!r} is not coded here"
        return
    groups = {entry["name"]: (entry.get("labels") or {}).get("group") for entry in world.case.instances}
    for request_id, names in _stubs_by_request(world).items():
        used = {groups[name] for name in names} - {None}
        if len(used) > 1:
            yield f"request {request_id} was served by {sorted(names)} of the groups {used}"


def _stubs_by_request(world: World) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, stub in world.stubs.items():
        for call in stub.chats:
            request_id = (call.header("x-request-id") or "").partition(":")[0]
            found.setdefault(request_id, set()).add(name)
    return found


async def _no_orphan(world: World, words: Mapping[str, Any]) -> Failures:
    names = as_list(words.get("upstream", "*"))
    stubs = [stub for name, stub in world.stubs.items() if "*" in names or name in names]

    async def none_open() -> bool:
        return all(call.ended_at is not None for stub in stubs for call in stub.chats)

    patience = words["no_orphan_upstream_connection_after_s"]
    if not await settles(none_open, patience):
        yield f"{patience} s later an upstream call is still open"


async def _exits(world: World, words: Mapping[str, Any]) -> Failures:
    limit = words["exit_nonzero_within_s"]
    if not world.records.exits:
        yield "no process was expected to exit"
    for process, seconds in world.records.exits:
        if process.exit_code in (None, 0) or seconds > limit:
            command = " ".join(process.command)
            yield f"{command}: exit code {process.exit_code} after {seconds:.1f} s: {cut(process.stderr)}"
        if words.get("no_traceback") and "Traceback" in process.logs:
            yield f"a traceback: {process.log_tail(1500)}"
        if "stderr_contains" in words and words["stderr_contains"] not in process.stderr:
            yield f"stderr lacks {words['stderr_contains']!r}: {cut(process.stderr)}"
        if len(process.stderr.splitlines()) > words.get("stderr_lines_max", 10**6):
            yield f"stderr has {len(process.stderr.splitlines())} lines"


async def _proxy_exit(world: World, words: Mapping[str, Any]) -> Failures:
    process, signalled = world.process, world.records.stop_signalled_at
    if process is None or signalled is None:
        yield "the product was never told to stop"
        return
    limit = words["proxy_exit_within_s"]

    async def ended() -> bool:
        return process.exit_code is not None

    if not await settles(ended, signalled + limit - time.monotonic()):
        yield f"still running {limit} s after the signal"
    elif "code" in words and process.exit_code not in as_list(words["code"]):
        yield f"exit code {process.exit_code}"


async def _memory_growth(world: World, words: Mapping[str, Any]) -> Failures:
    marks = [world.records.memory[words[end]].rss_bytes for end in ("from", "to")]
    grown = (marks[1] - marks[0]) / MEGABYTE
    if grown > words["rss_growth_mb_max"]:
        yield f"memory grew by {grown:.1f} MB"


async def _peak_growth(world: World, words: Mapping[str, Any]) -> Failures:
    assert world.process is not None
    grown = (world.process.peak_rss_bytes() - world.records.rss_at_start) / MEGABYTE
    if grown > words["proxy_rss_growth_mb_max"]:
        yield f"memory peaked {grown:.1f} MB above the start"


async def _time_wait(world: World, words: Mapping[str, Any]) -> Failures:
    grown = time_wait_sockets(s.port for s in world.stubs.values()) - world.records.time_wait_at_start
    if grown > words["time_wait_growth_max"]:
        yield f"{grown} more sockets in TIME_WAIT"


async def _scan_hits(world: World, words: Mapping[str, Any]) -> Failures:
    if world.records.scan_hits != words["scan_hits"]:
        yield f"the source scan hit {world.records.scan_hits} times, not {words['scan_hits']}"


async def _process(world: World, words: Mapping[str, Any]) -> Failures:
    alive = world.process is not None and world.process.exit_code is None
    if words["process"] != "alive" or not alive:
        yield f"the product is {'alive' if alive else 'dead'}, not {words['process']}"


async def _path_absent(world: World, words: Mapping[str, Any]) -> Failures:
    path = Path(words["path_absent"])
    if await asyncio.to_thread(path.exists):
        yield f"{words['path_absent']} exists"


PROCESS_CHECKS: dict[str, Callable[[World, Mapping[str, Any]], Failures]] = {
    "log": _log,
    "metrics": _metrics,
    "series_growth_max": _series_growth,
    "state": _state,
    "all_state": _all_state,
    "count": _count,
    "in_flight": _in_flight,
    "canary": _canary,
    "sum_calls": _sum_calls,
    "pairing": _pairing,
    "no_orphan_upstream_connection_after_s": _no_orphan,
    "exit_nonzero_within_s": _exits,
    "proxy_exit_within_s": _proxy_exit,
    "rss_growth_mb_max": _memory_growth,
    "proxy_rss_growth_mb_max": _peak_growth,
    "time_wait_growth_max": _time_wait,
    "scan_hits": _scan_hits,
    "process": _process,
    "path_absent": _path_absent,
}
WORKER_WORDS = word_set(
    "exit_within_s others_exit_nonzero_within_s started worker_rss_growth_mb_max lost max_stall_s "
    "engine debug push each_push reply reply_ok reply_not"
)
"""Expectations that only the encode worker's part can meet."""
