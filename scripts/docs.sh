#!/usr/bin/env bash
# Builds the site of the documentation, with warnings as errors, and checks it.
#
#   scripts/docs.sh [--venv=DIR] [--out=DIR] [--pictures]
#
# The site is in site/ or --out, and is read from there without a network: open index.html. The
# tools that build it are in .venv-docs, which is made if it is missing, or in --venv. If Chromium
# is installed (on Debian: apt-get install chromium), all pages are opened in it.
# --pictures: draws docs/pictures first, for which --venv must have TensorFlow and Matplotlib.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh

venv=.venv-docs
out=site
pictures=
while [ $# -gt 0 ]; do
  case $1 in
    --venv=*) venv=${1#*=} ;;
    --out=*) out=${1#*=} ;;
    --pictures) pictures=1 ;;
    -h | --help) usage ;;
    *) fail "$1: there are --venv=DIR, --out=DIR and --pictures" ;;
  esac
  shift
done

export PYTHONPATH=$PWD NO_MKDOCS_2_WARNING=1
if ! "$venv/bin/python" -c 'import material, mkdocstrings_handlers.python' 2>/dev/null; then
  # The site is built without TensorFlow, so only the packages of the extra "docs" are installed.
  python=$(find_python) || exit 1
  mapfile -t packages < <("$python" -c 'import tomllib
with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["project"]["optional-dependencies"]["docs"], sep="\n")')
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  say "Installing in $venv: ${packages[*]}"
  "$venv/bin/python" -m pip install --disable-pip-version-check --quiet \
    -c constraints/full.txt "${packages[@]}" \
    || fail "left out: the site, its links and its pages in a browser, since pip could not install ${packages[*]} (no network?). Read the pages as they are, in docs/."
fi
if [ -n "$pictures" ]; then
  say "Drawing docs/pictures"
  "$venv/bin/python" -m scripts.docs.pictures
fi
say "Building $out"
"$venv/bin/python" -m mkdocs build --strict --site-dir "$(realpath -m "$out")"
say "Checking $out"
"$venv/bin/python" -m scripts.docs.check "$out"
