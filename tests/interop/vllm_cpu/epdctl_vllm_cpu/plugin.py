"""A general plugin of vLLM: EC loads on steps that schedule no token, for the V1 model runner on a CPU.

A consumer of ECMooncakeConnector defers a request until its embedding has arrived, and has the worker load
it on a step that schedules no token. vLLM's V2 runner asks the EC connector on such a step; the V1 runner,
the only one that works on a CPU, returns before it does (`v1/worker/gpu_model_runner.py` of 0.32 and 0.33,
`execute_model`).

Rules of this file: only the worker process of a CPU instance is touched, and only results of empty steps.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from typing import Any


def register() -> None:
    """Wrap the runner of this process, if it needs it; vLLM calls this in each of its processes."""
    if not multiprocessing.current_process().name.startswith("VllmWorker"):
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    _answer_device_index()
    _load_on_empty_steps()


def _answer_device_index() -> None:
    index = os.environ.get("EPDCTL_VLLM_CPU_DEVICE_INDEX", "")
    if index.isdigit():
        import torch

        torch.accelerator.current_device_index = lambda: int(index)


def _load_on_empty_steps() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    inner = GPUModelRunner.execute_model
    if getattr(inner, "loads_on_empty_steps", False):
        return

    @functools.wraps(inner)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        result = inner(self, scheduler_output, *args, **kwargs)
        return _with_loads(self, scheduler_output, result)

    execute_model.loads_on_empty_steps = True  # type: ignore[attr-defined]
    GPUModelRunner.execute_model = execute_model


def _with_loads(runner: Any, scheduler_output: Any, result: Any) -> Any:
    from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer
    from vllm.v1.outputs import ModelRunnerOutput

    empty = scheduler_output.total_num_scheduled_tokens == 0
    asked = scheduler_output.ec_connector_metadata is not None
    if not (empty and asked and isinstance(result, ModelRunnerOutput)):
        return result
    if not (has_ec_transfer() and get_ec_transfer().is_consumer):
        return result
    with runner.maybe_get_ec_connector_output(scheduler_output, encoder_cache=runner.encoder_cache) as loaded:
        pass
    return ModelRunnerOutput.with_ec_conn_output(result, loaded)
