"""Expectations on what an answer carries: JSON, text, streams, errors.

Rules of this file: as in `expect_client`: a check yields a sentence for each selected result that is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.cases import answers_view as view
from tests.cases.http_client import Result
from tests.cases.verdict import Check, Subject, as_list, cut
from tests.cases.world import World
from tests.stubs.instance import Call

Results = Subject[Result]


def each_result(subject: Results, wrong: Any) -> Iterator[str]:
    """Yield `wrong(result)` for each result where it is not None, naming the result."""
    if not subject.things:
        yield "no results are selected"
    for result in subject.things:
        problem = wrong(result)
        if problem is not None:
            yield f"{result.step}[{result.index}] ({cut(result.item, 80)}): {problem}; {_seen(result)}"


def _seen(result: Result) -> str:
    return f"status {result.status}, failure {result.failure}, body {cut(result.text)}"


def _json_path(subject: Results, wanted: Any) -> Iterator[str]:
    if isinstance(wanted, str):
        options = subject.words.get("one_of") or [subject.words.get("equals", subject.words.get("value"))]
        pairs = {wanted: options}
    else:
        pairs = {path: [value] for path, value in wanted.items()}
    for path, options in pairs.items():

        def wrong(result: Result, path: str = path, options: list[Any] = options) -> str | None:
            found = view.at_path(view.parse(result.body), path)
            return (
                None
                if any(view.matches(found, v) for v in options)
                else f"{path} is {cut(found)}, not {options}"
            )

        yield from each_result(subject, wrong)


def _json_has(subject: Results, paths: Any) -> Iterator[str]:
    for path in as_list(paths):
        yield from each_result(
            subject,
            lambda r, p=path: f"no {p}" if view.at_path(view.parse(r.body), p) is view.MISSING else None,
        )


def _json_absent(subject: Results, paths: Any) -> Iterator[str]:
    for path in as_list(paths):
        yield from each_result(
            subject,
            lambda r, p=path: f"has {p}" if view.at_path(view.parse(r.body), p) is not view.MISSING else None,
        )


def _json_parses(subject: Results, wanted: bool) -> Iterator[str]:
    yield from each_result(
        subject,
        lambda r: None if (view.parse(r.body) is not view.MISSING) is wanted else f"parses: {not wanted}",
    )


def _text(subject: Results, wanted: str) -> Iterator[str]:
    yield from each_result(
        subject,
        lambda r: None if wanted in (view.generated_text(r.body), r.text) else f"text is not {wanted!r}",
    )


def _text_contains(subject: Results, wanted: Any) -> Iterator[str]:
    for part in as_list(wanted):
        yield from each_result(
            subject,
            lambda r, p=part: None if p in view.generated_text(r.body) + r.text else f"text lacks {p!r}",
        )


def _body_contains(subject: Results, wanted: Any) -> Iterator[str]:
    for part in as_list(wanted):
        yield from each_result(subject, lambda r, p=part: None if p in r.text else f"body lacks {p!r}")


def _body_not_contains(subject: Results, banned: Any) -> Iterator[str]:
    for part in as_list(banned):
        yield from each_result(subject, lambda r, p=part: f"body has {p!r}" if p in r.text else None)


def _body_absent_or(subject: Results, allowed: Mapping[str, list[Any]]) -> Iterator[str]:
    for path, values in allowed.items():

        def wrong(result: Result, path: str = path, values: list[Any] = values) -> str | None:
            found = view.at_path(view.parse(result.body), path)
            return None if found is view.MISSING or found in values else f"{path} is {cut(found)}"

        yield from each_result(subject, wrong)


def _error_contains(subject: Results, wanted: Any) -> Iterator[str]:
    for part in as_list(wanted):
        yield from each_result(
            subject,
            lambda r, p=part: (
                None if p in str(view.at_path(view.parse(r.body), "error.message")) else f"lacks {p!r}"
            ),
        )


def _bytes_equal_upstream(subject: Results, wanted: bool) -> Iterator[str]:
    calls = decode_calls(subject.world)
    yield from each_result(
        subject, lambda r: None if any(r.body == call.sent for call in calls) is wanted else "bytes differ"
    )


def decode_calls(world: World) -> list[Call]:
    """Return the generation calls of the stubs that answer clients."""
    stubs = [stub for stub in world.stubs.values() if stub.role.value in ("decode", "prefill_decode")]
    return [call for stub in stubs for call in stub.chats]


def _same_as(subject: Results, other: str) -> Iterator[str]:
    wanted = subject.world.records.results[other][0]
    yield from each_result(
        subject, lambda r: None if _comparable(r) == _comparable(wanted) else f"differs from step {other!r}"
    )


def _equals_baseline(subject: Results, wanted: Any) -> Iterator[str]:
    if isinstance(wanted, str):
        yield from _same_as(subject, wanted)
        return
    first = subject.world.records.results[subject.words["step"]][0]
    yield from each_result(
        subject, lambda r: None if _comparable(r) == _comparable(first) else "differs from the first"
    )


def _comparable(result: Result) -> Any:
    value = view.parse(result.body)
    if not isinstance(value, dict):
        return result.status, result.body
    return result.status, {key: entry for key, entry in value.items() if key not in ("id", "created")}


def _ids(subject: Results, wanted: list[str]) -> Iterator[str]:
    def wrong(result: Result) -> str | None:
        data = view.at_path(view.parse(result.body), "data")
        found = sorted(entry.get("id") for entry in data) if isinstance(data, list) else data
        return None if found == sorted(wanted) else f"ids are {found}"

    yield from each_result(subject, wrong)


def _usage_chunks(subject: Results, wanted: int) -> Iterator[str]:
    yield from each_result(
        subject,
        lambda r: (
            None if view.usage_chunks(r.body) == wanted else f"{view.usage_chunks(r.body)} usage chunks"
        ),
    )


def _usage_cached_in(subject: Results, allowed: list[Any]) -> Iterator[str]:
    def wrong(result: Result) -> str | None:
        whole = view.parse(result.body)
        values = [whole] if isinstance(whole, dict) else list(view.sse_values(result.body))
        found = [view.at_path(value, "usage.prompt_tokens_details.cached_tokens") for value in values]
        cached = next((value for value in reversed(found) if value is not view.MISSING), None)
        return None if cached in allowed else f"cached tokens {cached}"

    yield from each_result(subject, wrong)


def _ec_items(subject: Results, wanted: int) -> Iterator[str]:
    def wrong(result: Result) -> str | None:
        params = view.at_path(view.parse(result.body), "ec_transfer_params")
        count = len(params) if isinstance(params, dict) else 0
        return None if count == wanted else f"{count} entries"

    yield from each_result(subject, wrong)


def _sse(subject: Results, wanted: str) -> Iterator[str]:
    yield from each_result(subject, lambda r: None if wanted in outcomes(r) else f"stream is not {wanted}")


def _sse_absent(subject: Results, banned: str) -> Iterator[str]:
    yield from each_result(subject, lambda r: f"stream has {banned!r}" if banned in r.text else None)


def outcomes(result: Result) -> set[Any]:
    """Return the words for how an answer ended, and its status."""
    found: set[Any] = {result.status}
    if result.failure is not None:
        found.add(result.failure)
    if result.status is not None and not result.complete and not result.aborted:
        found.add("transfer_aborted")
    if view.has_error_event(result.body):
        found.add("error_event")
    if view.sse_is_complete(result.body):
        found.add("complete")
    return found


def _one_of(subject: Results, words: list[Any]) -> Iterator[str]:
    if "json_path" in subject.words:
        return
    yield from each_result(
        subject, lambda r: None if outcomes(r) & set(words) else f"outcome {outcomes(r)} not in {words}"
    )


def _code(subject: Results, wanted: Any) -> Iterator[str]:
    yield from each_result(
        subject,
        lambda r: (
            None
            if view.at_path(view.parse(r.body), "error.code") in as_list(wanted)
            else f"code not {wanted}"
        ),
    )


BODY_CHECKS: dict[str, Check[Result]] = {
    "code": _code,
    "json_path": _json_path,
    "json_has": _json_has,
    "json_absent": _json_absent,
    "json_parses": _json_parses,
    "one_of": _one_of,
    "text": _text,
    "text_contains": _text_contains,
    "body_contains": _body_contains,
    "body_not_contains": _body_not_contains,
    "body_absent_or": _body_absent_or,
    "error_contains": _error_contains,
    "bytes_equal_upstream": _bytes_equal_upstream,
    "same_as": _same_as,
    "equals_baseline": _equals_baseline,
    "ids": _ids,
    "usage_chunks": _usage_chunks,
    "usage_cached_in": _usage_cached_in,
    "ec_items": _ec_items,
    "sse": _sse,
    "sse_absent": _sse_absent,
}
