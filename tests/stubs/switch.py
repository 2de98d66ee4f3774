"""The fault switch of `tests.stubs.faulty_encode_engine`."""

from __future__ import annotations

from pathlib import Path


class Switch:
    """A file that says what the towers of a worker's engines do."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def env(self) -> dict[str, str]:
        """The environment that the worker needs."""
        return {"EPDCTL_TEST_FAULT": str(self._path)}

    def set(self, fault: str) -> None:
        """Let forwards do `fault` from now on; "" heals."""
        other = self._path.with_suffix(".new")
        other.write_text(fault)
        other.replace(self._path)
