"""The decode worker's questions to a prefill worker."""

from __future__ import annotations

import pytest

from epdctl.ec.protocol import ControlAddress
from epdctl.worker.language.kv_client import KvClient, KvUnreachable
from epdctl.worker.language.kv_messages import Fetch

pytestmark = pytest.mark.unit

FETCH = Fetch(kv_id="k", session="127.0.0.1:1", address=4096, capacity=1)


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
async def test_a_host_that_can_be_none_is_one_that_nobody_reaches(host: str) -> None:
    """A ticket names any host: what the resolver does not even take is not reached, and no bug of ours."""
    client = KvClient()
    address = ControlAddress(host=host, port=1)

    with pytest.raises(KvUnreachable):
        await client.fetch(address, FETCH, 5.0)
    await client.release(address, "k")
    client.close()
