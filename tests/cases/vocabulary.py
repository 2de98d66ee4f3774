"""The whole vocabulary of the case format; what is not in it is reported by name, never ignored.

Rules of this file: pure; the tables are the format's, not the product's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.cases.loader import PROXY_TARGETS, WORKER_TARGETS, Case


def word_set(text: str) -> frozenset[str]:
    """Return the words of a text, each once."""
    return frozenset(text.split())


TOP = word_set(
    "id kind title sources right note target config setup steps expect matrix variants generator "
    "frames_b64 raw_bodies headers_raw_b64 matrix_product canary files nightly"
)
CONFIG = word_set(
    "allowed_media_hosts cache_bytes connect_timeout_s decode_first_byte_timeout_s encode_timeout_s "
    "prefill_timeout_s stream_idle_timeout_s stage_timeout_s evicted_ttl_s fail_threshold "
    "probe_interval_s probe_timeout_s max_body_bytes shutdown_grace_s log_level store"
)
INSTANCE = word_set("name role register dp_size zmq behaviour labels model kv_bootstrap_addr")
ROLES = word_set("encode prefill decode prefill_decode consumer_zmq")
OPS = word_set(
    "http raw raw_body wait join fault worker_fault engine_fault repeat burst loop every for_each "
    "proxy start_workers signal announce zmq zmq_burst zmq_race push restart_receiver "
    "signal_receiver source_scan many_parts mark_memory drive_to_state_and_end"
)
STEP_FIELDS = word_set(
    "op id method path headers json background deadline_s abort_after_s abort_after_chunks "
    "abort_kind raw_socket gzip_request abort_every after_ms args do every_s for_s gap_s "
    "idle_before_s image instance instances ms nbytes parallel patterns reply_delay_ms rounds "
    "same_buffer same_port send send_json send_b64 timeout_ms verify n concurrency step in merge as "
    "apply_to set seconds signal env"
)
CLIENT = word_set(
    "step status never_status last_status status_equals_variant alt_status code header header_not "
    "header_absent header_max_len json_path json_has json_absent json_parses equals value one_of "
    "exactly_one_of text text_contains body_contains body_not_contains body_absent_or error_contains "
    "bytes_equal_upstream same_as equals_baseline ids usage_chunks usage_cached_in ec_items sse "
    "sse_absent reply reply_ok reply_not first_byte_ms_max first_byte_after_upstream_ms_max "
    "max_latency_ms max_s min_gap_ms client_closed_within_s if_200 if_called unless or optional "
    "index first_n last_n call calls_by_step"
)
STUB = word_set(
    "upstream consumer fileserver calls calls_at_least calls_by_step max_calls sum_calls "
    "no_calls_after_s body_path each_body_path path paths path_absent absent has from to header "
    "header_absent header_not each_header distinct_header distinct_mm_uuid_over_calls mm_parts "
    "mm_order mm_uuid_relation no_raw_image grid_hw group pairing body_equals_client_except "
    "max_concurrent_health max_connections_accepted each_reserve each_push push "
    "upstream_registrations no_orphan_upstream_connection_after_s"
)
PROCESS = word_set(
    "log metrics value delta series_growth_max instance state all_state in_flight canary "
    "exit_within_s exit_nonzero_within_s others_exit_nonzero_within_s proxy_exit_within_s started "
    "stderr_contains stderr_lines_max no_traceback rss_growth_mb_max proxy_rss_growth_mb_max "
    "worker_rss_growth_mb_max time_wait_growth_max scan_hits lost max_stall_s process engine debug "
    "timeout_s each except max count where"
)
EXPECTATION = CLIENT | STUB | PROCESS
PAIRED = word_set(
    "consumer fileserver instance from to delta where group timeout_s no_traceback stderr_contains "
    "stderr_lines_max"
)
"""Expectation words that only say more about another word of the same expectation."""


def unknown_words(case: Case) -> list[str]:
    """Return everything in a case that the vocabulary does not have, as `where: word`."""
    found = [f"key: {key}" for key in case.raw if key not in TOP]
    if case.target not in PROXY_TARGETS and case.target not in WORKER_TARGETS:
        found.append(f"target: {case.target}")
    found += [f"config: {key}" for key in case.raw.get("config") or {} if key not in CONFIG]
    found += [word for entry in case.instances for word in _unknown_of_instance(entry)]
    found += [word for step in case.steps for word in _unknown_of_step(step)]
    found += [f"expectation: {key}" for entry in case.expectations for key in entry if key not in EXPECTATION]
    return found


def _unknown_of_instance(entry: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"instance: {key}" for key in entry if key not in INSTANCE)
    if entry.get("role") not in ROLES:
        yield f"role: {entry.get('role')}"


def _unknown_of_step(step: Mapping[str, Any]) -> Iterator[str]:
    if step.get("op") not in OPS:
        yield f"op: {step.get('op')}"
    yield from (f"step field: {key}" for key in step if key not in STEP_FIELDS)
    if isinstance(step.get("step"), dict):
        yield from _unknown_of_step(step["step"])
