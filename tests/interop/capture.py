"""`scripts/capture-wire`: record what crosses the wires of a deployment of real vLLM instances.

One folder a deployment, one a scenario, one file a hop; the folder's `header.json` names the versions. What
differs from run to run (ids, ports, times, addresses) is replaced by numbered names, media by digest and
length, so that recording again with another vLLM gives a diff that shows what changed."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.interop.answers import ask
from tests.interop.control_tap import ControlTap
from tests.interop.engines import (
    DECODE_NIXL,
    ENCODE_EXAMPLE,
    ENCODE_MOONCAKE,
    PREFILL_DECODE_EXAMPLE,
    PREFILL_DECODE_MOONCAKE,
    PREFILL_NIXL,
    EngineSpec,
)
from tests.interop.evidence import completed, granted
from tests.interop.fleet import Fleet, Running
from tests.interop.installed import ROOT, find_installed
from tests.interop.media import serve_pictures
from tests.interop.recording import Names, as_text, control_record, http_record
from tests.interop.scenarios import scenarios
from tests.interop.tap import HttpTap
from tests.interop.wiring import control_tap, http_tap
from tests.stubs.process import wait_until

CAPTURES = ROOT / "tests" / "contract" / "captures"
DEPLOYMENTS: dict[str, tuple[EngineSpec, ...]] = {
    "example-1e1pd": (ENCODE_EXAMPLE, PREFILL_DECODE_EXAMPLE),
    "mooncake-1e1pd": (ENCODE_MOONCAKE, PREFILL_DECODE_MOONCAKE),
    "nixl-1e1p1d": (ENCODE_EXAMPLE, PREFILL_NIXL, DECODE_NIXL),
}
ROLES = {2: ("encode", "prefill_decode"), 3: ("encode", "prefill", "decode")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tapped:
    """A deployment with a tap on every hop; `taps` are in the order a request meets them."""

    taps: tuple[HttpTap, ...]
    control: ControlTap | None

    @property
    def url(self) -> str:
        """Where to send requests."""
        return self.taps[0].url


def static_flags(instances: tuple[HttpTap, ...], control: ControlTap | None) -> list[str]:
    """Return the routing flags that epdctl and the reference proxy share."""
    flags = ["--encode-servers-urls", instances[0].url, "--decode-servers-urls", instances[-1].url]
    if len(instances) == 3:
        flags += ["--prefill-servers-urls", instances[1].url]
    if control is not None:
        flags += ["--ec-consumer-zmq-addrs", control.address]
    return flags


async def tapped_deployment(stack: AsyncExitStack, fleet: Fleet, name: str, proxy: str) -> Tapped:
    """Start the instances of deployment `name` and the proxy, a tap in front of each."""
    engines = await fleet.use(*DEPLOYMENTS[name])
    roles = ROLES[len(engines)]
    instances = tuple(
        [await http_tap(stack, role, engine.url) for role, engine in zip(roles, engines, strict=True)]
    )
    is_push = name.startswith("mooncake")
    control = await control_tap(stack, engines[-1].ec_address) if is_push else None
    flags = static_flags(instances, control)
    running: Running
    if proxy == "epdctl":
        running = await fleet.serve("capture", *flags)
    else:
        running = await fleet.reference_proxy(*flags)
    client = await http_tap(stack, "client", running.url)
    return Tapped(taps=(client, *instances), control=control)


async def wait_settled(control: ControlTap | None) -> None:
    """Wait until every reservation that was granted is completed: a completion may trail the answer."""
    if control is not None:
        seen = control.exchanges
        await wait_until(lambda: granted(seen) <= completed(seen), "all transfers are completed", 10)


def write_scenario(folder: Path, tapped: Tapped) -> None:
    """Write what the taps saw of one scenario, numbered in the order it happened."""
    names = Names()
    hops = [(e.hop, http_record(e, names)) for tap in tapped.taps for e in tap.calls]
    if tapped.control is not None:
        hops += [("control", control_record(e, names)) for e in tapped.control.exchanges]
    folder.mkdir(parents=True)
    for number, (hop, record) in enumerate(hops, 1):
        (folder / f"{number:02d}-{hop}.json").write_text(as_text(record))


async def capture(name: str, proxy: str, out: Path) -> Path:
    """Record all scenarios of deployment `name` behind `proxy`; return the folder."""
    installed = find_installed()
    folder = out / f"{name}-{proxy}"
    with tempfile.TemporaryDirectory(prefix="epdctl-capture-") as scratch:
        fleet = Fleet(installed, Path(scratch))
        async with AsyncExitStack() as stack:
            stack.push_async_callback(fleet.close)
            media_url = await serve_pictures(stack)
            tapped = await tapped_deployment(stack, fleet, name, proxy)
            if folder.exists():
                shutil.rmtree(folder)
            for scenario in scenarios(f"capture-{name}", media_url).values():
                await ask(tapped.url, scenario.body)
                await wait_settled(tapped.control)
                write_scenario(folder / scenario.name, tapped)
                for tap in tapped.taps:
                    tap.exchanges.clear()
                if tapped.control is not None:
                    tapped.control.exchanges.clear()
    header = {
        "proxy": proxy if proxy == "epdctl" else f"reference {installed.reference_version}",
        "command": f"scripts/capture-wire {name} --proxy {proxy}",
        "versions": installed.versions,
    }
    (folder / "header.json").write_text(json.dumps(header, indent=2) + "\n")
    return folder


def main() -> int:
    """Entry of scripts/capture-wire."""
    parser = argparse.ArgumentParser(prog="scripts/capture-wire", description=__doc__)
    parser.add_argument("deployment", choices=sorted(DEPLOYMENTS))
    parser.add_argument("--proxy", choices=("epdctl", "reference"), default="epdctl")
    parser.add_argument("--out", type=Path, default=CAPTURES, help="default: tests/contract/captures")
    given = parser.parse_args()
    folder = asyncio.run(capture(given.deployment, given.proxy, given.out))
    sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
