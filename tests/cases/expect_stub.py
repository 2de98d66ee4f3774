"""Expectations on a stub: what an instance, a consumer or the file server received.

Rules of this file: body and header checks look at generation calls only, unless `path` or `"*"` says
otherwise; a rule in words that is not coded here fails by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.cases import answers_view as view
from tests.cases import product
from tests.cases.verdict import Check, Subject, as_list, cut, run_checks
from tests.cases.vocabulary import word_set
from tests.cases.world import World
from tests.stubs.answers import embeds_parts
from tests.stubs.consumer import ControlCall
from tests.stubs.instance import Call, StubInstance

Calls = Subject[Call]
PATIENCE_S = 2.0
STUB_MODIFIERS = word_set("upstream path call index max equals unless if_200 except")


def check_upstream(world: World, words: Mapping[str, Any]) -> Iterator[str]:
    """Yield the failures of an expectation on one stub instance, or on all with `*`."""
    calls = calls_of(world, words)
    for number in (words[word] for word in ("call", "index") if word in words):
        calls = calls[number : number + 1]
    yield from run_checks(Subject(world, calls, words), UPSTREAM_CHECKS, STUB_MODIFIERS)


def stubs_of(world: World, words: Mapping[str, Any]) -> list[StubInstance]:
    """Return the stubs an expectation names."""
    name = words["upstream"]
    return list(world.stubs.values()) if name == "*" else [world.stubs[name]]


def calls_of(world: World, words: Mapping[str, Any]) -> list[Call]:
    """Return the calls an expectation is about."""
    stubs = stubs_of(world, words)
    if "path" in words:
        return [call for stub in stubs for call in stub.calls if call.path == words["path"]]
    if words["upstream"] == "*":
        return [call for stub in stubs for call in stub.calls]
    return stubs[0].chats


def _body(call: Call) -> Any:
    return view.parse(call.body)


def _each(subject: Calls, wrong: Any) -> Iterator[str]:
    if not subject.things:
        yield f"{subject.words['upstream']}: no calls"
    for number, call in enumerate(subject.things):
        problem = wrong(call)
        if problem is not None:
            where = f"{subject.words['upstream']} call {number} {call.path}"
            yield f"{where}: {problem}; body {cut(call.body.decode('utf-8', 'replace'))}"


def _calls(subject: Calls, wanted: int) -> Iterator[str]:
    if len(subject.things) != wanted:
        yield f"{subject.words['upstream']} got {len(subject.things)} calls, not {wanted}"


def _calls_at_least(subject: Calls, least: int) -> Iterator[str]:
    if len(subject.things) < least:
        yield f"{subject.words['upstream']} got {len(subject.things)} calls, fewer than {least}"


def _max_calls(subject: Calls, most: int) -> Iterator[str]:
    if len(subject.things) > most:
        yield f"{subject.words['upstream']} got {len(subject.things)} calls, more than {most}"


def _calls_by_step(subject: Calls, wanted: Mapping[str, int]) -> Iterator[str]:
    for step, count in wanted.items():
        windows = [(r.started, r.ended) for r in subject.world.records.results[step]]
        found = sum(1 for call in subject.things if any(a <= call.at <= b for a, b in windows))
        if found != count:
            yield f"{subject.words['upstream']} got {found} calls during step {step!r}, not {count}"


def _no_calls_after(subject: Calls, seconds: float) -> Iterator[str]:
    began = subject.world.records.last_fault_at.get(
        subject.words["upstream"], subject.world.records.steps_began
    )
    late = [call for call in subject.things if call.at > began + seconds]
    if late:
        yield f"{subject.words['upstream']} still got {len(late)} calls later than {seconds} s"


def _body_path(subject: Calls, wanted: Mapping[str, Any]) -> Iterator[str]:
    for path, value in wanted.items():

        def wrong(call: Call, path: str = path, value: Any = value) -> str | None:
            found = view.at_path(_body(call), path)
            return None if view.matches(found, value) else f"{path} is {cut(found)}, not {value!r}"

        yield from _each(subject, wrong)


def _if_called(subject: Calls, wanted: Any) -> Iterator[str]:
    if not isinstance(wanted, Mapping):
        yield f"the rule {wanted!r} is not coded here"
    elif subject.things:
        yield from _body_path(subject, wanted)


def _absent(subject: Calls, paths: Any) -> Iterator[str]:
    for path in as_list(paths):
        yield from _each(
            subject, lambda c, p=path: f"has {p}" if view.at_path(_body(c), p) is not view.MISSING else None
        )


def _has(subject: Calls, paths: Any) -> Iterator[str]:
    for path in as_list(paths):
        yield from _each(
            subject, lambda c, p=path: f"no {p}" if view.at_path(_body(c), p) is view.MISSING else None
        )


def _body_absent_or(subject: Calls, allowed: Mapping[str, list[Any]]) -> Iterator[str]:
    for path, values in allowed.items():

        def wrong(call: Call, path: str = path, values: list[Any] = values) -> str | None:
            found = view.at_path(_body(call), path)
            return None if found is view.MISSING or found in values else f"{path} is {cut(found)}"

        yield from _each(subject, wrong)


def _body_not_contains(subject: Calls, banned: Any) -> Iterator[str]:
    for part in as_list(banned):
        yield from _each(subject, lambda c, p=part: f"body has {p!r}" if p.encode() in c.body else None)


def _body_contains(subject: Calls, wanted: Any) -> Iterator[str]:
    for part in as_list(wanted):
        yield from _each(subject, lambda c, p=part: None if p.encode() in c.body else f"body lacks {p!r}")


def _body_equals_client_except(subject: Calls, keys: list[str]) -> Iterator[str]:
    sent = [
        r.request_json for found in subject.world.records.results.values() for r in found if r.request_json
    ]
    wanted = [_without(body, keys) for body in sent]
    yield from _each(
        subject,
        lambda c: None if _without(_body(c), keys) in wanted else f"differs from the client's beyond {keys}",
    )


def _without(body: Any, keys: list[str]) -> Any:
    return {key: value for key, value in body.items() if key not in keys} if isinstance(body, dict) else body


def _paths(subject: Calls, allowed: list[str]) -> Iterator[str]:
    stub = stubs_of(subject.world, subject.words)[0]
    base = stub.behaviour.base_path
    known = {*allowed, *(base + path for path in product.OWN_UPSTREAM_PATHS)}
    others = {call.path for call in stub.calls} - known
    if others:
        yield f"{subject.words['upstream']} was asked for {sorted(others)}"


def _header(subject: Calls, wanted: Mapping[str, Any]) -> Iterator[str]:
    for name, value in wanted.items():
        yield from _each(
            subject,
            lambda c, n=name, v=value: (
                None
                if any(view.matches(c.header(n), option) for option in as_list(v))
                else f"{n} is {c.header(n)!r}"
            ),
        )


def _each_header(subject: Calls, allowed: Mapping[str, list[Any]]) -> Iterator[str]:
    for name, values in allowed.items():
        yield from _each(
            subject,
            lambda c, n=name, v=values: None if c.header(n) in v else f"{n} is {c.header(n)!r}, not in {v}",
        )


def _header_not(subject: Calls, banned: Mapping[str, Any]) -> Iterator[str]:
    for name, value in banned.items():
        yield from _each(subject, lambda c, n=name, v=value: f"{n} is {v!r}" if c.header(n) == v else None)


def _header_absent(subject: Calls, names: Any) -> Iterator[str]:
    for name in as_list(names):
        yield from _each(subject, lambda c, n=name: f"has header {n}" if c.header(n) is not None else None)


def _header_max_len(subject: Calls, most: int) -> Iterator[str]:
    yield from _each(
        subject,
        lambda c: (
            f"a header is longer than {most}" if any(len(value) > most for _, value in c.headers) else None
        ),
    )


def _distinct_header(subject: Calls, wanted: Mapping[str, int]) -> Iterator[str]:
    for name, count in wanted.items():
        found = {call.header(name) for call in subject.things}
        if len(found) != count:
            yield f"{subject.words['upstream']}: {len(found)} values of {name}, not {count}: {found}"


def _uuids(call: Call) -> list[str]:
    return [str(part.get("uuid")) for part in view.all_media(_body(call))]


def _distinct_uuids(subject: Calls, wanted: int) -> Iterator[str]:
    found = {uuid for call in subject.things for uuid in _uuids(call)}
    if len(found) != wanted or "None" in found:
        yield f"{subject.words['upstream']}: {len(found)} distinct media uuids, not {wanted}: {sorted(found)}"


def _mm_uuid_relation(subject: Calls, rule: str) -> Iterator[str]:
    each = [tuple(_uuids(call)) for call in subject.things]
    same, distinct = len(set(each)) == 1, len(set(each)) == len(each)
    known = {"equal": same, "same": same, "distinct": distinct, "different": distinct}
    if rule not in known:
        yield f"the relation {rule!r} is not coded here"
    elif not known[rule]:
        yield f"{subject.words['upstream']}: media uuids are not {rule}: {each}"


def _mm_parts(subject: Calls, wanted: int) -> Iterator[str]:
    yield from _each(
        subject,
        lambda c: (
            None
            if len(view.all_media(_body(c))) == wanted
            else f"{len(view.all_media(_body(c)))} media parts"
        ),
    )


def _mm_order(subject: Calls, wanted: list[str]) -> Iterator[str]:
    by_uuid = uuid_names(subject.world)
    by_url = subject.world.pictures.names_by_url

    def wrong(call: Call) -> str | None:
        found = view.media_names(_body(call), by_url, by_uuid)
        return None if found == wanted else f"media in order {found}"

    yield from _each(subject, wrong)


def uuid_names(world: World) -> dict[str, str]:
    """Return the file name of each media uuid, from what the encoders were sent."""
    by_url = world.pictures.names_by_url
    names: dict[str, str] = {}
    for stub in world.stubs.values():
        for call in stub.chats:
            parts = view.raw_media(_body(call))
            for part, name in zip(parts, view.media_names(_body(call), by_url, {}), strict=False):
                if name is not None and part.get("uuid") is not None:
                    names[str(part["uuid"])] = name
    return names


def _no_raw_image(subject: Calls, wanted: bool) -> Iterator[str]:
    yield from _each(
        subject,
        lambda c: None if (not view.raw_media(_body(c))) is wanted else f"raw media: {wanted} wanted none",
    )


def _grid_hw(subject: Calls, wanted: str) -> Iterator[str]:
    def wrong(call: Call) -> str | None:
        grids = [part["image_embeds"]["image_grid_thw"] for part in embeds_parts(_body(call))]
        shapes = ["tall" if g[1] > g[2] else "wide" if g[2] > g[1] else "square" for g in grids]
        return None if shapes and set(shapes) == {wanted} else f"grids {grids}"

    yield from _each(subject, wrong)


def _max_concurrent_health(subject: Calls, most: int) -> Iterator[str]:
    for stub in stubs_of(subject.world, subject.words):
        if stub.most_concurrent_health > most:
            yield f"{stub.name} had {stub.most_concurrent_health} health probes at once"


def _max_connections(subject: Calls, most: int) -> Iterator[str]:
    for stub in stubs_of(subject.world, subject.words):
        if stub.connections_accepted > most:
            yield f"{stub.name} accepted {stub.connections_accepted} connections, more than {most}"


def _client_closed_within(subject: Calls, most: float) -> Iterator[str]:
    def wrong(call: Call) -> str | None:
        if call.client_left_at is None:
            return "its client never left"
        after = call.client_left_at - call.at
        return None if after <= most else f"its client left after {after:.2f} s"

    yield from _each(subject, wrong)


def _registrations(subject: Calls, wanted: int) -> Iterator[str]:
    stubs = stubs_of(subject.world, subject.words)
    found = sum(1 for s in stubs for c in s.calls if c.method == "POST" and c.path.endswith("/instances"))
    if found != wanted:
        yield f"{subject.words['upstream']} got {found} registrations, not {wanted}"


UPSTREAM_CHECKS: dict[str, Check[Call]] = {
    "calls": _calls,
    "calls_at_least": _calls_at_least,
    "max_calls": _max_calls,
    "calls_by_step": _calls_by_step,
    "no_calls_after_s": _no_calls_after,
    "body_path": _body_path,
    "each_body_path": _body_path,
    "if_called": _if_called,
    "absent": _absent,
    "has": _has,
    "body_absent_or": _body_absent_or,
    "body_not_contains": _body_not_contains,
    "body_contains": _body_contains,
    "body_equals_client_except": _body_equals_client_except,
    "paths": _paths,
    "header": _header,
    "each_header": _each_header,
    "header_not": _header_not,
    "header_absent": _header_absent,
    "header_max_len": _header_max_len,
    "distinct_header": _distinct_header,
    "distinct_mm_uuid_over_calls": _distinct_uuids,
    "mm_uuid_relation": _mm_uuid_relation,
    "mm_parts": _mm_parts,
    "mm_order": _mm_order,
    "no_raw_image": _no_raw_image,
    "grid_hw": _grid_hw,
    "max_concurrent_health": _max_concurrent_health,
    "max_connections_accepted": _max_connections,
    "client_closed_within_s": _client_closed_within,
    "upstream_registrations": _registrations,
}


def check_consumer(world: World, words: Mapping[str, Any]) -> Iterator[str]:
    """Yield the failures of an expectation on one stub EC consumer."""
    calls = world.consumers[words["consumer"]].calls
    yield from run_checks(Subject(world, list(calls), words), CONSUMER_CHECKS, frozenset({"consumer"}))


def _consumer_calls(subject: Subject[ControlCall], wanted: Any) -> Iterator[str]:
    counts = wanted if isinstance(wanted, Mapping) else {None: wanted}
    for op, count in counts.items():
        found = sum(1 for call in subject.things if op is None or call.op == op)
        if found != count:
            yield f"{subject.words['consumer']} got {found} {op or 'control'} calls, not {count}"


def _each_reserve(subject: Subject[ControlCall], wanted: Mapping[str, Any]) -> Iterator[str]:
    reserves = [call.body for call in subject.things if call.op == "reserve"]
    reserves += [item for call in subject.things if call.op == "reserve_batch" for item in call.body["items"]]
    if not reserves:
        yield f"{subject.words['consumer']}: nothing was reserved"
    for number, body in enumerate(reserves):
        for path, value in wanted.items():
            if not view.matches(view.at_path(body, path), value):
                found = cut(view.at_path(body, path))
                yield f"{subject.words['consumer']} reserve {number}: {path} is {found}"


CONSUMER_CHECKS: dict[str, Check[ControlCall]] = {"calls": _consumer_calls, "each_reserve": _each_reserve}


def check_file_server(world: World, words: Mapping[str, Any]) -> Iterator[str]:
    """Yield the failures of an expectation on how often a path of the file server was fetched."""
    path = words["fileserver"] if isinstance(words["fileserver"], str) else words.get("path")
    found = world.files.requests[path] if path else sum(world.files.requests.values())
    fits: dict[str, Callable[[int], bool]] = {
        "calls": lambda wanted: found == wanted,
        "max_calls": lambda most: found <= most,
        "calls_at_least": lambda least: found >= least,
    }
    named = [word for word in fits if word in words]
    if not named:
        yield f"nothing to check in {dict(words)}"
    for word in named:
        if not fits[word](words[word]):
            yield f"file server: {path or 'all paths'} fetched {found} times, {word} {words[word]}"
