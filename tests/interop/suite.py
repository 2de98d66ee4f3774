"""The tests that every deployment passes; a module inherits them and gives a `deployment` fixture."""

from __future__ import annotations

import pytest

from tests.interop.deployment import Deployment
from tests.interop.scenarios import NAMES


class DeploymentSuite:
    """Same tokens as one plain vLLM, and proof that the encoder's embeddings were used."""

    @pytest.mark.parametrize("name", NAMES)
    async def test_answers_like_one_plain_vllm(self, deployment: Deployment, name: str) -> None:
        """Greedy tokens equal a plain vLLM's, and every picture went by the encoder and the connector."""
        problems = await deployment.judge(name)

        assert problems == [], problems

    async def test_a_refused_picture_leaves_no_trace(self, deployment: Deployment) -> None:
        """After a malformed picture the next good request is answered as if nothing had been."""
        refused = await deployment.judge("malformed_image")
        after = await deployment.judge("no_image")

        assert (refused, after) == ([], []), (refused, after)
