"""The limit of open files, looked at before anything is started.

    check_open_files(engines=2)     # returns, or StartFailed names the limit and the cure

Rules of this file: a worker that ran out of descriptors while it starts would fail wherever it happens to be
then, in an import or in the middle of Mooncake; so too low a limit ends the start by its name.
"""

from __future__ import annotations

import resource

from epdctl.worker.engine import StartFailed

FRONT = 48
"""What a front needs to start on a CPU (37 measured), with a few requests."""

ENGINE = 16
"""What each engine takes of the front's descriptors: sockets, pipes, its process."""


def check_open_files(engines: int, limit: int | None = None) -> None:
    """Return when a worker with that many engines can start; `limit` is this process's own unless given.

    Raises:
        StartFailed: the soft limit is lower than what the start needs.
    """
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    needed = FRONT + engines * ENGINE
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raise StartFailed(
            f"the limit of open files is {allowed}, and the start alone needs {needed}: raise it (ulimit -n),"
            " best to 4096 or more, since each client and consumer takes one too"
        )
