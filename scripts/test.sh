#!/usr/bin/env bash
# Checks and tests the project in a virtual environment of its own.
#
#   scripts/test.sh [--stack=full|latest] [--venv=DIR] [pytest arguments]
#
# full (default): TensorFlow 2.17 with tensorflow-io, and Horovod, which scripts/install_horovod.sh
# builds (g++, make and cmake are needed); formatting, lint, types and all tests.
# latest: the latest TensorFlow and Keras; the tests of the library alone, without Horovod.
#
# What is tested is the built wheel, as a user would install it, not the source tree. The first run
# of a stack downloads and installs its packages; later runs reuse them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh

stack=full
venv=
while [ $# -gt 0 ]; do
  case $1 in
    --stack=*) stack=${1#*=} ;;
    --stack) stack=${2:-}; shift ;;
    --venv=*) venv=${1#*=} ;;
    --venv) venv=${2:-}; shift ;;
    -h | --help) sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "$0"; exit ;;
    *) break ;;
  esac
  shift
done
case $stack in
  full) extras=test,speech,plot,io ;;
  latest) extras=test,speech,plot ;;
  *) fail "--stack=$stack: there are full and latest" ;;
esac
venv=$(realpath -m "${venv:-.venv-test-$stack}")

ensure_venv "$venv" "$stack" "$extras"
install_wheel "$venv"
root=$PWD
failed=()
check() { # check NAME COMMAND...
  local name=$1
  shift
  say "$name"
  "$@" || failed+=("$name")
}

# Two processes share the test files; "-n 0" among the arguments is one, for a debugger.
pytest_arguments=(-c "$root/pyproject.toml" -o "cache_dir=$root/.pytest_cache" -n 2 --dist loadfile
  --no-loadscope-reorder)
if [ "$stack" = full ]; then
  check "Horovod (scripts/install_horovod.sh)" scripts/install_horovod.sh --venv="$venv"
  export TFPARA_TEST_HOROVOD=1  # Without Horovod its tests fail; where this is not set they skip.
  check "Lint (ruff check)" "$venv/bin/ruff" check .
  check "Format (ruff format)" "$venv/bin/ruff" format --check .
  check "Types (mypy)" "$venv/bin/mypy"
else
  pytest_arguments+=(--ignore=tests/input --ignore=tests/scripts)
fi

# Tests run in a directory that has the recipes but not tfpara, which so comes from the wheel; for
# the processes that tests start, too.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for name in input models scripts tests; do ln -s "$root/$name" "$work/$name"; done
cd "$work"
unset TF_CONFIG
export PATH="$venv/bin:$PATH" PYTHONPATH="$work" PYTHONSAFEPATH=1 TFPARA_TEST_INSTALLED=1
export OMP_NUM_THREADS=1 TF_NUM_INTRAOP_THREADS=1 TF_NUM_INTEROP_THREADS=1
export TF_CPP_MIN_LOG_LEVEL=2 CUDA_VISIBLE_DEVICES=
check "Tests (pytest), stack $stack" "$venv/bin/python" -m pytest --rootdir="$work" \
  "${pytest_arguments[@]}" "$@"

if [ ${#failed[@]} -gt 0 ]; then
  fail "failed: $(IFS=';'; echo "${failed[*]}")"
fi
say "All passed (stack $stack)"
