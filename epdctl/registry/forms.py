"""The JSON of the admin API: what a registration may hold, and how instances are shown.

Rules of this file: pure. Foreign bytes become an `InstanceSpec` here or an error that names the field; the
list view has the shape of vLLM's example proxy (0.33) with two lists more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from epdctl.domain import EC_CONSUMER_ROLES, InstanceSpec, InstanceState, Role, Topology
from epdctl.errors import InvalidRequest, SchemaViolation
from epdctl.registry.addresses import MAX_DP_SIZE, check_consumer_addresses, normalise_url
from epdctl.registry.record import InstanceView
from epdctl.registry.topology import Service

MAX_MODEL_CHARS = 512
MAX_LABELS = 32
MAX_LABEL_CHARS = 256

_LISTS = {
    "live": InstanceState.READY,
    "evicted": InstanceState.EVICTED,
    "pending": InstanceState.PENDING,
    "draining": InstanceState.DRAINING,
}


class RegistrationForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /instances`."""

    role: Role
    url: str
    ec_zmq_addrs: tuple[str, ...] = ()
    dp_size: int = 1
    model: str | None = None
    labels: dict[str, str] = {}
    kv_bootstrap_addr: str | None = None


def parse_registration(body: bytes) -> InstanceSpec:
    """Return the instance that `body` describes.

    Raises:
        InvalidRequest: the body is not JSON, or a field makes no sense for the role.
        SchemaViolation: an unknown field, a wrong type, a bad URL or address.
    """
    form = _parse_form(body)
    _check_sizes(form)
    _check_role(form)
    check_consumer_addresses(form.ec_zmq_addrs, form.dp_size)
    return InstanceSpec(
        url=normalise_url(form.url),
        role=form.role,
        dp_size=form.dp_size,
        ec_zmq_addrs=form.ec_zmq_addrs,
        model=form.model,
        labels=tuple(sorted(form.labels.items())),
        kv_bootstrap_addr=_bootstrap(form.kv_bootstrap_addr),
    )


def _parse_form(body: bytes) -> RegistrationForm:
    try:
        return msgspec.json.decode(body, type=RegistrationForm)
    except msgspec.ValidationError as error:
        text = str(error)
        raise SchemaViolation(
            f"the registration does not fit its schema: {text}", param=_field_in(text)
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest("the body is not valid JSON") from error


def _field_in(text: str) -> str | None:
    """Return the field that msgspec's message is about: a path, or a field that is missing or unknown."""
    found = re.search(r"`\$\.(\w+)|field `(\w+)`", text)
    return (found[1] or found[2]) if found else None


def _check_sizes(form: RegistrationForm) -> None:
    if not 1 <= form.dp_size <= MAX_DP_SIZE:
        raise SchemaViolation(f"dp_size must be from 1 to {MAX_DP_SIZE}", param="dp_size")
    if form.model is not None and not 1 <= len(form.model) <= MAX_MODEL_CHARS:
        raise SchemaViolation(f"model must have 1 to {MAX_MODEL_CHARS} characters, or be null", param="model")
    if len(form.labels) > MAX_LABELS:
        raise SchemaViolation(f"at most {MAX_LABELS} labels are allowed", param="labels")
    if any(not name or len(name) + len(value) > MAX_LABEL_CHARS for name, value in form.labels.items()):
        raise SchemaViolation(
            f"a label needs a name, and name and value together at most {MAX_LABEL_CHARS} characters",
            param="labels",
        )
    if form.labels.get("kv_connector", "nixl") not in ("nixl", "mooncake"):
        raise SchemaViolation("labels.kv_connector must be nixl or mooncake", param="labels")


def _check_role(form: RegistrationForm) -> None:
    if form.ec_zmq_addrs and form.role not in EC_CONSUMER_ROLES:
        raise InvalidRequest(
            f"Only EC consumers accept Mooncake addresses: {form.role} is none (prefill, prefill_decode)",
            param="ec_zmq_addrs",
        )
    if form.role is Role.ENCODE and form.dp_size > 1:
        raise InvalidRequest(
            "an encode instance has no data-parallel ranks: register each encoder under its own URL",
            param="dp_size",
        )


def _bootstrap(address: str | None) -> str | None:
    if address is None:
        return None
    try:
        return normalise_url(address)
    except SchemaViolation as error:
        raise SchemaViolation(f"kv_bootstrap_addr: {error.message}", param="kv_bootstrap_addr") from None


def list_view(views: Sequence[InstanceView]) -> dict[str, dict[str, list[str]]]:
    """Return the URLs by role and state."""
    return {
        role: {
            name: [view.spec.url for view in views if (view.spec.role, view.state) == (role, state)]
            for name, state in _LISTS.items()
        }
        for role in Role
    }


def detail_view(
    views: Sequence[InstanceView], topology: Topology, service: Service, wall_now: float
) -> dict[str, Any]:
    """Return all that is known, for people and for `epdctl instances`; times are wall-clock seconds."""
    return {
        "topology": topology,
        "servable": service.servable,
        "reason": service.reason,
        "instances": [instance_view(view, wall_now) for view in views],
    }


def instance_view(view: InstanceView, wall_now: float) -> dict[str, Any]:
    """Return one instance as the detail view shows it."""
    spec, probe = view.spec, view.last_probe
    return {
        "url": spec.url,
        "role": spec.role,
        "state": view.state,
        "since": round(wall_now - view.in_state_s, 3),
        "generation": view.generation,
        "static": spec.static,
        "dp_size": spec.dp_size,
        "ec_zmq_addrs": list(spec.ec_zmq_addrs),
        "model": spec.model,
        "models": list(view.models),
        "labels": dict(spec.labels),
        "kv_bootstrap_addr": spec.kv_bootstrap_addr,
        "in_flight": view.in_flight,
        "consecutive_failures": view.consecutive_failures,
        "last_probe": None
        if probe is None
        else {
            "outcome": probe.outcome,
            "error": probe.error,
            "at": round(probe.at, 3),
            "latency": round(probe.latency_s, 6),
        },
        "counts": {
            "probes": dict(view.probes),
            "requests": view.leases,
            "unreachable": view.unreachable,
        },
    }
