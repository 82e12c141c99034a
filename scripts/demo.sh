#!/usr/bin/env bash
# The main job from end to end on this machine; see scripts/demo.py.
#
#   scripts/demo.sh [flags of scripts.demo, such as --out=DIR or --epochs=3]
#
# The first run makes .venv and downloads its packages; later runs reuse it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh

case ${1:-} in -h | --help) usage ;; esac

ensure_venv "$PWD/.venv" full speech,plot
install_wheel "$PWD/.venv"
say "Training: python -m scripts.demo $*"
exec "$PWD/.venv/bin/python" -m scripts.demo "$@"
