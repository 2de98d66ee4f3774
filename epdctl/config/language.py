"""Settings of the bundled language workers.

Rules of this file: a flag is here only if it works; defaults exist once, here.
"""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from epdctl.config.worker import GIB, MIB, WorkerSettings
from epdctl.hosts import is_host

LARGEST_PORT = 65535


def _host(value: str | None) -> str | None:
    if value is not None and not is_host(value):
        raise ValueError(f"'{value}' is no host: give a name or an IP address, without port or brackets")
    return value


class LanguageSettings(WorkerSettings):
    """Settings that every language worker has."""

    port: int = Field(8002, ge=0, le=LARGEST_PORT, description="Port to listen on; 0 picks a free one.")
    data_parallel_size: int = Field(
        1, ge=1, le=64, description="Replicas of the model, each in a process of its own."
    )
    max_model_len: int | None = Field(
        None, ge=2, description="Most tokens of prompt and answer together. Default: the model's own limit."
    )
    default_max_tokens: int | None = Field(
        None,
        ge=1,
        description="Most tokens of an answer whose request names no max_tokens, for all of which memory is "
        "reserved. Default: all that the context and --kv-bytes leave.",
    )
    kv_bytes: int = Field(
        GIB, ge=1, description="Memory of keys and values, for each replica; requests wait until theirs fits."
    )
    max_batch_tokens: int = Field(
        512, ge=2, description="Most tokens in one step; longer prompts take several, beside running answers."
    )
    max_batch_items: int = Field(64, ge=1, description="Most answers that are generated at the same time.")
    queue_size: int = Field(256, ge=1, description="Most requests that wait for a place; beyond it 429.")

    @model_validator(mode="after")
    def _room_for_prompts(self) -> LanguageSettings:
        if self.max_batch_tokens <= self.max_batch_items:
            raise ValueError("--max-batch-tokens must be above --max-batch-items, or prompts would starve")
        return self


class EcConsumerSettings(LanguageSettings):
    """Settings of a worker that embeddings are pushed to."""

    ec_ip: str | None = Field(
        None,
        description="Address that the control socket for embeddings listens on. Default: the host of the "
        "advertised URL.",
    )
    ec_port: int = Field(
        14579, ge=1, le=LARGEST_PORT, description="Port of that socket; replica N uses this port + N."
    )
    ec_advertise_host: str | None = Field(
        None, description="Host under which encoders reach that socket and Mooncake. Default: --ec-ip."
    )
    ec_buffer_bytes: int = Field(
        256 * MIB, ge=MIB, description="Memory that embeddings are pushed into, for each replica."
    )
    push_wait_timeout: float = Field(
        60.0, gt=0, description="Seconds that a request waits for its embeddings before it fails with 500."
    )

    _ec_hosts = field_validator("ec_ip", "ec_advertise_host")(_host)

    @model_validator(mode="after")
    def _ports_exist(self) -> EcConsumerSettings:
        if self.ec_port + self.data_parallel_size - 1 > LARGEST_PORT:
            raise ValueError("--ec-port plus --data-parallel-size goes beyond the last port, 65535")
        return self


class PrefillDecodeSettings(EcConsumerSettings):
    """Run a prefill_decode worker: the language model of a checkpoint, without its vision tower.

    Images reach it as embeddings that an encode worker, or a vLLM encoder, pushes over Mooncake; requests
    come through the proxy.

    examples:
      epdctl worker prefill-decode --model Qwen/Qwen2.5-VL-3B-Instruct --port 8002
      epdctl worker prefill-decode --model models/tiny-vlm/qwen2_5_vl --host 127.0.0.1 --ec-port 14579
      epdctl worker prefill-decode --model ./m --data-parallel-size 2 --register http://127.0.0.1:8000
    """


class PrefillSettings(EcConsumerSettings):
    """Run a prefill worker: it computes prompts and hands their keys and values over to decode workers.

    Its answers hold one token and the kv_transfer_params that the proxy gives to a decode worker.

    examples:
      epdctl worker prefill --model Qwen/Qwen2.5-VL-3B-Instruct --port 8002
      epdctl worker prefill --model models/tiny-vlm/qwen2_5_vl --host 127.0.0.1 --kv-lease 30
    """

    kv_ip: str | None = Field(
        None,
        description="Address that the socket for KV hand-overs listens on. Default: the host of the "
        "advertised URL.",
    )
    kv_port: int = Field(
        0,
        ge=0,
        le=LARGEST_PORT,
        description="Port of that socket; replica N uses this port + N; 0: any free.",
    )
    kv_lease: float = Field(
        60.0, gt=0, description="Seconds that a finished prompt's KV waits for a decode worker."
    )

    _kv_hosts = field_validator("kv_ip")(_host)

    @model_validator(mode="after")
    def _kv_ports_exist(self) -> PrefillSettings:
        if self.kv_port and self.kv_port + self.data_parallel_size - 1 > LARGEST_PORT:
            raise ValueError("--kv-port plus --data-parallel-size goes beyond the last port, 65535")
        return self


class DecodeSettings(LanguageSettings):
    """Run a decode worker: it goes on from prompts that prefill workers have computed.

    Keys and values are written into its memory over Mooncake; no images reach it.

    examples:
      epdctl worker decode --model Qwen/Qwen2.5-VL-3B-Instruct --port 8003
      epdctl worker decode --model models/tiny-vlm/qwen2_5_vl --host 127.0.0.1 --register http://127.0.0.1:8000
    """

    port: int = Field(8003, ge=0, le=LARGEST_PORT, description="Port to listen on; 0 picks a free one.")
    kv_wait_timeout: float = Field(
        30.0,
        gt=0,
        description="Seconds that a prompt's KV may take to arrive before the request fails with 500.",
    )
