#!/usr/bin/env bash
# Measures every pass of a training job, and plans anew from the measured costs while the job goes
# on. Then it lays the last iteration beside its plan, and asks the simulator what other schedules
# would take with the same costs.
#
#   bash examples/measure_and_replan.sh
#
# You should see the costs of the passes after iteration 7, then a line that begins with "replan:"
# and gives the predicted times of the plan before and of the new one; a table of planned and real
# times, with the reasons for which each rank idled; and the simulated seconds of three schedules.
# examples/out/measure has both timelines as a picture, both.svg, and the costs: with
# --measured-costs examples/out/measure/costs.json the next job plans with them from the start.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$(tools/setup_venv.sh)/bin:$PATH"
out=examples/out/measure
mkdir -p "$out" && rm -f "$out"/*

# zb-1p runs B and W as passes of their own, so that the costs hold for schedules with W and without.
export CUDA_VISIBLE_DEVICES= VOCAB_SIZE="${VOCAB_SIZE-32k}"
export HIDDEN_SIZE=256 SEQ_LENGTH=256 PIPELINE_SIZE=2 GPUS_PER_NODE=2 GLOBAL_BATCH_SIZE=8 EXIT_INTERVAL=12
bash pretrain_gpt.sh --pipeline-schedule zb-1p --vocab-parallel vocab-2 \
  --profile-schedule-start 5 --replan --save-measured-costs "$out/costs.json" \
  --record-timeline "$out/run.json"
if [[ ! -f "$out/run.json" ]]; then exit; fi # a dry run measures nothing

echo "=== Planned and real"
python tools/compare_timelines.py "$out/run.planned.json" "$out/run.json" --draw "$out/both.svg"

echo "=== Other schedules with these costs"
for schedule in 1f1b zb-1p zb-2p; do
  python tools/simulate.py --pipeline-schedule "$schedule" --vocab-parallel vocab-2 -p 2 -m 8 \
    --measured-costs "$out/costs.json" | sed -n 1p
done
