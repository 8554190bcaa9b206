#!/usr/bin/env bash
# Proves and measures Unfog on a GPU, in visits of minutes. It asks no network. README.md has more.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)" root="$(cd "$(dirname "$0")/../.." && pwd)"
python="${PYTHON:-}"
if [ -z "$python" ]; then
    python="$root/.venv/bin/python"
    [ -x "$python" ] || python="$(command -v python3)"
fi
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
trap : INT TERM # a visit that is stopped writes what it has first
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}"
# cuBLAS reads this at the first product of a process, whoever computes it.
export CUBLAS_WORKSPACE_CONFIG="${CUBLAS_WORKSPACE_CONFIG:-:4096:8}"
# One cache for all parts, so that code is compiled once.
export UNFOG_CACHE="${UNFOG_CACHE:-$work/cache}"
mkdir -p "$UNFOG_CACHE"
# Containers often say that Python is to keep nothing that it compiled: each part would compile all of torch's modules.
export PYTHONDONTWRITEBYTECODE=
"$python" "$here/run.py" --work "$work" "$@"
