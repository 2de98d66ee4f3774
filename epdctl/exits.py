"""Exit codes of all commands. A module of its own: what it is needed for comes before anything slow."""

from __future__ import annotations

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
EXIT_INTERRUPTED = 130
