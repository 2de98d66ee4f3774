"""A real `mooncake_master` for tests: on loopback, with time-outs fit for tests."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from tests.stubs.ports import free_port
from tests.stubs.process import Process, start_process


class Master:
    """The process, and where its clients find it; it can be started again on the same port."""

    def __init__(self, log_dir: Path, name: str = "mooncake_master") -> None:
        self._log_dir = log_dir
        self._name = name
        self._port = free_port()
        self._metrics_port = free_port()
        self._process: Process | None = None

    @property
    def address(self) -> str:
        """What `--mooncake-store` is given."""
        return f"127.0.0.1:{self._port}"

    @property
    def metrics_url(self) -> str:
        """Where it shows what it holds."""
        return f"http://127.0.0.1:{self._metrics_port}"

    @property
    def process(self) -> Process:
        """The process that was started last."""
        assert self._process is not None
        return self._process

    async def start(self) -> Master:
        """Start it and wait until it takes connections."""
        command = [
            str(Path(sys.executable).parent / "mooncake_master"),
            *("--rpc_address=127.0.0.1", f"--rpc_port={self._port}"),
            *("--metrics_host=127.0.0.1", f"--metrics_port={self._metrics_port}"),
            *("--logtostderr=1", "--default_kv_lease_ttl=500", "--client_ttl=10"),
            "--put_start_discard_timeout_sec=5",
        ]
        self._process = start_process(command, self._log_dir, self._name)
        await self._process.wait_until(self._listens, "the store's master listens", 30.0)
        return self

    def kill(self) -> None:
        """End it at once."""
        self.process.close()

    def close(self) -> None:
        """End it, if it was ever started."""
        if self._process is not None:
            self._process.close()

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port), 0.5).close()
        except OSError:
            return False
        return True
