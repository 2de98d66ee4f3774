"""What `kv_transfer_params` of a request mean for a worker's role.

Rules of this file: pure. A prefill_decode worker ignores them; a prefill worker that is asked for a remote
decode computes the prompt and one token; a decode worker needs a ticket for every prompt with images, since
it has no embeddings to compute one from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from epdctl.domain import Role
from epdctl.errors import InvalidRequest, KvUndelivered
from epdctl.worker.language.kv_messages import KvTicket, parse_ticket, prompt_digest
from epdctl.worker.language.request import TokenRules


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPlan:
    """Whether to keep the prompt's KV for another process, or where to get it from."""

    hold: bool = False
    ticket: KvTicket | None = None


def plan_kv(
    role: Role, params: Mapping[str, Any] | None, token_ids: Sequence[int], *, has_images: bool
) -> KvPlan:
    """Return what to do about the KV of a prompt.

    Raises:
        InvalidRequest: the parameters are not a prefill's, or are missing where they are needed.
        KvUndelivered: the prefill computed another prompt.
    """
    if role is Role.PREFILL:
        return KvPlan(hold=bool(params and params.get("do_remote_decode")))
    if role is not Role.DECODE:
        return KvPlan()
    if params and params.get("do_remote_prefill"):
        return KvPlan(ticket=_checked(parse_ticket(params), token_ids))
    if has_images:
        raise InvalidRequest(
            "a decode worker has no embeddings: a prompt with images needs the kv_transfer_params of a"
            " prefill worker; send the request to the proxy (epdctl serve)",
            param="kv_transfer_params",
        )
    return KvPlan()


def one_token(tokens: TokenRules) -> TokenRules:
    """Return the rules of a prefill: one choice of one token, whatever the request wants of decode."""
    return replace(tokens, n=1, max_tokens=1, min_tokens=0, stops=())


def _checked(ticket: KvTicket, token_ids: Sequence[int]) -> KvTicket:
    same_prompt = ticket.remote_num_tokens == len(token_ids) and ticket.prompt_digest == prompt_digest(
        token_ids
    )
    if not same_prompt:
        raise KvUndelivered(
            "the prefill worker computed another prompt: prefill and decode must run the same model and chat"
            " template"
        )
    return ticket
