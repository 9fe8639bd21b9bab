#!/usr/bin/env bash
# Makes the virtual environment of pretrain_gpt.sh and tests/run.sh, and keeps it current.
#
#   tools/setup_venv.sh [EXTRAS]         EXTRAS: extras of setup.py, for instance "test,tools"
#
# Prints progress on standard error and the environment's path on standard output. If nothing has
# changed, it only checks and prints the path. An interrupted setup starts again from the beginning.
# If two run at once, the second waits for the first (on machines with flock). The words of pip go to
# .cache/setup.log, those of the work beside it to .cache/meanwhile.log.
#
#   VENV=PATH       use this environment as it is, and install nothing
#   PYTHON=PATH     make the environment with this Python instead of python3
#   MEANWHILE=TEXT  arguments of the environment's Python for work that needs no PyTorch; the work
#                   runs while PyTorch is installed, and may fail
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
log="$PWD/.cache/setup.log" beside="$PWD/.cache/meanwhile.log"
# The requirements of setup.py but PyTorch, by far the largest: what makes the sample data.
light=(blake3 pybind11 numpy sentencepiece rich)

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

# quietly LOG COMMAND...: runs a command whose words go to the file LOG, and says every few seconds
# how long it has run, with the last line of LOG.
quietly() {
  local log="$1" begin="$SECONDS" failed=0 teller
  shift
  (
    exec 9>&- # the lock of this setup must not outlive it in a sleep
    while sleep "${TELL_EVERY:-5}" </dev/null >/dev/null 2>&1 && kill -0 "$$" 2>/dev/null; do
      say "     $((SECONDS - begin)) s: $(tail -n 1 "$log" | tr -d '\r' | cut -c 1-80)"
    done
  ) >/dev/null &
  teller=$!
  "$@" >>"$log" 2>&1 9>&- || failed=1
  { kill "$teller" && wait "$teller"; } 2>/dev/null || true
  return "$failed"
}

# failed WHAT: ends the setup; the last lines of the log say why.
failed() {
  tail -n 15 "$log" >&2
  die "$1 failed; the last lines of $log stand above; run the same command again to retry"
}

pip_install() {
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-compile --progress-bar off \
    -c constraints.txt "$@"
}

# The C++ first: it is needed in any case.
work_meanwhile() {
  "$venv/bin/python" -m megatron.native.build || true
  # shellcheck disable=SC2086 # words
  [[ -z "${MEANWHILE:-}" ]] || "$venv/bin/python" $MEANWHILE
}

install() {
  local python="${PYTHON:-python3}"
  local wanted="base${extras:+,$extras}" meanwhile
  check_python "$python"
  if [[ -d "$venv" && ! -e "$state" && -n "$(ls -A "$venv")" ]] && ! has_pip; then
    die "$venv was not made by this script and has no pip: move it away, or set VENV=$venv to use" \
      "it as it is"
  fi
  if [[ -e "$venv" ]] && { [[ "$(head -n 1 "$state" 2>/dev/null)" == unfinished ]] || ! has_pip; }; then
    say "Removing the unfinished or broken environment $venv"
    rm -rf "$venv"
  fi
  mkdir -p "$venv" .cache
  echo unfinished >"$state"
  : >"$log" >"$beside"
  say "Setting up $venv ($wanted), once: about 2 minutes on two fast cores, 5 on slow ones"
  say "The words of pip go to $log"
  say "1/4  Python's environment and small packages: about 15 s"
  has_pip || quietly "$log" "$python" -m venv "$venv" || failed "python -m venv"
  quietly "$log" pip_install "${light[@]}" || failed "pip"
  say "2/4  PyTorch and all other packages, about 200 MB: 15 s to 2 minutes, by your network." \
    "Meanwhile the C++ is compiled${MEANWHILE:+ and ${MEANWHILE%% *} runs}"
  (work_meanwhile) </dev/null >>"$beside" 2>&1 9>&- &
  meanwhile=$!
  # Every package is constrained; otherwise torch could be another version than the tested one. The
  # C++ is compiled beside pip, so pip leaves it alone.
  MEGATRON_EXTENSIONS=apart quietly "$log" pip_install -e ".${extras:+[$extras]}" || {
    kill "$meanwhile" 2>/dev/null || true
    failed "pip"
  }
  say "3/4  Compiling Python's files ahead: about 15 s"
  # pip would compile on one core, and tests of packages too. Their templates that are no Python fail.
  quietly "$log" "$venv/bin/python" -m compileall -qq -j 0 -x \
    'site-packages/(.*/)?(tests|transformers/models)/' "$venv"/lib/python*/site-packages || true
  say "4/4  The rest of the C++${MEANWHILE:+ and of ${MEANWHILE%% *}}: up to a minute"
  quietly "$beside" wait "$meanwhile" || true
  printf '%s\n%s\n' "$wanted" "$(fingerprint)" >"$state.new"
  mv "$state.new" "$state"
  say "Done after $SECONDS s. To call its python and torchrun yourself: source $(printf %q "$venv/bin/activate")"
}

# The lock lies outside the environment, which may be removed while it is held.
if command -v flock >/dev/null; then
  mkdir -p .cache
  exec 9>.cache/setup.lock
  if ! flock -n 9; then
    say "Waiting for another setup of $venv to finish"
    until flock -w 8 9; do say "     $SECONDS s: still waiting"; done
  fi
fi
is_current || install
echo "$venv"
