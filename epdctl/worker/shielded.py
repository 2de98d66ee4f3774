"""Command lines of child processes that leave SIGINT and SIGTERM to the process that started them.

    await asyncio.create_subprocess_exec(*shielded(sys.executable, "-m", module))

A terminal's Ctrl-C, and a service manager's SIGTERM, go to every process of the group. A child that is only
loading then would write a traceback, and one that works is still needed for the drain.

Rules of this file: the signals are ignored before the program begins, and it inherits that; Python can say
so itself only after it has started, and uvloop gives a child neither our signal mask nor what we ignore. The
shell becomes the program: same process id, same pipes.
"""

from __future__ import annotations


def shielded(*command: str) -> list[str]:
    """Return the command line that runs `command` with both signals ignored."""
    return ["/bin/sh", "-c", 'trap "" INT TERM; exec "$@"', "epdctl", *command]
