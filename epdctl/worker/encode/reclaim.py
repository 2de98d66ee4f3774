"""Ends what a lost engine has begun at a consumer, so that another engine can deliver the same item.

A consumer that gave the lost engine a reservation lets everybody else wait for bytes that will not come. It
is abandoned here: the process that could write is dead. Bytes that the network still holds may land a moment
later, so the consumer is not told that none can; one of ours lets the region rest.

Rules of this file: it never fails, and takes no longer than its deadline. The delivery that follows finds out
what is wrong with a consumer, and says it.
"""

from __future__ import annotations

import asyncio
import os

import structlog
import zmq.asyncio

from epdctl.domain import TransferId
from epdctl.ec.protocol import new_transfer_id
from epdctl.errors import ConsumerUnavailable, InvalidRequest, UpstreamProtocol
from epdctl.worker.transfer.links import ConsumerLink
from epdctl.worker.transfer.push_steps import Cancel

DEADLINE_S = 2.0


async def reclaim(
    context: zmq.asyncio.Context, consumer_zmq: str, transfer_id: str, *, deadline_s: float = DEADLINE_S
) -> str:
    """Return the transfer id under which an item of a lost engine is to be delivered anew.

    It is the old one when the consumer has all of the bytes, as the next reservation will then hear. Else the
    old one is given up and a new one made, since an id that was cancelled is refused for minutes.
    """
    consumer: ConsumerLink | None = None
    try:
        consumer = ConsumerLink(consumer_zmq, deadline_s, context)
        async with asyncio.timeout(deadline_s):
            if await _is_delivered(consumer, transfer_id):
                return transfer_id
    except (TimeoutError, ConsumerUnavailable, UpstreamProtocol, InvalidRequest) as error:
        structlog.get_logger().warning("reclaim_failed", transfer_id=transfer_id, reason=type(error).__name__)
    finally:
        if consumer is not None:
            await consumer.close()
    return new_transfer_id(os.urandom(16))


async def _is_delivered(consumer: ConsumerLink, transfer_id: str) -> bool:
    """Return whether every rank has the bytes; if not, give the transfer up at all of them.

    A transfer that a rank does not know is given up as well: its reservation may still be on its way.
    """
    ranks = await consumer.ranks()
    found = await asyncio.gather(*(rank.status(transfer_id) for rank in ranks))
    if all(status is not None and status.ready for status in found):
        return True
    given_up = Cancel(transfer_id=TransferId(transfer_id), reservation_id="", abandon=True)
    await asyncio.gather(*(rank.cancel(given_up) for rank in ranks))
    return False
