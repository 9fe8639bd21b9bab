#!/usr/bin/env bash
# Makes the virtual environment of pretrain_gpt.sh and tests/run.sh, and keeps it current.
#
#   tools/setup_venv.sh [EXTRAS]         EXTRAS: extras of setup.py, for instance "test,tools"
#
# Prints progress on standard error and the environment's path on standard output. If nothing has
# changed, it only checks and prints the path. An interrupted setup starts again from the beginning.
# If two run at once, the second waits for the first (on machines with flock).
#
#   VENV=PATH     use this environment as it is, and install nothing
#   PYTHON=PATH   make the environment with this Python instead of python3
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras="${1:-}"
say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

if [[ -n "${VENV:-}" ]]; then
  "$VENV/bin/python" -c 'import torch' 2>/dev/null ||
    die "VENV=$VENV holds no Python that can import torch; unset VENV to have .venv made here"
  echo "$VENV"
  exit
fi

venv="$PWD/.venv"
state="$venv/.setup" # "unfinished", or what is installed

# The sources of an installation identify it.
fingerprint() { cat setup.py constraints.txt | cksum; }

is_current() {
  [[ -f "$state" ]] || return 1
  { read -r installed && read -r sum; } <"$state" || return 1
  [[ "$sum" == "$(fingerprint)" && ",$installed," == *",${extras:-base},"* ]] || return 1
  "$venv/bin/python" -c '' 2>/dev/null # its base Python may have been removed since
}

check_python() {
  local python="$1"
  command -v "$python" >/dev/null || die "no $python on this machine: install Python 3.10 or newer"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "$("$python" --version 2>&1) ($(command -v "$python")) is too old: install Python 3.10 or" \
      "newer, or name one as in PYTHON=python3.12"
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "$(command -v "$python") cannot make virtual environments: install its venv package" \
      "(on Debian and Ubuntu: apt-get install python3-venv)"
}

has_pip() { "$venv/bin/python" -c 'import pip' 2>/dev/null; }

install() {
  local python="${PYTHON:-python3}"
  local wanted="base${extras:+,$extras}"
  check_python "$python"
  if [[ -d "$venv" && ! -e "$state" && -n "$(ls -A "$venv")" ]] && ! has_pip; then
    die "$venv was not made by this script and has no pip: move it away, or set VENV=$venv to use" \
      "it as it is"
  fi
  if [[ -e "$venv" ]] && { [[ "$(head -n 1 "$state" 2>/dev/null)" == unfinished ]] || ! has_pip; }; then
    say "Removing the unfinished or broken environment $venv"
    rm -rf "$venv"
  fi
  mkdir -p "$venv"
  echo unfinished >"$state"
  say "Setting up $venv ($wanted); this happens once and may take minutes"
  has_pip || "$python" -m venv "$venv"
  # Every package is constrained; otherwise torch could be another version than the tested one.
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-compile \
    -c constraints.txt -e ".${extras:+[$extras]}" >&2 ||
    die "pip could not install the packages (see above); run the same command again to retry"
  # pip would compile on one core, and tests of packages too. Their templates that are no Python fail.
  "$venv/bin/python" -m compileall -qq -j 0 -x 'site-packages/(.*/)?(tests|transformers/models)/' \
    "$venv"/lib/python*/site-packages || true
  printf '%s\n%s\n' "$wanted" "$(fingerprint)" >"$state.new"
  mv "$state.new" "$state"
  say "Done. To call its python and torchrun yourself: source $(printf %q "$venv/bin/activate")"
}

# The lock lies outside the environment, which may be removed while it is held.
if command -v flock >/dev/null; then
  mkdir -p .cache
  exec 9>.cache/setup.lock
  if ! flock -n 9; then
    say "Waiting for another setup of $venv to finish"
    flock 9
  fi
fi
is_current || install
echo "$venv"
