# Sourced by the scripts of this folder: makes the project's virtual environment ready, once.
#
#   ensure_environment      .venv with the package, its worker and dev extras; Debian's libraries for Mooncake
#
# pip's own variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS) are honoured. PYTHON names the
# interpreter the environment is made from (3.11 or newer).

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${EPDCTL_VENV:-$ROOT/.venv}
VENV_PYTHON=$VENV/bin/python
SYSTEM_LIBRARIES=(libibverbs1 librdmacm1 libnuma1)

say() { printf '%s\n' "$*" >&2; }

missing_libraries() {
  local name known
  known=$(ldconfig -p) # not piped: grep -q ends at its match, and pipefail would take ldconfig's SIGPIPE for "missing"
  for name in libibverbs.so.1 librdmacm.so.1 libnuma.so.1; do
    grep -q "$name" <<<"$known" || { echo "$name"; return; }
  done
}

ensure_libraries() {
  [ -z "$(missing_libraries)" ] && return
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing ${SYSTEM_LIBRARIES[*]} (Mooncake needs them, also over TCP)"
    { apt-get update -q && apt-get install -y -q "${SYSTEM_LIBRARIES[@]}"; } >&2
  else
    say "Mooncake needs $(missing_libraries), which is not installed. Run this, then try again:"
    say "  sudo apt-get install -y ${SYSTEM_LIBRARIES[*]}"
    exit 1
  fi
}

python_for_environment() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  say "Python 3.11 or newer is needed; name one with PYTHON=/path/to/python"
  exit 1
}

ensure_environment() {
  ensure_libraries
  local stamp=$VENV/.epdctl-ready wanted python
  wanted=$(cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" | sha256sum | cut -d' ' -f1)
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && return
  python=$(python_for_environment)
  say "setting up $VENV with $("$python" --version) (once; PyTorch, transformers and Mooncake take minutes)"
  [ -x "$VENV_PYTHON" ] || "$python" -m venv "$VENV" >&2
  "$VENV_PYTHON" -m pip install --quiet --upgrade pip >&2
  # PyTorch by itself first: with its exact version pip takes the build that the given indexes prefer.
  say "  installing PyTorch"
  "$VENV_PYTHON" -m pip install --quiet "$(grep '^torch==' "$ROOT/constraints.txt")" >&2
  say "  installing epdctl with its worker, cpu and dev extras"
  "$VENV_PYTHON" -m pip install --quiet -c "$ROOT/constraints.txt" -e "$ROOT[worker,cpu,dev]" >&2
  echo "$wanted" >"$stamp"
  say "environment ready"
}
