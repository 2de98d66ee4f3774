# Sourced by the launch scripts of this folder: what they share. They follow vLLM's example launchers
# (disagg_1e1pd_example.sh, disagg_1e1p1d_example.sh of 0.33) in variables and in the order of events.
#
# Each process leads its own process group, writes to its own log, and is taken down with the script, however that
# ends: at its end, on Ctrl-C, on SIGTERM, or when another process fails.
#
# A script sets its ports and devices, has start_bundled and start_vllm for its instances, and calls in this order
# start_instances, start_proxy, wait_all_healthy, register for each instance, ask_questions.

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

ENGINE=${ENGINE:-bundled}                       # bundled: epdctl's own workers; vllm: real vLLM instances
MODEL=${MODEL:-$ROOT/models/tiny-vlm/qwen2_5_vl}
LOG_PATH=${LOG_PATH:-$ROOT/.run/$(basename "$0" .sh)}
HOST=127.0.0.1
PROXY_PORT=${PROXY_PORT:-${ENDPOINT_PORT:-10001}}
PROXY_URL=http://$HOST:$PROXY_PORT
ENCODE_PORT=${ENCODE_PORT:-19534}
EC_PORT=${EC_PORT:-14579}                       # control port of the embeddings' consumer
EC_ADDRESS=tcp://$HOST:$EC_PORT                 # start_vllm empties it where embeddings are not pushed
GPU_E=${GPU_E:-0}
NUM_PROMPTS=${NUM_PROMPTS:-100}
MAX_NUM_SEQS=${MAX_NUM_SEQS:-128}
DATA_PARALLEL_SIZE_E=${DATA_PARALLEL_SIZE_E:-1} # engines of a bundled encode worker; GPU_E names a device for each
MAX_MODEL_LEN=${MAX_MODEL_LEN:-}                # empty: what the checkpoint allows
TIMEOUT_SECONDS=${TIMEOUT_SECONDS:-300}         # until everything is healthy
DYNAMIC_REGISTRATION=${DYNAMIC_REGISTRATION:-1} # 0: the proxy gets the URLs as flags
MOONCAKE_STORE=${MOONCAKE_STORE:-0}             # 1: a Mooncake Store that keeps embeddings of the bundled encode workers
STORE_PORT=${STORE_PORT:-19550}                 # of its master
STORE_METRICS_PORT=${STORE_METRICS_PORT:-19551}
KEEP=${KEEP:-0}                                 # 1: stay up after the last request
PICTURE=$ROOT/examples/red.png
QUESTION=${QUESTION:-What is the color of the image?}
STOP_SECONDS=15

fail() {
  say "$(basename "$0"): $*"
  exit 1
}

usage_error() {
  say "$(basename "$0"): $*"
  exit 2
}

# --- devices -------------------------------------------------------------------------------------------------------

choose_device() {
  if [ -z "${DEVICE_PLATFORM:-}" ]; then
    DEVICE_PLATFORM=cpu
    if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then DEVICE_PLATFORM=cuda; fi
  fi
  case $DEVICE_PLATFORM in
  cuda) : "${DEVICE_AFFINITY_ENV:=CUDA_VISIBLE_DEVICES}" ;;
  xpu) : "${DEVICE_AFFINITY_ENV:=ZE_AFFINITY_MASK}" ;;
  cpu) : "${DEVICE_AFFINITY_ENV:=}" ;; # no device to pick; name a variable to have one set all the same
  *) usage_error "DEVICE_PLATFORM=$DEVICE_PLATFORM: use cuda, xpu or cpu" ;;
  esac
}

affinity() { # DEVICE -> "NAME=DEVICE", or nothing where there is no device to pick
  [ -z "$DEVICE_AFFINITY_ENV" ] || printf '%s=%s\n' "$DEVICE_AFFINITY_ENV" "$1"
}

# --- processes -----------------------------------------------------------------------------------------------------

NAMES=() PIDS=() PORTS=()

stop_all() {
  local status=$? pid deadline
  trap - EXIT INT TERM
  [ ${#PIDS[@]} = 0 ] || say "stopping"
  for pid in "${PIDS[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done
  deadline=$((SECONDS + STOP_SECONDS))
  for pid in "${PIDS[@]}"; do
    while kill -0 -- "-$pid" 2>/dev/null && ((SECONDS < deadline)); do sleep 0.2; done
    kill -KILL -- "-$pid" 2>/dev/null || true
  done
  exit "$status"
}

stop_with_script() {
  trap stop_all EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
}

require_free_port() { # VARIABLE PORT
  if (exec 3<>"/dev/tcp/$HOST/$2") 2>/dev/null; then
    usage_error "port $2 is in use: set $1 to a free one"
  fi
}

start() { # NAME PORT COMMAND...
  local name=$1 port=$2
  shift 2
  setsid "$@" >"$LOG_PATH/$name.log" 2>&1 </dev/null &
  NAMES+=("$name") PIDS+=($!) PORTS+=("$port")
  say "$name: starting on port $port, log $LOG_PATH/$name.log"
}

start_store() {
  case $MOONCAKE_STORE in
  0) return 0 ;;
  1) ;;
  *) usage_error "MOONCAKE_STORE=$MOONCAKE_STORE: use 0 or 1" ;;
  esac
  [ "$ENCODE_ENGINE" = bundled ] || usage_error "MOONCAKE_STORE=1 is for bundled encode workers: set ENCODE_ENGINE=bundled"
  require_free_port STORE_PORT "$STORE_PORT"
  require_free_port STORE_METRICS_PORT "$STORE_METRICS_PORT"
  start store "$STORE_METRICS_PORT" "$VENV/bin/mooncake_master" --rpc_address="$HOST" --rpc_port="$STORE_PORT" \
    --metrics_host="$HOST" --metrics_port="$STORE_METRICS_PORT" --logtostderr=1
}

start_worker() { # KIND PORT DEVICE FLAGS...
  local kind=$1 port=$2 device=$3
  shift 3
  if [ "$kind" = encode ]; then
    set -- --allowed-local-media-path "$ROOT/examples" --data-parallel-size "$DATA_PARALLEL_SIZE_E" "$@"
    if [ "$MOONCAKE_STORE" = 1 ]; then set -- --mooncake-store "$HOST:$STORE_PORT" "$@"; fi
  elif [ -n "$MAX_MODEL_LEN" ]; then
    set -- --max-model-len "$MAX_MODEL_LEN" "$@"
  fi
  # shellcheck disable=SC2046 # an empty affinity is no word
  start "$kind" "$port" env $(affinity "$device") "$VENV_PYTHON" -m epdctl worker "$kind" --model "$MODEL" \
    --host "$HOST" --port "$port" --device "$DEVICE_PLATFORM" --max-batch-items "$MAX_NUM_SEQS" "$@"
}

start_instances() { # PORT_VARIABLES...: those of the script besides the proxy's, the encoder's and EC_PORT
  local variable
  choose_device
  choose_engine
  for variable in PROXY_PORT ENCODE_PORT "$@" EC_PORT; do
    require_free_port "$variable" "${!variable}"
  done
  ensure_environment
  ensure_engine
  mkdir -p "$LOG_PATH"
  stop_with_script
  start_store
  "start_$ENGINE"
}

answers() { # URL -> whether it answers 200
  [ "$(curl -s -o /dev/null -m 2 -w '%{http_code}' "$1")" = 200 ]
}

wait_healthy() { # INDEX
  local name=${NAMES[$1]} pid=${PIDS[$1]} port=${PORTS[$1]} told=$SECONDS
  until answers "http://$HOST:$port/health"; do
    if ! kill -0 "$pid" 2>/dev/null; then
      say "$name ended; the end of $LOG_PATH/$name.log:"
      tail -n 15 "$LOG_PATH/$name.log" | sed 's/^/    /' >&2
      exit 1
    fi
    ((SECONDS < TIMEOUT_SECONDS)) || fail "$name was not healthy within $TIMEOUT_SECONDS s; see $LOG_PATH/$name.log"
    if ((SECONDS - told >= 10)); then
      told=$SECONDS
      say "$name: not healthy yet ($SECONDS s)"
    fi
    sleep 0.3
  done
  say "$name: healthy after $SECONDS s"
}

wait_all_healthy() {
  local index
  for index in "${!PIDS[@]}"; do wait_healthy "$index"; done
}

# --- the proxy and its instances -----------------------------------------------------------------------------------

start_proxy() { # STATIC_FLAGS...: used when DYNAMIC_REGISTRATION is 0
  local flags=(--host "$HOST" --port "$PROXY_PORT" --store memory --drain-delay 0)
  if [ "$DYNAMIC_REGISTRATION" = 1 ]; then
    ADMIN_API_KEY=${ADMIN_API_KEY:-$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')}
    export ADMIN_API_KEY
    flags+=(--dynamic-registration)
  else
    unset ADMIN_API_KEY
    flags+=("$@")
  fi
  start proxy "$PROXY_PORT" "$VENV_PYTHON" -m epdctl serve "${flags[@]}"
}

register() { # ROLE PORT [EC_ADDRESS]
  [ "$DYNAMIC_REGISTRATION" = 1 ] || return 0
  local body="{\"role\": \"$1\", \"url\": \"http://$HOST:$2\"${3:+, \"ec_zmq_addrs\": [\"$3\"]}}"
  say "registering $body"
  curl -sS --fail-with-body -m 30 "$PROXY_URL/instances" -H "X-API-Key: $ADMIN_API_KEY" \
    -H 'Content-Type: application/json' -d "$body" >&2 || fail "the proxy refused the registration"
  say ""
}

wait_servable() {
  local deadline=$((SECONDS + 30))
  until answers "$PROXY_URL/ready"; do
    ((SECONDS < deadline)) || fail "the proxy is not ready; ask $PROXY_URL/instances?view=detail why"
    sleep 0.2
  done
  say "all services are up at $PROXY_URL"
}

# --- requests ------------------------------------------------------------------------------------------------------

ask_questions() {
  wait_servable
  send_prompts
  ask_about_local_picture
  stay_up
}

send_prompts() {
  ((NUM_PROMPTS > 0)) || return 0
  say "sending $NUM_PROMPTS streaming requests"
  "$VENV_PYTHON" "$ROOT/scripts/send_prompts.py" --url "$PROXY_URL" --model "$MODEL" --count "$NUM_PROMPTS" \
    --question "$QUESTION"
}

stay_up() { # until Ctrl-C, SIGTERM, or the end of a process
  [ "$KEEP" = 1 ] || return 0
  say "staying up at $PROXY_URL with the model name $MODEL; Ctrl-C stops it"
  wait -n || true
  fail "a process ended; see $LOG_PATH"
}

ask_about_local_picture() {
  local answer
  say "one request with the local picture $PICTURE"
  answer=$(curl -sS --fail-with-body -m 300 "$PROXY_URL/v1/chat/completions" -H 'Content-Type: application/json' -d '{
    "model": "'"$MODEL"'", "temperature": 0, "max_tokens": 64,
    "messages": [{"role": "user", "content": [
      {"type": "image_url", "image_url": {"url": "file://'"$PICTURE"'"}},
      {"type": "text", "text": "'"$QUESTION"'"}]}]}') || fail "the request failed: $answer"
  say "$answer"
  "$VENV_PYTHON" -c 'import json, sys; print(json.load(sys.stdin)["choices"][0]["message"]["content"])' <<<"$answer"
}
