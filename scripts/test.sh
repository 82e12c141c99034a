#!/usr/bin/env bash
# Checks and tests the project in a virtual environment of its own.
#
#   scripts/test.sh [--fast | --all | --prepare] [--stack=full|latest] [--venv=DIR] [arguments]
#
# full (default): TensorFlow 2.17 with tensorflow-io, and Horovod, which scripts/install_horovod.sh
# builds (g++, make and cmake are needed); formatting, lint, types, the site of the pages, and tests.
# latest: the latest TensorFlow, without Horovod; the tests of what depends on TensorFlow's version.
# --all: also the tests of tests/nightly, and others that are marked "nightly".
# --fast: at most three minutes; the tests of tests/unit, and a few that are marked "quick". Does not
# install Horovod.
# --prepare: only makes the environment.
# Other arguments are those of pytest.
#
# What is tested is the built wheel, as a user would install it, not the source tree. The first run
# of a stack downloads and installs its packages; later runs reuse them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh

stack=full
venv=
fast=
prepare=
nightly='not nightly'
while [ $# -gt 0 ]; do
  case $1 in
    --stack=*) stack=${1#*=} ;;
    --stack) stack=${2:-}; shift ;;
    --venv=*) venv=${1#*=} ;;
    --venv) venv=${2:-}; shift ;;
    --fast) fast=1 ;;
    --all) nightly= ;;
    --prepare) prepare=1 ;;
    -h | --help) usage ;;
    *) break ;;
  esac
  shift
done
whole=1 # unless the arguments name tests
if [[ " $*" == *" tests/"* ]]; then whole=; fi
case $stack in
  full) extras=test,speech,plot,io,docs ;;
  latest) extras=test,speech,plot ;;
  *) fail "--stack=$stack: there are full and latest" ;;
esac
venv=$(realpath -m "${venv:-.venv-test-$stack}")

ensure_venv "$venv" "$stack" "$extras"
if [ -n "$prepare" ]; then exit; fi
install_wheel "$venv"
root=$PWD
# Tests run in a directory that has the recipes but not tfpara, so that tfpara comes from the wheel.
# The same is true for the processes that tests start.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for name in input models scripts tests; do ln -s "$root/$name" "$work/$name"; done
failed=()
check() { # check NAME COMMAND...
  local name=$1
  shift
  say "$name"
  "$@" || failed+=("$name")
}
beside=() # name, process and output of each check that runs beside the tests
check_beside() { # check_beside NAME COMMAND...: its output is shown after that of the tests
  local name=$1 said="$work/said.${#beside[@]}"
  shift
  "$@" >"$said" 2>&1 &
  beside+=("$name" $! "$said")
}

# There are two processes for each core, since tests that start programs spend most of their time
# waiting: for deadlines, pauses, and other programs. Each test file runs in one of these processes.
# With "-n 0" among the arguments all run in one process, for a debugger.
processes=$(($(nproc) * 2))
pytest_arguments=(-c "$root/pyproject.toml" -o "cache_dir=$root/.pytest_cache" -n "$processes"
  --dist loadfile --no-loadscope-reorder --durations=30 --durations-min=1)
if [ -z "$nightly" ]; then
  pytest_arguments+=(--hypothesis-profile=thorough)
  export TFPARA_MUTANTS="${TFPARA_MUTANTS:-700}" # mutants of each kind of input; above 20,000 in all
fi
if [ "$stack" = full ]; then
  if [ -n "$fast" ]; then
    mapfile -t quick < <(grep -rl --include='test_*.py' 'mark\.quick' tests/training tests/processes)
    pytest_arguments+=(tests/unit "${quick[@]}" -m "(unit or quick) and not nightly"
      --hypothesis-profile=fast)
  elif [ -n "$nightly" ]; then
    pytest_arguments+=(-m "$nightly")
  fi
  if [ -z "$fast" ]; then
    if [ -n "$whole" ]; then
      # Compiles the tests once, beside the next check, instead of in each process of pytest.
      (cd "$work" && env -u PYTHONDONTWRITEBYTECODE PYTHONPATH="$work" PYTHONSAFEPATH=1 \
        "$venv/bin/python" -m pytest -c "$root/pyproject.toml" -p no:cacheprovider -n 0 \
        --collect-only -q tests >/dev/null 2>&1) &
    fi
    check "Horovod (scripts/install_horovod.sh)" scripts/install_horovod.sh --venv="$venv"
    # If Horovod is missing, this makes its tests fail instead of being skipped.
    export TFPARA_TEST_HOROVOD=1
    wait
  fi
  # Trainings run without TensorFlow's graph optimiser, which takes a seventh of their time. The
  # optimiser is on in test_rules_on_cluster.py and in the latest stack. With --all it is also on in
  # all programs that tests start.
  export TFPARA_TEST_GRAPPLER=0
  if [ -z "$nightly" ]; then TFPARA_TEST_GRAPPLER=programs; fi
  check "Lint (ruff check)" "$venv/bin/ruff" check .
  check "Format (ruff format)" "$venv/bin/ruff" format --check .
  if [ -z "$fast" ]; then
    check_beside "Pages (scripts/docs.sh)" scripts/docs.sh --venv="$venv" --out="$venv/site"
  fi
  check_beside "Types (mypy)" "$venv/bin/mypy"
else
  # Another version of TensorFlow may break code that uses its private names, collectives, iterators,
  # servers or checkpoints. The tests of that code are marked "latest". Each of these tests runs its
  # first case only, unless it is marked "all_cases".
  pytest_arguments+=(-m "latest and not long and not one_version${nightly:+ and $nightly}" --first-cases)
  if [ -n "$whole" ]; then # each process of pytest reads all files that are named
    mapfile -t latest < <(grep -rl --include='test_*.py' 'mark\.latest' tests)
    pytest_arguments+=("${latest[@]}")
  fi
fi

cd "$work"
unset TF_CONFIG
unset PYTHONDONTWRITEBYTECODE  # otherwise every process compiles all tests and programs again
export PATH="$venv/bin:$PATH" PYTHONPATH="$work" PYTHONSAFEPATH=1 TFPARA_TEST_INSTALLED=1
export OMP_NUM_THREADS=1 TF_NUM_INTRAOP_THREADS=1 TF_NUM_INTEROP_THREADS=1
export TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=
check "Tests (pytest), stack $stack" "$venv/bin/python" -m pytest --rootdir="$work" \
  "${pytest_arguments[@]}" "$@"

for ((check = 0; check < ${#beside[@]}; check += 3)); do
  wait "${beside[check + 1]}" || failed+=("${beside[check]}")
  say "${beside[check]}"
  cat "${beside[check + 2]}"
done
if [ ${#failed[@]} -gt 0 ]; then
  fail "failed: $(IFS=';'; echo "${failed[*]}")"
fi
say "All passed (stack $stack)"
