# Sourced by demo.sh and test.sh: a virtual environment that is made once and then reused.
# Needs only a Python of a version that pyproject.toml lists, with pip and venv.

say() { printf '==> %s\n' "$*"; }
fail() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit 1; }

# usage: prints the comment at the top of the script, and ends. Run from the root of the checkout.
usage() {
  sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "scripts/$(basename "$0")"
  exit
}

# find_python [STACK]: the Python to make environments with: $PYTHON, or the first that fits. The stack
# latest takes the newest version that it finds and full the oldest, so that both are tested.
find_python() {
  local candidate versions
  versions=$(sed -n 's/.*"Programming Language :: Python :: \(3\.[0-9]*\)".*/\1/p' pyproject.toml | sort -V | xargs)
  case ${1:-} in
    full) versions=${versions/ 3.13/} ;; # there is no TensorFlow 2.17 for it
    latest) versions=$(tr ' ' '\n' <<<"$versions" | sort -rV | xargs) ;;
  esac
  for candidate in ${PYTHON:-${versions//3./python3.} python3 python}; do
    if "$candidate" -c 'import sys, venv; sys.exit("%d.%d" % sys.version_info[:2] not in sys.argv)' \
        $versions 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  fail "no Python ${versions// / or } with the venv module found. Install one (on Debian: python3 python3-venv), or name it: PYTHON=/path/to/python $0"
}

# ensure_venv DIR STACK EXTRAS: makes DIR hold the dependencies of '.[EXTRAS]', as pinned in
# constraints/STACK.txt. Their list is hashed into DIR/stamp, which is written last: with the same hash
# there, nothing is installed. Run from the root of the checkout.
ensure_venv() {
  local venv=$1 stack=$2 extras=$3 stamp python
  stamp="$(sed '/^\[tool\./,$d' pyproject.toml | cat - "constraints/$stack.txt" scripts/venv.sh \
    | sha256sum | cut -c1-16) $extras"
  if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/stamp" 2>/dev/null)" = "$stamp" ] \
      && "$venv/bin/python" -c pass; then
    say "Reusing $venv (stack $stack)"
    return
  fi
  if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ]; then
    fail "$venv exists and is not a virtual environment. Remove it, or choose another directory."
  fi
  python=$(find_python "$stack") || exit 1
  say "Making $venv with $("$python" --version) (stack $stack); the first time takes some minutes"
  "$python" -m venv --clear "$venv"
  say "Installing the dependencies, about 500 MB: $extras"
  "$venv/bin/python" -m pip install --disable-pip-version-check --quiet \
    -c "constraints/$stack.txt" setuptools wheel
  build_wheel "$venv"
  # To compile all files takes half of pip's time. What every process needs is compiled below.
  "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off --no-compile \
    -c "constraints/$stack.txt" "$WHEEL[$extras]" | large_packages
  "$venv/bin/python" -m pip uninstall --quiet --yes tfpara
  env -u PYTHONDONTWRITEBYTECODE TF_CPP_MIN_LOG_LEVEL=3 "$venv/bin/python" -c 'import tensorflow' \
    2>/dev/null || true # the tools that build the site need no TensorFlow
  printf '%s\n' "$stamp" > "$venv/stamp"
}

# large_packages: prints two things of pip's output, line by line as pip writes it: packages of a
# megabyte or more, and the versions that are in conflict, if pip cannot install all packages.
large_packages() {
  sed -un -e 's/^ *\(Downloading\|Using cached\) \([^ ]*\)-[pc][^ ]* (\(.* MB\))$/    \2, \3/p' \
    -e 's/^Installing collected packages:.*/    unpacking all of them/p' \
    -e '/^The conflict is caused by:/,/^To fix this/{/^To fix this/!p}'
}

# build_wheel VENV: builds the wheel from a copy of what it consists of, so that nothing an earlier
# build left behind gets into it; its path is in WHEEL.
build_wheel() {
  local venv=$1 tree="$1/wheel"
  rm -rf "$tree"
  mkdir -p "$tree/source"
  cp -r setup.py pyproject.toml tfpara "$tree/source"
  for file in README.md LICENSE; do
    if [ -e "$file" ]; then cp "$file" "$tree/source"; fi
  done
  "$venv/bin/python" -m pip wheel --disable-pip-version-check --quiet --no-deps \
    --no-build-isolation --wheel-dir "$tree" "$tree/source"
  WHEEL=$(echo "$tree"/tfpara-*.whl)
}

# install_wheel VENV: builds the wheel and installs it in place of the one there.
install_wheel() {
  build_wheel "$1"
  "$1/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps --no-index \
    --force-reinstall "$WHEEL"
  say "Installed $(basename "$WHEEL")"
}
