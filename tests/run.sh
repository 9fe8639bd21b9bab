#!/usr/bin/env bash
# Sets everything up, then checks everything; stops at the first failure.
#
#   bash tests/run.sh [--full] [PYTEST_ARGUMENT...]
#
# --full also runs the tests marked `full`: about a quarter of all cases. Most are larger cases of tests of which
# a default run has a smaller one. The others are functions of which a default run has no case: whole jobs and
# what ends them, restarts, examples and pages that are run, and generated pages that are made anew. CI runs a
# case of nearly all of these (`.ci/full_cases`); `.ci/left_out` names the ones that only --full runs, with the
# reason. Run it before an issue is resolved. It takes an hour or more on two cores; its last lines name the slowest files.
# If pytest-xdist is there, as many workers as cores share the files of tests; `-n 0` does without.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

selection=()
share=loadfile # a file's fixtures are made once
if [[ "${1:-}" == --full ]]; then
  selection=(-m "")
  share=worksteal # some files take longer than a half of all others
  shift
fi

section() { printf '\n=== %s\n' "$*"; }

section "set up"
venv="$(tools/setup_venv.sh test,tools,solver)"
bin="$venv/bin"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # tests start several ranks on few cores
unset PYTHONDONTWRITEBYTECODE # with it, every process of a test compiles every module anew
"$bin/python" --version

section "shell syntax"
for script in pretrain_gpt.sh tests/run.sh tools/*.sh examples/*.sh .ci/run; do bash -n "$script"; done

section "format (ruff)"
"$bin/ruff" format --check .

section "lint (ruff)"
"$bin/ruff" check .

section "types (mypy)"
"$bin/mypy"

section "import layers (import-linter)"
"$bin/lint-imports"

section "tests (pytest)"
workers=()
if "$bin/python" -c 'import xdist' 2>/dev/null; then
  # Without the worker that died, the others would wait for ever.
  workers=(-n "$(getconf _NPROCESSORS_ONLN)" --maxprocesses 8 --dist "$share" --max-worker-restart 0)
fi
"$bin/python" -m pytest -q --durations=10 --slowest-files=10 ${selection[@]+"${selection[@]}"} \
  ${workers[@]+"${workers[@]}"} "$@"
