"""The `epdctl` entry: find the command, load its settings, run it, and return its exit code.

Rules of this file: a command is one row of the table; modules are imported only when their command runs, so
that `epdctl --help` needs neither torch nor Mooncake. Nothing that takes long is imported before the signals
are seen to.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from epdctl import __version__
from epdctl.exits import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE


@dataclass(frozen=True, slots=True)
class Command:
    """One command: `settings` and `run` are `module:name`; `run(settings)` returns the exit code."""

    words: tuple[str, ...]
    summary: str
    settings: str
    run: str


COMMANDS: tuple[Command, ...] = (
    Command(
        words=("worker", "encode"),
        summary="run an encode worker: the vision tower of a model, pushing embeddings over Mooncake",
        settings="epdctl.config.worker:EncodeSettings",
        run="epdctl.worker.encode.main:run",
    ),
    Command(
        words=("worker", "prefill-decode"),
        summary="run a prefill_decode worker: the language model, fed with pushed embeddings",
        settings="epdctl.config.language:PrefillDecodeSettings",
        run="epdctl.worker.language.main:run_prefill_decode",
    ),
    Command(
        words=("worker", "prefill"),
        summary="run a prefill worker: computes prompts, hands their KV to decode workers",
        settings="epdctl.config.language:PrefillSettings",
        run="epdctl.worker.language.main:run_prefill",
    ),
    Command(
        words=("worker", "decode"),
        summary="run a decode worker: goes on from prompts that prefill workers computed",
        settings="epdctl.config.language:DecodeSettings",
        run="epdctl.worker.language.main:run_decode",
    ),
    Command(
        words=("serve",),
        summary="run the proxy and the control plane",
        settings="epdctl.config.serve:ServeSettings",
        run="epdctl.app:run",
    ),
    Command(
        words=("instances", "list"),
        summary="list a proxy's instances and their states",
        settings="epdctl.config.client:ListSettings",
        run="epdctl.instances.commands:list_instances",
    ),
    Command(
        words=("instances", "show"),
        summary="show all that a proxy knows about one instance",
        settings="epdctl.config.client:ShowSettings",
        run="epdctl.instances.commands:show",
    ),
    Command(
        words=("instances", "register"),
        summary="register an instance, and wait until it is ready",
        settings="epdctl.config.client:RegisterSettings",
        run="epdctl.instances.commands:register",
    ),
    Command(
        words=("instances", "drain"),
        summary="let an instance finish its work, then remove it",
        settings="epdctl.config.client:DrainSettings",
        run="epdctl.instances.commands:drain",
    ),
    Command(
        words=("instances", "remove"),
        summary="remove an instance at once",
        settings="epdctl.config.client:RemoveSettings",
        run="epdctl.instances.commands:remove",
    ),
    Command(
        words=("up",),
        summary="start a local deployment (1e1pd, 2e1p2d, …) and keep it until Ctrl-C",
        settings="epdctl.config.local:UpSettings",
        run="epdctl.local.up:run",
    ),
)


_SERVES = frozenset({"worker", "serve", "up"})
"""First words of the commands that run until a signal, for which being told to end is no failure."""
_ASKS_FOR_HELP: tuple[list[str], ...] = ([], ["-h"], ["--help"], ["help"])


def load_reference(reference: str) -> Any:
    """Return what `module:name` names."""
    module, name = reference.split(":")
    return getattr(importlib.import_module(module), name)


def _usage(group: str = "") -> str:
    """Return the help text: all commands, or those that start with the word `group`."""
    shown = [c for c in COMMANDS if not group or c.words[0] == group]
    rows = "\n".join(f"  epdctl {' '.join(c.words):<24} {c.summary}" for c in shown)
    name = f"{group} COMMAND" if group else "COMMAND"
    return (
        f"usage: epdctl {name} [OPTIONS]\n\n"
        "Control plane and workers for encode-prefill-decode (EPD) disaggregated multimodal serving.\n\n"
        f"commands:\n{rows}\n\n"
        "'epdctl COMMAND --help' shows a command's options with examples; every option is also a variable\n"
        "EPDCTL_<OPTION>. Exit codes: 0 ok, 1 failed, 2 usage.\n"
    )


def find_command(arguments: Sequence[str]) -> Command | None:
    """Return the command whose words start `arguments`, or None."""
    for command in COMMANDS:
        if tuple(arguments[: len(command.words)]) == command.words:
            return command
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 ok, 1 failed, 2 usage."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        _end_early_on_signals(serves=not _SERVES.isdisjoint(words[:1]))
    try:
        return _main(words)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _end_early_on_signals(*, serves: bool) -> None:
    """End at once, without a traceback, on a signal that comes before a command has its own handlers.

    Nothing has been started then that would have to be ended; half-imported modules are not to be unwound.
    A signal that this process was started to ignore stays ignored.
    """

    def end(number: int, frame: FrameType | None) -> None:
        os._exit(EXIT_OK if serves else EXIT_INTERRUPTED)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)
    if serves and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, end)


def _main(words: list[str]) -> int:
    if words in (["--version"], ["version"]):
        print(__version__)
        return EXIT_OK
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage(), end="")
        return EXIT_OK if words else EXIT_USAGE
    if words[0] in {c.words[0] for c in COMMANDS if len(c.words) > 1} and words[1:2] in _ASKS_FOR_HELP:
        print(_usage(words[0]), end="")
        return EXIT_OK if words[1:] else EXIT_USAGE
    command = find_command(words)
    if command is None:
        known = [c for c in COMMANDS if c.words[0] == words[0]]
        hint = ", ".join(" ".join(c.words) for c in known) if known else "see 'epdctl --help'"
        print(f"epdctl: unknown command '{' '.join(words[:2])}' ({hint})", file=sys.stderr)
        return EXIT_USAGE
    from epdctl.config import load_settings

    prog = "epdctl " + " ".join(command.words)
    settings = load_settings(load_reference(command.settings), prog, words[len(command.words) :])
    run = load_reference(command.run)
    if words[0] not in _SERVES and callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs now may have something to end
    result = run(settings)
    return EXIT_FAILED if result is None else int(result)


if __name__ == "__main__":
    raise SystemExit(main())
