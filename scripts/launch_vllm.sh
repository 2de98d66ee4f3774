# Sourced by the launch scripts: real vLLM instances (ENGINE=vllm).
#
#   VLLM_PYTHON      python that has vLLM; on a CPU by default the one that scripts/interop-environment installs
#   EC_CONNECTOR     ECExampleConnector (default: a shared folder) or ECMooncakeConnector
#   KV_CONNECTOR     NixlConnector, for separate prefill and decode
#   GPU_MEMORY_UTILIZATION_E 0.01, _PD _P _D 0.7     DTYPE (float32 on a CPU, else vLLM's choice)
#   KV_CACHE_MEMORY_BYTES 268435456                  on a CPU only
#   ENCODE_ENGINE vllm                               bundled: our encode worker in front of vLLM consumers
#   EC_BUFFER_SIZE 268435456                         bytes of each side's buffer, with ECMooncakeConnector

EC_CONNECTOR=${EC_CONNECTOR:-ECExampleConnector}
ENCODE_ENGINE=${ENCODE_ENGINE:-$ENGINE}
KV_CONNECTOR=${KV_CONNECTOR:-NixlConnector}
EC_SHARED_STORAGE_PATH=${EC_SHARED_STORAGE_PATH:-/tmp/ec_cache}
GPU_MEMORY_UTILIZATION_E=${GPU_MEMORY_UTILIZATION_E:-0.01}
GPU_MEMORY_UTILIZATION_PD=${GPU_MEMORY_UTILIZATION_PD:-0.7}
GPU_MEMORY_UTILIZATION_P=${GPU_MEMORY_UTILIZATION_P:-0.7}
GPU_MEMORY_UTILIZATION_D=${GPU_MEMORY_UTILIZATION_D:-0.7}
KV_CACHE_MEMORY_BYTES=${KV_CACHE_MEMORY_BYTES:-268435456}
EC_BUFFER_SIZE=${EC_BUFFER_SIZE:-268435456}

# UCX, under NIXL: every transport, as vLLM's example has it; on a CPU plain TCP over loopback.
NIXL_TRANSPORT=(UCX_TLS=all UCX_NET_DEVICES=all)

choose_engine() {
  if [ "$DEVICE_PLATFORM" = cpu ]; then NIXL_TRANSPORT=(UCX_TLS=tcp UCX_NET_DEVICES=lo); fi
  case $ENGINE in
  bundled | vllm) ;;
  *) usage_error "ENGINE=$ENGINE: use bundled or vllm" ;;
  esac
  case $ENCODE_ENGINE in
  "$ENGINE" | bundled) ;;
  *) usage_error "ENCODE_ENGINE=$ENCODE_ENGINE: use bundled, or leave it out; ENGINE is $ENGINE" ;;
  esac
  case $EC_CONNECTOR in
  ECExampleConnector | ECMooncakeConnector) ;;
  *) usage_error "EC_CONNECTOR=$EC_CONNECTOR: use ECExampleConnector or ECMooncakeConnector" ;;
  esac
}

ensure_engine() {
  [ "$ENGINE" = vllm ] || return 0
  if [ -z "${VLLM_PYTHON:-}" ] && [ "$DEVICE_PLATFORM" = cpu ]; then
    VLLM_PYTHON=$("$ROOT/scripts/interop-environment")/venv/bin/python
  fi
  VLLM_PYTHON=${VLLM_PYTHON:-python3}
  "$VLLM_PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("vllm") is None)' ||
    usage_error "$VLLM_PYTHON has no vllm: name a python that has it with VLLM_PYTHON"
  if [ "$EC_CONNECTOR" = ECExampleConnector ]; then empty_shared_storage; fi
}

# The folder is shared with every reader of its embeddings: only one that holds nothing else may be emptied.
empty_shared_storage() {
  mkdir -p "$EC_SHARED_STORAGE_PATH"
  local entry
  for entry in "$EC_SHARED_STORAGE_PATH"/*; do
    [ -e "$entry" ] || continue
    [ -f "$entry/encoder_cache.safetensors" ] ||
      usage_error "EC_SHARED_STORAGE_PATH=$EC_SHARED_STORAGE_PATH holds $entry, which is no embedding: name another folder"
  done
  rm -rf "${EC_SHARED_STORAGE_PATH:?}"/*
}

vllm_environment() { # one NAME=VALUE a line
  printf '%s\n' DO_NOT_TRACK=1 VLLM_NO_USAGE_STATS=1 "VLLM_HOST_IP=$HOST"
  if [ -d "$MODEL" ]; then printf '%s\n' HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1; fi
  if [ "$DEVICE_PLATFORM" = cpu ]; then
    # One thread an instance and no core binding: several instances share the machine. Without dynamo the first
    # request compiles no C++. Mooncake must not look for network adapters.
    printf '%s\n' CUDA_VISIBLE_DEVICES= VLLM_CPU_CI_ENV=1 VLLM_CPU_OMP_THREADS_BIND=nobind "OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}" \
      TORCHDYNAMO_DISABLE=1 MC_FORCE_TCP=1
  fi
}

ec_config() { # ec_producer | ec_consumer -> the JSON of --ec-transfer-config
  local device=$DEVICE_PLATFORM
  if [ "$EC_CONNECTOR" = ECExampleConnector ]; then
    printf '{"ec_connector": "ECExampleConnector", "ec_role": "%s", "ec_connector_extra_config": {"shared_storage_path": "%s"}}' \
      "$1" "$EC_SHARED_STORAGE_PATH"
    return
  fi
  printf '{"ec_connector": "ECMooncakeConnector", "ec_role": "%s", "ec_ip": "%s", "ec_port": %s, "ec_buffer_device": "%s", "ec_buffer_size": %s, "ec_connector_extra_config": {"mooncake_protocol": "%s"}}' \
    "$1" "$HOST" "$EC_PORT" "$device" "$EC_BUFFER_SIZE" "$(mooncake_protocol)"
}

mooncake_protocol() {
  local found=tcp
  if [ -n "$(ls -A /sys/class/infiniband 2>/dev/null)" ]; then found=rdma; fi
  if [ "$DEVICE_PLATFORM" = cpu ]; then printf tcp; else printf '%s' "${MOONCAKE_PROTOCOL:-$found}"; fi
}

kv_config() { # kv_producer | kv_consumer -> the JSON of --kv-transfer-config
  local device=
  if [ "$DEVICE_PLATFORM" = cpu ]; then device=', "kv_buffer_device": "cpu"'; fi
  printf '{"kv_connector": "%s", "kv_role": "%s"%s}' "$KV_CONNECTOR" "$1" "$device"
}

serve_vllm() { # NAME PORT DEVICE GPU_MEMORY_UTILIZATION FLAGS...
  local name=$1 port=$2 device=$3 share=$4 memory=() dtype=${DTYPE:-}
  shift 4
  if [ "$DEVICE_PLATFORM" = cpu ]; then
    memory=(--kv-cache-memory-bytes "$KV_CACHE_MEMORY_BYTES")
    dtype=${dtype:-float32}
  else
    memory=(--gpu-memory-utilization "$share")
  fi
  # The module, not the `vllm` command: that one insists on a distribution of this name, and CPU wheels have another.
  # shellcheck disable=SC2046 # one word a line, none with blanks
  start "$name" "$port" env -u VLLM_CPU_KVCACHE_SPACE $(vllm_environment) $(affinity "$device") ${EXTRA_ENV[@]+"${EXTRA_ENV[@]}"} \
    "$VLLM_PYTHON" -m vllm.entrypoints.openai.api_server --model "$MODEL" --host "$HOST" --port "$port" \
    --enforce-eager --enable-request-id-headers --max-num-seqs "$MAX_NUM_SEQS" \
    ${MAX_MODEL_LEN:+--max-model-len "$MAX_MODEL_LEN"} ${dtype:+--dtype "$dtype"} "${memory[@]}" \
    --allowed-local-media-path "$ROOT/examples" "$@"
}

# Our encode worker, with the connector and the data type of the vLLM instances that read its embeddings.
start_bundled_encode() { # PORT DEVICE
  local dtype=${DTYPE:-auto}
  if [ "$DEVICE_PLATFORM" = cpu ]; then dtype=${DTYPE:-float32}; fi
  local connector=(--ec-connector mooncake --mooncake-protocol "$(mooncake_protocol)")
  if [ "$EC_CONNECTOR" = ECExampleConnector ]; then
    connector=(--ec-connector shared-filesystem --shared-storage-path "$EC_SHARED_STORAGE_PATH")
  fi
  start_worker encode "$1" "$2" --dtype "$dtype" "${connector[@]}"
}

start_vllm_encode() { # PORT DEVICE
  if [ "$ENCODE_ENGINE" = bundled ]; then
    start_bundled_encode "$1" "$2"
    return
  fi
  # Required for an encoder: eager mode, no prefix cache, and a token budget that never limits it.
  serve_vllm encode "$1" "$2" "$GPU_MEMORY_UTILIZATION_E" --no-enable-prefix-caching --max-num-batched-tokens 114688 \
    --ec-transfer-config "$(ec_config ec_producer)"
}

start_vllm_consumer() { # NAME PORT DEVICE GPU_MEMORY_UTILIZATION FLAGS...
  local name=$1 port=$2 device=$3 share=$4
  shift 4
  serve_vllm "$name" "$port" "$device" "$share" --enable-mm-embeds --ec-transfer-config "$(ec_config ec_consumer)" "$@"
}
