"""Expectations on a client step: what the client saw.

Rules of this file: a check looks at the selected results and yields a sentence for each that is wrong; a rule
in words that is not coded here fails by name.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.cases import answers_view as view
from tests.cases.expect_body import BODY_CHECKS, decode_calls, each_result
from tests.cases.http_client import Result
from tests.cases.verdict import Check, Subject, as_list, run_checks
from tests.cases.vocabulary import word_set
from tests.cases.world import World

Results = Subject[Result]
MERGE_GAP_S = 0.02
MERGE = 2
"""Patches that the tiny model merges in each direction."""

MODIFIERS = word_set(
    "step index first_n last_n call except or unless optional alt_status equals value exactly_one_of each "
    "timeout_s"
)


def check_step(world: World, words: Mapping[str, Any]) -> Iterator[str]:
    """Yield the failures of an expectation on the results of one step."""
    results = world.records.results.get(words["step"])
    if not results:
        yield f"step {words['step']!r} has no results"
        return
    yield from run_checks(Subject(world, select(results, words), words), CHECKS, MODIFIERS)


def check_exactly_one(world: World, words: Mapping[str, Any]) -> Iterator[str]:
    """Yield a failure unless exactly one of the named steps meets the rest of the expectation."""
    rest = {key: value for key, value in words.items() if key != "exactly_one_of"}
    failures = {name: list(check_step(world, {"step": name, **rest})) for name in words["exactly_one_of"]}
    good = [name for name, found in failures.items() if not found]
    if len(good) != 1:
        yield f"exactly one of {words['exactly_one_of']} should hold, {good} do: {failures}"


def select(results: list[Result], words: Mapping[str, Any]) -> list[Result]:
    """Return the results an expectation is about."""
    for word in ("index", "call"):
        if word in words:
            return results[words[word] : words[word] + 1]
    if "first_n" in words:
        return results[: words["first_n"]]
    if "last_n" in words and "last_status" not in words:
        return results[-words["last_n"] :]
    kept = [result for result in results if not _is_excepted(result, words)]
    if "unless" in words:
        excused = re.fullmatch(r"status (\d+)\b.*", words["unless"])
        if excused is None:
            raise ValueError(f"unless {words['unless']!r} is not coded")
        kept = [result for result in kept if result.status != int(excused.group(1))]
    return kept


def _is_excepted(result: Result, words: Mapping[str, Any]) -> bool:
    return any(result.item == item for item in words.get("except", ()))


def _status(subject: Results, allowed: Any) -> Iterator[str]:
    alternative = subject.words.get("or")

    def wrong(result: Result) -> str | None:
        fits = result.status in as_list(allowed) or (
            alternative is not None and result.failure == alternative
        )
        return None if fits else f"status not in {allowed}"

    yield from each_result(subject, wrong)


def _never_status(subject: Results, banned: Any) -> Iterator[str]:
    yield from each_result(
        subject,
        lambda r: (
            f"status must never be in {banned}" if r.status is None or r.status in as_list(banned) else None
        ),
    )


def _last_status(subject: Results, allowed: Any) -> Iterator[str]:
    last = Subject(subject.world, subject.things[-subject.words.get("last_n", 1) :], subject.words)
    yield from _status(last, allowed)


def _status_equals_variant(subject: Results, value: Any) -> Iterator[str]:
    translations = subject.words.get("alt_status", {})

    def wrong(result: Result) -> str | None:
        own = (subject.world.records.variants[result.index] or {}).get("status")
        others = translations.get(str(own), []) if isinstance(translations, dict) else translations
        return None if result.status in [own, *as_list(others)] else f"status is not the upstream's {own}"

    yield from each_result(subject, wrong)


def _header(subject: Results, wanted: Mapping[str, Any]) -> Iterator[str]:
    for name, value in wanted.items():
        yield from each_result(
            subject,
            lambda r, n=name, v=value: None if _header_fits(n, r.header(n), v) else f"{n}: {r.header(n)!r}",
        )


def _header_fits(name: str, found: str | None, wanted: Any) -> bool:
    if name.lower() == "content-type" and found is not None and not str(wanted).startswith("~"):
        return found.split(";")[0].strip() == str(wanted).split(";")[0].strip()
    return any(view.matches(found, value) for value in as_list(wanted))


def _header_not(subject: Results, banned: Mapping[str, Any]) -> Iterator[str]:
    for name, value in banned.items():
        yield from each_result(
            subject, lambda r, n=name, v=value: f"{n} is {v!r}" if r.header(n) == v else None
        )


def _header_absent(subject: Results, names: Any) -> Iterator[str]:
    for name in as_list(names):
        yield from each_result(
            subject, lambda r, n=name: f"has header {n}" if r.header(n) is not None else None
        )


def _header_max_len(subject: Results, most: int) -> Iterator[str]:
    yield from each_result(
        subject,
        lambda r: "a header is too long" if any(len(value) > most for _, value in r.headers) else None,
    )


def _first_byte_ms_max(subject: Results, most: float) -> Iterator[str]:
    yield from each_result(
        subject,
        lambda r: (
            None
            if r.first_byte_at is not None and (r.first_byte_at - r.started) * 1000 <= most
            else "first byte too late"
        ),
    )


def _first_byte_after_upstream(subject: Results, most: float) -> Iterator[str]:
    def wrong(result: Result) -> str | None:
        sent = [
            c.first_sent_at for c in decode_calls(subject.world) if c.first_sent_at and c.at >= result.started
        ]
        if not sent or not result.pieces:
            return "no bytes to compare"
        late = (result.pieces[0][0] - min(sent)) * 1000
        return None if late <= most else f"first byte {late:.0f} ms after the upstream's"

    yield from each_result(subject, wrong)


def _max_latency_ms(subject: Results, most: float) -> Iterator[str]:
    stalls = subject.world.stalls
    took = [
        (r.ended - r.started - stalls.within(r.started, r.ended) - r.starved_s) * 1000 for r in subject.things
    ]
    if max(took) > most:
        yield f"slowest of {len(took)} took {max(took):.0f} ms, allowed {most}"


def _max_s(subject: Results, most: float) -> Iterator[str]:
    yield from _max_latency_ms(subject, most * 1000)


def _min_gap_ms(subject: Results, least: float) -> Iterator[str]:
    def wrong(result: Result) -> str | None:
        moments: list[float] = []
        for at, _ in result.pieces:
            if not moments or at - moments[-1] > MERGE_GAP_S:
                moments.append(at)
        gaps = [(b - a) * 1000 for a, b in itertools.pairwise(moments)]
        return None if gaps and min(gaps) >= least else f"gaps of {[round(gap) for gap in gaps]} ms"

    yield from each_result(subject, wrong)


def _closed_within(subject: Results, most: float) -> Iterator[str]:
    yield from each_result(
        subject, lambda r: None if r.ended - r.started <= most else f"open for {r.ended - r.started:.1f} s"
    )


def _if_200(subject: Results, rule: Any) -> Iterator[str]:
    good = [result for result in subject.things if result.status == 200]
    if isinstance(rule, str) and rule in RULES_OF_ROWS:
        yield from each_result(Subject(subject.world, good, subject.words), RULES_OF_ROWS[rule])
    elif not isinstance(rule, Mapping):
        yield f"the rule {rule!r} is not coded here"
    elif good:
        yield from run_checks(Subject(subject.world, good, rule), CHECKS, MODIFIERS)


def _grid(result: Result) -> list[int]:
    entries = view.at_path(view.parse(result.body), "ec_transfer_params")
    assert isinstance(entries, dict) and len(entries) == 1, result.text
    return list(next(iter(entries.values()))["metadata"]["image_grid_thw"])


def _rows_fit_the_grid(result: Result) -> str | None:
    grid, rows = _grid(result), result.reply["rows"]
    return None if rows == math.prod(grid) // MERGE**2 else f"{rows} rows for the grid {grid}"


def _has_rows(result: Result) -> str | None:
    return None if result.reply["rows"] >= 1 else f"{result.reply['rows']} rows"


RULES_OF_ROWS: Mapping[str, Callable[[Result], str | None]] = {
    "rows==prod(grid)//merge**2": _rows_fit_the_grid,
    "rows>=1": _has_rows,
}


def _grid_hw(subject: Results, wanted: str) -> Iterator[str]:
    def wrong(result: Result) -> str | None:
        _, height, width = _grid(result)
        shape = "tall" if height > width else "wide" if width > height else "square"
        return None if shape == wanted else f"the grid {_grid(result)} is {shape}"

    yield from each_result(subject, wrong)


def _reply(subject: Results, wanted: Mapping[str, Any]) -> Iterator[str]:
    """Judge the answers to a control message; a refusal must say why."""
    limit = subject.words.get("timeout_s", float("inf"))

    def wrong(result: Result) -> str | None:
        for reply in result.reply:
            if reply is None or not wanted.items() <= reply.items():
                return f"reply {reply}"
            if reply["ok"] is False and not reply.get("error"):
                return f"no reason in {reply}"
        return None if result.ended - result.started <= limit else "it took too long"

    yield from each_result(subject, wrong)


def _push(subject: Results, wanted: str) -> Iterator[str]:
    yield from each_result(subject, lambda r: None if r.reply["push"] == wanted else f"push: {r.reply}")


CHECKS: dict[str, Check[Result]] = {
    "grid_hw": _grid_hw,
    "push": _push,
    "reply": _reply,
    **BODY_CHECKS,
    "status": _status,
    "never_status": _never_status,
    "last_status": _last_status,
    "status_equals_variant": _status_equals_variant,
    "header": _header,
    "header_not": _header_not,
    "header_absent": _header_absent,
    "header_max_len": _header_max_len,
    "first_byte_ms_max": _first_byte_ms_max,
    "first_byte_after_upstream_ms_max": _first_byte_after_upstream,
    "max_latency_ms": _max_latency_ms,
    "max_s": _max_s,
    "min_gap_ms": _min_gap_ms,
    "client_closed_within_s": _closed_within,
    "if_200": _if_200,
}
