#!/usr/bin/env bash
# One encode, one prefill and one decode instance and the proxy: start, wait, register, send NUM_PROMPTS requests, then
# one with a local picture (its answer is the only line on stdout), and take everything down.
#
#   scripts/launch_1e1p1d.sh                                     the tiny model on the CPU, bundled workers
#   MODEL=Qwen/Qwen2.5-VL-3B-Instruct scripts/launch_1e1p1d.sh   a model of the hub
#   ENGINE=vllm scripts/launch_1e1p1d.sh                         vLLM instances; KV travels by NixlConnector
#
# Variables, as in vLLM's disagg_1e1p1d_example.sh, with their defaults:
#   MODEL                 the tiny model of this repository
#   ENCODE_PORT 19534     PREFILL_PORT 19535  DECODE_PORT 19536      PROXY_PORT (or ENDPOINT_PORT) 10001
#   DEVICE_PLATFORM       cuda, xpu or cpu; cuda where nvidia-smi finds a device, else cpu
#   GPU_E 0 GPU_P 1 GPU_D 2  which device each instance sees, by DEVICE_AFFINITY_ENV (CUDA_VISIBLE_DEVICES, ZE_AFFINITY_MASK)
#   MAX_NUM_SEQS 128      MAX_MODEL_LEN (the checkpoint's)
#   NUM_PROMPTS 100       LOG_PATH .run/launch_1e1p1d    TIMEOUT_SECONDS 300
#   DYNAMIC_REGISTRATION  1: register over HTTP with ADMIN_API_KEY (made up when not given); 0: static URLs
#   EC_SHARED_STORAGE_PATH  folder of ECExampleConnector (ENGINE=vllm); emptied first, so it must be ours
#   DATA_PARALLEL_SIZE_E 1  engines of a bundled encode worker, with as many devices in GPU_E (0,1)
#   MOONCAKE_STORE 0      1: start a Mooncake Store too (STORE_PORT 19550, STORE_METRICS_PORT 19551) and let the bundled encode worker use it
# and besides: ENGINE (bundled, vllm), EC_PORT 14579, QUESTION, KEEP 1 (stay up after the last request); with ENGINE=vllm those of launch_vllm.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch_lib.sh"
source "$ROOT/scripts/launch_vllm.sh"

PREFILL_PORT=${PREFILL_PORT:-19535}
DECODE_PORT=${DECODE_PORT:-19536}
GPU_P=${GPU_P:-1}
GPU_D=${GPU_D:-2}

start_bundled() {
  start_worker encode "$ENCODE_PORT" "$GPU_E"
  start_worker prefill "$PREFILL_PORT" "$GPU_P" --ec-ip "$HOST" --ec-port "$EC_PORT"
  start_worker decode "$DECODE_PORT" "$GPU_D"
}

start_vllm() {
  start_vllm_encode "$ENCODE_PORT" "$GPU_E"
  EXTRA_ENV=("VLLM_NIXL_SIDE_CHANNEL_HOST=$HOST" VLLM_NIXL_SIDE_CHANNEL_PORT=5559 "${NIXL_TRANSPORT[@]}")
  start_vllm_consumer prefill "$PREFILL_PORT" "$GPU_P" "$GPU_MEMORY_UTILIZATION_P" \
    --kv-transfer-config "$(kv_config kv_producer)"
  EXTRA_ENV=("VLLM_NIXL_SIDE_CHANNEL_HOST=$HOST" VLLM_NIXL_SIDE_CHANNEL_PORT=6000 "${NIXL_TRANSPORT[@]}")
  serve_vllm decode "$DECODE_PORT" "$GPU_D" "$GPU_MEMORY_UTILIZATION_D" --enable-mm-embeds \
    --kv-transfer-config "$(kv_config kv_consumer)"
  if [ "$EC_CONNECTOR" != ECMooncakeConnector ]; then EC_ADDRESS=; fi
}

start_instances PREFILL_PORT DECODE_PORT
start_proxy --encode-servers-urls "http://$HOST:$ENCODE_PORT" --prefill-servers-urls "http://$HOST:$PREFILL_PORT" \
  --decode-servers-urls "http://$HOST:$DECODE_PORT" ${EC_ADDRESS:+--ec-consumer-zmq-addrs "$EC_ADDRESS"}
wait_all_healthy
register encode "$ENCODE_PORT"
register prefill "$PREFILL_PORT" "$EC_ADDRESS"
register decode "$DECODE_PORT"
ask_questions
