"""Compare proxies on the same mock upstreams: `python -m benchmarks.proxy [options]`.

Without options it measures epdctl alone beside no proxy at all. `--reference FILE` adds vLLM's example proxy
(`examples/disaggregated/disaggregated_encoder/disagg_epd_proxy.py` of its source distribution), against
which the ratios are taken; `--peer` adds any other.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.proxy.figures import DIRECT, REFERENCE, Result, Round, judge, table, target_table
from benchmarks.proxy.lab import Lab, LabError, Peer, Running
from benchmarks.proxy.usage import ask_for_short_slices
from benchmarks.proxy.workloads import Workload, workloads

OURS = "epdctl"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proxy", description=__doc__)
    parser.add_argument("--reference", type=Path, help="the file of vLLM's disagg_epd_proxy.py")
    parser.add_argument("--reference-python", default=sys.executable, help="the Python that has its packages")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="another proxy for E+PD; {port} {encode} {prefill} {decode} are filled in",
    )
    parser.add_argument(
        "--peer-epd", action="append", default=[], metavar="NAME=COMMAND", help="its E+P+D command"
    )
    parser.add_argument("--workloads", default="", help="comma-separated beginnings of names; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the seconds of every burst")
    parser.add_argument("--list", action="store_true", help="print the workloads and stop")
    parser.add_argument("--json", type=Path, help="write every round's figures here")
    parser.add_argument(
        "--gate",
        type=float,
        metavar="SLACK",
        help="exit with 1 when a target that must be met is missed by more than this factor",
    )
    return parser.parse_args(arguments)


def peers_of(options: argparse.Namespace) -> list[Peer]:
    """Return the peers to measure: none at all, epdctl, the reference, and those named by --peer."""
    serve = f"{sys.executable} -m epdctl serve --host 127.0.0.1 --port {{port}} --store memory"
    peers = [Peer(name=DIRECT), _peer(OURS, serve)]
    if options.reference is not None:
        run = f"{options.reference_python} {options.reference} --host 127.0.0.1 --port {{port}}"
        peers.append(_peer(REFERENCE, run))
    commands_epd = dict(pair.split("=", 1) for pair in options.peer_epd)
    for name, command in (pair.split("=", 1) for pair in options.peer):
        peers.append(Peer(name=name, command=command, command_epd=commands_epd.get(name)))
    return peers


def _peer(name: str, command: str) -> Peer:
    """Return a peer that takes the reference proxy's static flags."""
    both = f"{command} --encode-servers-urls {{encode}} --decode-servers-urls {{decode}}"
    return Peer(name=name, command=both, command_epd=f"{both} --prefill-servers-urls {{prefill}}")


def chosen(names: str) -> list[Workload]:
    """Return the workloads whose names begin as asked."""
    beginnings = tuple(name for name in names.split(",") if name)
    return [w for w in workloads() if not beginnings or w.name.startswith(beginnings)]


def measure(
    lab: Lab, peers: Sequence[Peer], listed: Sequence[Workload], rounds: int, scale: float
) -> list[Result]:
    """Run all workloads and print each table as soon as it is there."""
    running: dict[tuple[str, bool], Running | None] = {}
    results = []
    for workload in listed:
        up: dict[str, Running] = {}
        for peer in peers:
            key = (peer.name, workload.separate_prefill)
            if key not in running:
                running[key] = lab.launch(peer, workload)
            started = running[key]
            if started is not None:
                up[peer.name] = started
                lab.warm_up(workload, started)
        results.append(Result(workload=workload, rounds=_rounds(lab, workload, up, rounds, scale)))
        print(f"\n{table(results[-1])}", flush=True)
    return results


def _rounds(
    lab: Lab, workload: Workload, up: Mapping[str, Running], rounds: int, scale: float
) -> dict[str, list[Round]]:
    """Run the peers one after the other in every round, each round starting with another one."""
    found: dict[str, list[Round]] = {name: [] for name in up}
    names = list(up)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            found[name].append(lab.run(workload, up[name], scale))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 when something did not start or a gated target is missed."""
    options = parse_arguments(arguments)
    listed = chosen(options.workloads)
    if options.list:
        print("\n".join(workload.name for workload in listed))
        return 0
    short = ask_for_short_slices()
    print(
        f"{os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}, "
        f"{options.rounds} rounds, scheduler slices {'short' if short else 'as the kernel has them'}; "
        "in brackets: times the reference in the same run"
    )
    try:
        lab = Lab()
    except LabError as error:
        print(f"benchmarks.proxy: {error}", file=sys.stderr)
        return 1
    try:
        results = measure(lab, peers_of(options), listed, options.rounds, options.scale)
    except LabError as error:
        print(f"benchmarks.proxy: {error}", file=sys.stderr)
        return 1
    finally:
        lab.close()
    if options.json is not None:
        raw = {
            r.workload.name: {p: [asdict(x) for x in found] for p, found in r.rounds.items()} for r in results
        }
        options.json.write_text(json.dumps(raw, indent=1))
    return _judge(results, options)


def _judge(results: Sequence[Result], options: argparse.Namespace) -> int:
    if options.reference is None:
        return 0
    judgements = judge(results, OURS)
    print(f"\n## Targets\n\n{target_table(judgements)}\n\nload at the end {os.getloadavg()[0]:.1f}")
    missed = [j for j in judgements if options.gate is not None and j.is_missed(options.gate)]
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
