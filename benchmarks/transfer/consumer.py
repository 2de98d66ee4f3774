"""A consumer process: the product's receiver over real Mooncake, told by JSON lines what will come.

    python -m benchmarks.transfer.consumer '{"nbytes": 67108864, "verify": true}'

It prints its control address, Mooncake session and the address of its arena, as one JSON line. For each line
`{"prefix": "r1-", "items": 16, "shape": [256, 2048], "dtype": "bfloat16"}` on standard input it prints
`{"waiting": 16}`, takes and releases the items with transfer ids `r1-0` … `r1-15`, as a language engine
would, and prints `{"taken": 16}` when it has had them all.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from benchmarks.transfer.items import HOST
from epdctl import garbage
from epdctl.domain import TransferId
from epdctl.worker.transfer.environment import mooncake_environment
from epdctl.worker.transfer.memory import HostMemory
from epdctl.worker.transfer.mooncake import TransferEngine
from epdctl.worker.transfer.ports import TensorSpec
from epdctl.worker.transfer.receiver import Receiver, ReceiverSettings
from epdctl.worker.transfer.service import Verification

TAKE_S = 60.0


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


async def _take(receiver: Receiver, transfer_id: str, spec: TensorSpec) -> None:
    received = await receiver.take(
        transfer_id=TransferId(transfer_id), mm_hash=None, expect=spec, deadline_s=TAKE_S
    )
    received.release()


async def _obey(receiver: Receiver) -> None:
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        wanted = json.loads(line)
        items, spec = int(wanted["items"]), TensorSpec(tuple(wanted["shape"]), wanted["dtype"])
        names = [f"{wanted['prefix']}{number}" for number in range(items)]
        takes = [asyncio.create_task(_take(receiver, name, spec)) for name in names]
        while receiver.stats().waiting < items:  # noqa: ASYNC110 - a few turns of the loop
            await asyncio.sleep(0)
        _say({"waiting": items})
        await asyncio.gather(*takes)
        _say({"taken": items})


async def serve(nbytes: int, verify: bool) -> None:
    """Receive until standard input ends."""
    garbage.collect_seldom(garbage.ENGINE)
    memory = HostMemory(nbytes)
    engine = TransferEngine(host=HOST)
    engine.register(memory.address, memory.nbytes)
    settings = ReceiverSettings(host=HOST, port=0, verification=Verification(enabled=verify))
    receiver = Receiver(settings, memory=memory, session=engine.session, observe=lambda record: None)
    receiver.start()
    _say({"control": receiver.consumer_zmq, "session": engine.session, "address": memory.address})
    await _obey(receiver)
    await receiver.close()
    await engine.close()


def main() -> None:
    """Read the settings, prepare the environment, and serve."""
    settings = json.loads(sys.argv[1])
    os.environ.update(mooncake_environment(os.environ, protocol="tcp"))
    asyncio.run(serve(settings["nbytes"], settings["verify"]))


if __name__ == "__main__":
    main()
