"""The laboratory: builds the two C programs, starts the mock and the peers, and drives one round.

Rules of this file: everything listens on loopback; every process it started is ended by `close`.
"""

from __future__ import annotations

import http.client
import json
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.proxy.figures import Round
from benchmarks.proxy.usage import peak_rss_mb, read_cpu, reset_peak_rss
from benchmarks.proxy.workloads import BACKGROUND_BODY, BACKGROUND_CONCURRENCY, Mode, Workload, bodies
from tests.stubs.ports import free_port, free_ports

HERE = Path(__file__).parent
START_TIMEOUT_S, RUN_TIMEOUT_S = 40.0, 180.0
ROLES = ("encode", "prefill", "decode")


class LabError(RuntimeError):
    """A program could not be built or did not come up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A proxy to measure: its command lines, with {port}, {encode}, {prefill} and {decode} to fill in.

    A peer without any command is no proxy at all: the load goes straight to decode.
    """

    name: str
    command: str | None = None
    command_epd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    def command_for(self, workload: Workload) -> str | None:
        """Return the command line for a workload's topology."""
        return self.command_epd if workload.separate_prefill else self.command


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A peer that answers: its port, and its process id unless it is no proxy."""

    port: int
    pid: int | None


class Lab:
    """Mock upstreams and the peers in front of them."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(tempfile.mkdtemp(prefix="epdctl-bench-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._build()
        for name, body in bodies():
            (self.folder / f"{name}.json").write_bytes(body)
        self._ports = dict(zip(ROLES, free_ports(len(ROLES)), strict=True))
        self._start([str(self.folder / "mock"), str(self._ports["encode"])], "mock", {})
        self._wait("mock", lambda: _get(self._ports["decode"], "/health")[0] == 200)

    def _build(self) -> None:
        compiler = os.environ.get("CC", "cc")
        for program in ("mock", "load"):
            source, binary = HERE / f"{program}.c", self.folder / program
            command = [compiler, "-O2", "-o", str(binary), str(source)]
            try:
                subprocess.run(command, check=True, capture_output=True, text=True)
            except FileNotFoundError:
                raise LabError(f"no C compiler '{compiler}' (set CC, or install gcc)") from None
            except subprocess.CalledProcessError as error:
                raise LabError(f"{' '.join(command)}: {error.stderr}") from None

    def _start(self, command: list[str], name: str, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def _wait(self, name: str, answers: Any, process: subprocess.Popen[bytes] | None = None) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                if answers():
                    return
            except (OSError, http.client.HTTPException):
                pass
            if time.monotonic() > deadline or (process is not None and process.poll() is not None):
                end = (self.folder / f"{name}.log").read_text(errors="replace")[-2000:]
                raise LabError(f"{name} did not come up; the end of its log:\n{end}")
            time.sleep(0.05)

    def launch(self, peer: Peer, workload: Workload) -> Running | None:
        """Start a peer for a workload's topology and wait for its answer; None when it has no such mode."""
        command = peer.command_for(workload)
        if peer.command is None and peer.command_epd is None:
            return Running(port=self._ports["decode"], pid=None)
        if command is None:
            return None
        port = free_port()
        urls = {role: f"http://127.0.0.1:{number}" for role, number in self._ports.items()}
        name = f"{peer.name}-{'epd' if workload.separate_prefill else 'ed'}"
        process = self._start(shlex.split(command.format(port=port, **urls)), name, peer.env)
        text = (self.folder / "text.json").read_bytes()
        self._wait(name, lambda: _answers_chat(port, text), process)
        return Running(port=port, pid=process.pid)

    def warm_up(self, workload: Workload, running: Running) -> None:
        """Open connections and fill allocators before anything counts."""
        if workload.mode is Mode.MIXED:
            self._load(Mode.REQUESTS, running.port, BACKGROUND_BODY, BACKGROUND_CONCURRENCY, 0.3)
        else:
            self._load(workload.mode, running.port, workload.body, min(workload.concurrency, 8), 0.5)

    def run(self, workload: Workload, running: Running, scale: float) -> Round:
        """Drive one round and return its figures."""
        if running.pid is not None:
            reset_peak_rss(running.pid)
        before = read_cpu(running.pid) if running.pid is not None else None
        received_before = self._received()
        seconds = workload.seconds * scale
        background = None
        if workload.mode is Mode.MIXED:
            background = self._load_process(
                Mode.REQUESTS, running.port, BACKGROUND_BODY, BACKGROUND_CONCURRENCY, seconds
            )
        mode = Mode.STREAMS if workload.mode is Mode.MIXED else workload.mode
        found = self._load(mode, running.port, workload.body, workload.concurrency, seconds)
        beside = _finish(background) if background is not None else None
        counted = beside["ok"] if beside is not None else found["chunks" if mode is Mode.STREAMS else "ok"]
        cpu_s = read_cpu(running.pid).since(before) if running.pid is not None and before is not None else 0.0
        return _round(
            workload,
            found,
            beside,
            cpu_ms=cpu_s / max(counted, 1) * 1000,
            rss_mb=peak_rss_mb(running.pid) if running.pid is not None else 0.0,
            received={
                role: (count - received_before[role]) / max((beside or found)["ok"], 1) / 1000
                for role, count in self._received().items()
            },
        )

    def _received(self) -> dict[str, int]:
        stats = json.loads(_get(self._ports["decode"], "/_stats")[1])
        return {role: stats[role]["bytes"] for role in ROLES}

    def _load_process(
        self, mode: Mode, port: int, body: str, concurrency: int, seconds: float
    ) -> subprocess.Popen[str]:
        command = [str(self.folder / "load"), mode, str(port), str(self.folder / f"{body}.json")]
        return subprocess.Popen(
            [*command, str(concurrency), str(seconds)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def _load(self, mode: Mode, port: int, body: str, concurrency: int, seconds: float) -> dict[str, Any]:
        return _finish(self._load_process(mode, port, body, concurrency, seconds))

    def close(self) -> None:
        """End every process group that was started."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=RUN_TIMEOUT_S)
    if process.returncode != 0:
        raise LabError(f"the load generator exited with {process.returncode}")
    found: dict[str, Any] = json.loads(out)
    return found


def _round(
    workload: Workload,
    found: Mapping[str, Any],
    beside: Mapping[str, Any] | None,
    *,
    cpu_ms: float,
    rss_mb: float,
    received: Mapping[str, float],
) -> Round:
    is_requests = workload.mode is Mode.REQUESTS
    times = found["latency" if is_requests else "chunk"]
    driver = beside if beside is not None else found
    errors = found["errors"] + (beside["errors"] if beside is not None else 0)
    return Round(
        per_s=driver["per_s"] if beside is not None or is_requests else found["chunks_per_s"],
        p50_ms=times["p50"] / 1000,
        p99_ms=times["p99"] / 1000,
        cpu_ms=cpu_ms,
        rss_mb=rss_mb,
        mb_per_s=driver["per_s"] * driver["request_bytes"] / 1e6,
        received_kb=received,
        errors=errors,
        last_error=found["last_error"] or (beside["last_error"] if beside is not None else ""),
    )


def _get(port: int, path: str) -> tuple[int, bytes]:
    return _call(port, "GET", path, None)


def _call(port: int, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _answers_chat(port: int, body: bytes) -> bool:
    status, answer = _call(port, "POST", "/v1/chat/completions", body)
    return status == 200 and b"choices" in answer
