"""Which processes a local deployment runs, with which arguments, and how each is registered.

Rules of this file: pure; ports and paths are handed in; everything listens on loopback.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from epdctl.domain import Role
from epdctl.local.shape import Shape

HOST = "127.0.0.1"

_COMMAND = {
    Role.ENCODE: "encode",
    Role.PREFILL: "prefill",
    Role.DECODE: "decode",
    Role.PREFILL_DECODE: "prefill-decode",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """One process to start: `arguments` follow `epdctl`, or `program` of the same environment.

    `registration` is the body for POST /instances.
    """

    name: str
    program: str | None = None
    arguments: tuple[str, ...]
    url: str
    registration: dict[str, object] | None = field(default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What all workers of a deployment share; `with_store`: a Mooncake Store for the encode workers too."""

    model: str
    served_model_name: str
    device: str
    extra: tuple[str, ...] = ()
    with_store: bool = False


def plan_proxy(port: int, arguments: Sequence[str] = ()) -> ProcessPlan:
    """Return the proxy's process: dynamic registration, and a registry that ends with the process."""
    return ProcessPlan(
        name="proxy",
        arguments=(
            "serve",
            "--host",
            HOST,
            "--port",
            str(port),
            "--dynamic-registration",
            "--store",
            "memory",
            "--drain-delay",
            "0",
            *arguments,
        ),
        url=f"http://{HOST}:{port}",
    )


STORE_PORTS = 2
"""A store's master takes two ports: for its clients, and for its metrics."""


def plan_store(ports: Sequence[int]) -> ProcessPlan:
    """Return the process of a Mooncake Store's master."""
    port, metrics_port = ports
    return ProcessPlan(
        name="store",
        program="mooncake_master",
        arguments=(
            f"--rpc_address={HOST}",
            f"--rpc_port={port}",
            f"--metrics_host={HOST}",
            f"--metrics_port={metrics_port}",
            "--logtostderr=1",
        ),
        url=f"http://{HOST}:{metrics_port}",
    )


def ports_needed(shape: Shape) -> int:
    """Return how many ports the workers of `shape` take: HTTP for each, and EC control for each consumer."""
    return len(shape.roles()) + sum(role in (Role.PREFILL, Role.PREFILL_DECODE) for role in shape.roles())


def plan_workers(
    shape: Shape, ports: Sequence[int], options: WorkerOptions, store: str | None = None
) -> tuple[ProcessPlan, ...]:
    """Return the worker processes of `shape`, taking `ports_needed(shape)` ports in order.

    `store` is the host:port of a Mooncake Store's master for the encode workers.
    """
    free = iter(ports)
    counts: dict[Role, int] = {}
    plans = []
    for role in shape.roles():
        index = counts[role] = counts.get(role, -1) + 1
        ec_port = next(free) if role in (Role.PREFILL, Role.PREFILL_DECODE) else None
        arguments = ("--mooncake-store", store) if store and role is Role.ENCODE else ()
        plans.append(_plan_worker(role, index, next(free), ec_port, options, arguments))
    return tuple(plans)


def _plan_worker(
    role: Role,
    index: int,
    port: int,
    ec_port: int | None,
    options: WorkerOptions,
    own_arguments: Sequence[str],
) -> ProcessPlan:
    url = f"http://{HOST}:{port}"
    ec_arguments = () if ec_port is None else ("--ec-ip", HOST, "--ec-port", str(ec_port))
    addresses = [] if ec_port is None else [f"tcp://{HOST}:{ec_port}"]
    return ProcessPlan(
        name=f"{_COMMAND[role]}-{index}",
        arguments=(
            "worker",
            _COMMAND[role],
            "--model",
            options.model,
            "--served-model-name",
            options.served_model_name,
            "--host",
            HOST,
            "--port",
            str(port),
            "--device",
            options.device,
            *ec_arguments,
            *own_arguments,
            *options.extra,
        ),
        url=url,
        registration={"role": role.value, "url": url, "ec_zmq_addrs": addresses},
    )
