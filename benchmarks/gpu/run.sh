#!/usr/bin/env bash
# Proves and measures Unfog on a GPU in nine minutes, with what the machine has: no network, nothing is installed.
# README.md says how to bring along wheels that it lacks.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)" root="$(cd "$(dirname "$0")/../.." && pwd)"
python="${PYTHON:-}"
if [ -z "$python" ]; then
    python="$root/.venv/bin/python"
    [ -x "$python" ] || python="$(command -v python3)"
fi
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}"
# Pure Python wheels work where they are unpacked. They come before what the machine has itself.
if compgen -G "$here/wheels/*.whl" >/dev/null; then
    packages="$(mktemp -d)"
    trap 'rm -rf "$packages"' EXIT
    for wheel in "$here"/wheels/*.whl; do "$python" -m zipfile -e "$wheel" "$packages"; done
    export PYTHONPATH="$PYTHONPATH:$packages"
fi
"$python" "$here/run.py" "$@"
