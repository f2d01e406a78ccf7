#!/usr/bin/env bash
# Run the scheduler tests with the interpreter of a real vLLM environment: SPARKPAIR_VLLM_VENV, or .cache/vllm-venv.
# Nothing in that environment is changed, but for pytest and hypothesis, which are added when they are missing.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
venv=${SPARKPAIR_VLLM_VENV:-$root/.cache/vllm-venv}
if ! [ -x "$venv/bin/python" ] || ! "$venv/bin/python" -c 'import importlib.util as u; assert u.find_spec("vllm")' 2>/dev/null; then
  echo "tests/scheduler: no vLLM in $venv: run 'make vllm-venv', or set SPARKPAIR_VLLM_VENV to an environment with vLLM" >&2
  exit 1
fi
"$venv/bin/python" -c 'import pytest, hypothesis' 2>/dev/null ||
  "$root/.cache/venv/bin/uv" pip install --quiet --python "$venv/bin/python" pytest hypothesis
cd "$root"
exec "$venv/bin/python" -m pytest -c tests/scheduler/pytest.ini tests/scheduler "$@"
