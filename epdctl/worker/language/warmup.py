"""Runs the model once before the worker says that it is ready: a prompt of two chunks and a token."""

from __future__ import annotations

from epdctl.worker.engine import StartFailed
from epdctl.worker.language.batch import Batch, Limits, Order
from epdctl.worker.language.kv import KvPool
from epdctl.worker.language.model import LanguageModel
from epdctl.worker.language.params import Sampling
from epdctl.worker.language.positions import mrope_positions
from epdctl.worker.language.runner import Runner, build_prompt
from epdctl.worker.language.sampling import Sampler
from epdctl.worker.language.spec import ModelSpec

_LENGTH, _CHUNK, _TOKENS = 6, 4, 2


def run_once(model: LanguageModel, pool: KvPool, spec: ModelSpec) -> None:
    """Generate two tokens from a short prompt; raises StartFailed when there is not even room for that."""
    batch = Batch(Limits(step_tokens=_CHUNK, sequences=1, waiting=1), pool, kv_tokens=pool.tokens)
    order = Order(request_id="warm-up", prompt_tokens=_LENGTH, max_tokens=_TOKENS)
    if pool.tokens < order.capacity:
        raise StartFailed(f"--kv-bytes holds {pool.tokens} tokens only: raise it")
    runner = Runner(model)
    prompt = build_prompt([0] * _LENGTH, mrope_positions(_LENGTH, [], spec.merge), [], model.device)
    runner.add(order.request_id, prompt, Sampler(Sampling(max_tokens=_TOKENS, temperature=0), ()))
    batch.submit(order)
    while (plan := batch.plan()) is not None:
        chosen = runner.run(plan)
        batch.commit(plan, {key: choice.token for key, choice in chosen.items()})
