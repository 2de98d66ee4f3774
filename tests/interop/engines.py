"""Command lines of the real vLLM instances.

Rules of this file: pure; ports and folders are handed in. The flags and variables are those of
`scripts/launch_vllm.sh`, cut down to a tiny model and to several instances on two cores.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

HOST = "127.0.0.1"
MODEL_NAME = "tiny"
MAX_IMAGES = 4
BUFFER_BYTES = 64 * 1024 * 1024
PUSH_WAIT_S = 15


class EcConnector(StrEnum):
    """vLLM's encoder cache connectors that work on a CPU."""

    EXAMPLE = "ECExampleConnector"
    MOONCAKE = "ECMooncakeConnector"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One kind of vLLM instance; `ec_role` and `kv_role` are vLLM's names, None means no such connector."""

    name: str
    ec: EcConnector | None = None
    ec_role: str | None = None
    kv: str | None = None
    kv_role: str | None = None


PLAIN = EngineSpec(name="plain")
ENCODE_EXAMPLE = EngineSpec(name="encode-example", ec=EcConnector.EXAMPLE, ec_role="ec_producer")
ENCODE_MOONCAKE = EngineSpec(name="encode-mooncake", ec=EcConnector.MOONCAKE, ec_role="ec_producer")
PREFILL_DECODE_EXAMPLE = EngineSpec(
    name="prefill-decode-example", ec=EcConnector.EXAMPLE, ec_role="ec_consumer"
)
PREFILL_DECODE_MOONCAKE = EngineSpec(
    name="prefill-decode-mooncake", ec=EcConnector.MOONCAKE, ec_role="ec_consumer"
)
PREFILL_NIXL = EngineSpec(
    name="prefill-nixl",
    ec=EcConnector.EXAMPLE,
    ec_role="ec_consumer",
    kv="NixlConnector",
    kv_role="kv_producer",
)
PREFILL_NIXL_MOONCAKE = EngineSpec(
    name="prefill-nixl-mooncake",
    ec=EcConnector.MOONCAKE,
    ec_role="ec_consumer",
    kv="NixlConnector",
    kv_role="kv_producer",
)
DECODE_NIXL = EngineSpec(name="decode-nixl", kv="NixlConnector", kv_role="kv_consumer")
PREFILL_MOONCAKE_KV = EngineSpec(
    name="prefill-mooncake-kv",
    ec=EcConnector.EXAMPLE,
    ec_role="ec_consumer",
    kv="MooncakeConnector",
    kv_role="kv_producer",
)
DECODE_MOONCAKE_KV = EngineSpec(name="decode-mooncake-kv", kv="MooncakeConnector", kv_role="kv_consumer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an instance listens and what it shares: HTTP, EC control and KV side-channel ports."""

    http_port: int
    ec_port: int
    side_port: int
    shared_storage: Path


def engine_arguments(spec: EngineSpec, place: Place, model: Path) -> list[str]:
    """Return the arguments of vLLM's API server for `spec` at `place`."""
    arguments = [
        *("--model", str(model), "--served-model-name", MODEL_NAME),
        *("--host", HOST, "--port", str(place.http_port)),
        *("--dtype", "float32", "--enforce-eager", "--enable-request-id-headers"),
        *("--max-model-len", "1024", "--max-num-seqs", "4"),
        *("--limit-mm-per-prompt", json.dumps({"image": MAX_IMAGES})),
        *("--kv-cache-memory-bytes", str(BUFFER_BYTES)),
        # Requests with mm_processor_kwargs are refused without it.
        "--trust-request-mm-kwargs",
    ]
    if spec.ec is not None:
        arguments += ["--ec-transfer-config", json.dumps(_ec_config(spec, place))]
    if spec.ec_role == "ec_producer":
        arguments += ["--no-enable-prefix-caching", "--max-num-batched-tokens", "8192"]
    if spec.ec_role == "ec_consumer":
        arguments += ["--enable-mm-embeds"]
    if spec.kv is not None:
        arguments += ["--kv-transfer-config", json.dumps(_kv_config(spec))]
    if spec.kv_role == "kv_consumer":
        arguments += ["--enable-mm-embeds"]
    return arguments


def _ec_config(spec: EngineSpec, place: Place) -> dict[str, object]:
    if spec.ec is EcConnector.EXAMPLE:
        extra: dict[str, object] = {"shared_storage_path": str(place.shared_storage)}
        return {"ec_connector": spec.ec, "ec_role": spec.ec_role, "ec_connector_extra_config": extra}
    return {
        "ec_connector": spec.ec,
        "ec_role": spec.ec_role,
        "ec_ip": HOST,
        "ec_port": place.ec_port,
        "ec_buffer_device": "cpu",
        "ec_buffer_size": BUFFER_BYTES,
        "ec_connector_extra_config": {"mooncake_protocol": "tcp", "push_wait_timeout_s": PUSH_WAIT_S},
    }


def _kv_config(spec: EngineSpec) -> dict[str, object]:
    config: dict[str, object] = {"kv_connector": spec.kv, "kv_role": spec.kv_role, "kv_buffer_device": "cpu"}
    if spec.kv == "MooncakeConnector":
        config["kv_connector_extra_config"] = {"mooncake_protocol": "tcp"}
    return config


def engine_environment(place: Place) -> dict[str, str | None]:
    """Return the variables to lay over the environment of an instance; None removes one."""
    return {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "VLLM_HOST_IP": HOST,
        "VLLM_CPU_CI_ENV": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": None,  # whole GiB only, and it would win over --kv-cache-memory-bytes
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # else the first request compiles C++
        "MC_FORCE_TCP": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(place.side_port),
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(place.side_port),
        "EPDCTL_VLLM_CPU_DEVICE_INDEX": "0",  # the KV MooncakeConnector asks for it without need
        "UCX_TLS": "tcp",
        "UCX_NET_DEVICES": "lo",
        "PYTHONPATH": None,
    }
