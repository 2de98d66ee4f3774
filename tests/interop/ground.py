"""What every deployment of the suite stands on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.interop.answers import Answer
from tests.interop.deployment import Deployment
from tests.interop.evidence import Evidence
from tests.interop.fleet import Fleet
from tests.interop.scenarios import MediaUrl, scenarios
from tests.interop.tap import HttpTap


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """The session's processes, the plain vLLM's answers by deployment, and the web server with pictures."""

    fleet: Fleet
    plain: Mapping[str, Mapping[str, Answer]]
    media_url: MediaUrl

    def deployment(
        self,
        name: str,
        url: str,
        *,
        encoders: Sequence[HttpTap],
        consumers: Sequence[HttpTap],
        witnesses: Sequence[Evidence],
    ) -> Deployment:
        """Return the deployment `name` behind the proxy at `url`, with its requests and their answers."""
        return Deployment(
            name=name,
            url=url,
            encoders=encoders,
            consumers=consumers,
            witnesses=witnesses,
            scenarios=scenarios(name, self.media_url),
            plain=self.plain[name],
        )
