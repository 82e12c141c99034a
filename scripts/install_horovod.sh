#!/usr/bin/env bash
# Builds Horovod 0.28.1 for the TensorFlow of an environment, and installs it there.
#
#   scripts/install_horovod.sh [--venv=DIR] [--mpi]
#
# --venv=DIR  the environment (default: the one that is active, else .venv)
# --mpi       for mpirun; without it Horovod has Gloo alone, for horovodrun and tfpara-launch
#
# The build takes some minutes. Its wheel is kept in ${XDG_CACHE_HOME:-~/.cache}/tfpara, and reused
# for the same versions of TensorFlow and Python. Needs g++, make, cmake below 4 and, for MPI,
# Open MPI.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh

version=0.28.1
venv=${VIRTUAL_ENV:-.venv}
transport=gloo
while [ $# -gt 0 ]; do
  case $1 in
    --venv=*) venv=${1#*=} ;;
    --venv) venv=${2:-}; shift ;;
    --mpi) transport=mpi ;;
    -h | --help) usage ;;
    *) fail "unknown argument $1. There are --venv=DIR and --mpi" ;;
  esac
  shift
done
python=$venv/bin/python
"$python" -c pass 2>/dev/null || fail "$venv is no environment of Python. Name one: $0 --venv=DIR"
venv=$(realpath "$venv")
python=$venv/bin/python
of_package() { # of_package NAME: prints the version of a package
  "$python" -c "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))" "$1" 2>/dev/null
}
tensorflow=$(of_package tensorflow) \
  || fail "$venv has no TensorFlow, against which Horovod is built. Install it first."
tag=$("$python" -c 'import sys, platform; print("cp%d%d-" % sys.version_info[:2] + platform.machine())')
cache=${XDG_CACHE_HOME:-$HOME/.cache}/tfpara
kept=$cache/horovod-$version-tensorflow-$tensorflow-$tag-$transport

# If a file in constraints/ pins this version of TensorFlow, its constraints are used.
constraints=()
for stack in full latest; do
  if grep -qx "tensorflow==$tensorflow" "constraints/$stack.txt"; then
    constraints=(-c "constraints/$stack.txt")
  fi
done
pip() { "$python" -m pip --disable-pip-version-check "$@"; }

loads() { # loads: whether the environment has a Horovod that was built for its TensorFlow
  TF_CPP_MIN_LOG_LEVEL=3 "$python" - "$tensorflow" "$transport" <<'END'
import json
import pathlib
import sys

import horovod.tensorflow as horovod

tensorflow, transport = sys.argv[1:]
record = pathlib.Path(horovod.__file__).parents[1] / "metadata.json"
built_for = json.loads(record.read_text())["tensorflow"]
if built_for != tensorflow:
    sys.exit(f"it was built for TensorFlow {built_for}")
if not (horovod.mpi_built() if transport == "mpi" else horovod.gloo_built()):
    sys.exit(f"it was built without {transport}")
END
}
if loads 2>/dev/null; then
  say "Horovod (${transport^^}, TensorFlow $tensorflow) is in $venv already"
  exit
fi

check_tools() {
  local missing=() tool packages="g++ make cmake"
  if [ "$transport" = mpi ]; then packages="$packages libopenmpi-dev openmpi-bin"; fi
  for tool in g++ make cmake; do
    command -v "$tool" >/dev/null || missing+=("$tool")
  done
  if [ "$transport" = mpi ] && ! command -v mpicxx >/dev/null; then missing+=("mpicxx"); fi
  if [ ${#missing[@]} -gt 0 ]; then
    fail "Horovod's build needs ${missing[*]}, not found in PATH. On Debian: apt-get install $packages"
  fi
  local cmake
  cmake=$(cmake --version | sed -n '1s/.* //p')
  case $cmake in
    [0-2].* | 3.[0-9].* | 3.1[0-2].* | [4-9].* | [1-9][0-9]*.*)
      fail "Horovod's build needs cmake from 3.13 to below 4, and $(command -v cmake) is $cmake. On Debian: apt-get install cmake; or: pip install 'cmake<4'" ;;
  esac
}

build() { # build: makes the wheel, and moves it to $kept only when it is complete
  check_tools
  say "Building Horovod $version with ${transport^^} for TensorFlow $tensorflow; this takes some minutes"
  pip install --quiet "${constraints[@]}" setuptools wheel packaging cloudpickle psutil pyyaml
  mkdir -p "$cache"
  local work with_mpi=HOROVOD_WITHOUT_MPI=1
  if [ "$transport" = mpi ]; then with_mpi=HOROVOD_WITH_MPI=1; fi
  work=$(mktemp -d "$cache/building-XXXXXX")
  trap "rm -rf '$work'" EXIT
  if ! env PATH="$venv/bin:$PATH" MAKEFLAGS="${MAKEFLAGS:--j$(nproc)}" HOROVOD_WITH_TENSORFLOW=1 \
      HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1 "$with_mpi" \
      "$python" -m pip --disable-pip-version-check wheel --no-deps --no-build-isolation \
      --no-binary horovod --no-cache-dir --wheel-dir "$work" "horovod==$version" \
      >"$work/log" 2>&1; then
    tail -n 40 "$work/log" >&2
    fail "the build failed; its last lines are above"
  fi
  rm -rf "$kept"
  mkdir "$work/wheel"
  mv "$work"/*.whl "$work/wheel"
  mv "$work/wheel" "$kept"
}

if ls "$kept"/*.whl >/dev/null 2>&1; then
  say "Reusing $kept"
else
  build
fi
pip install --quiet "${constraints[@]}" packaging cloudpickle psutil pyyaml
pip install --quiet --no-deps --no-index --force-reinstall "$kept"/*.whl
if ! loads; then
  fail "Horovod was installed in $venv, but does not load there. Remove $kept and run this again"
fi
say "Horovod $version (${transport^^}, TensorFlow $tensorflow) is in $venv"
