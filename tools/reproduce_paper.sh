#!/usr/bin/env bash
# Runs the setups of the paper's tables 5 and 6 that have as many GPUs as this job, and writes MFU and
# memory of every cell beside the published ones, with plots.
#
#   bash tools/reproduce_paper.sh --out DIR [--vocab 32k 256k] [--method Baseline Vocab-1 ...]
#   bash tools/reproduce_paper.sh --out DIR --gpus 16 --launch "srun --ntasks-per-node 8 python"
#   bash tools/reproduce_paper.sh --out DIR --small        # a tiny model on two CPU ranks
#
# A cell that has run already is not run again. python tools/reproduce_paper.py --help has the rest.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PATH="$("$root/tools/setup_venv.sh" tools)/bin:$PATH" # with matplotlib
exec python "$root/tools/reproduce_paper.py" "$@"
