#!/usr/bin/env bash
# The main job from end to end on this machine; see scripts/demo.py.
#
#   scripts/demo.sh [--thorough] [flags of scripts.demo, such as --out=DIR or --epochs=5]
#
# It synthesises speech, and trains acoustic models on it: in one process, and under three rules in
# two processes. It compares their errors, and exports the best model. This takes about three
# minutes on two free cores. The first run makes .venv and downloads its packages, 500 MB; later
# runs reuse it.
# --thorough: also classical BMUF, syncs in int8 and EASGD, and five epochs: about six minutes.
# python -m scripts.demo --help, in .venv, lists all flags.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh

case ${1:-} in -h | --help) usage ;; esac

say "Synthesises speech, trains an acoustic model under several rules, compares them, exports the best."
say "The first time it installs packages in .venv, which takes about 2 minutes; then it says how long it takes."
stack=full
(find_python full) >/dev/null 2>&1 || stack=latest # this machine may have only a newer Python
ensure_venv "$PWD/.venv" "$stack" speech,plot
install_wheel "$PWD/.venv"
say "Training: python -m scripts.demo $*"
exec "$PWD/.venv/bin/python" -m scripts.demo "$@"
