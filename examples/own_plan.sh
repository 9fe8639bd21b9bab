#!/usr/bin/env bash
# Trains a schedule that is made by hand: a plan is saved as text, edited, checked, simulated and
# trained. The edit lets rank 0 hold two microbatches instead of three, and shows what the third is
# for: it fills the time of the barrier.
#
#   bash examples/own_plan.sh
#
# You should see the plan; a wrong edit that is refused, with the passes that wait for one another;
# the plan after the right edit, which takes a third longer; and then, from training with both, the
# same losses to the last digit, because a plan says when a pass runs and not what it computes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$(tools/setup_venv.sh)/bin:$PATH"
out=examples/out/own_plan
mkdir -p "$out" && rm -f "$out"/*

echo "=== Save: 1F1B with vocab-2 for 2 ranks and 4 microbatches"
python tools/simulate.py --pipeline-schedule 1f1b --vocab-parallel vocab-2 -p 2 -m 4 \
  --save-plan "$out/saved.plan" --text
cat "$out/saved.plan"

echo "=== Edit, wrongly: rank 1 runs its B0 before its F0"
sed '/^1:/ { s/ B0 / /; s/ F0 / B0 F0 /; }' "$out/saved.plan" >"$out/wrong.plan"
python tools/simulate.py --schedule-file "$out/wrong.plan" || true

echo "=== Edit: rank 0 runs F2 after B0 and F3 after B1, so that it holds two microbatches"
sed '/^0:/ { s/ F2 / /; s/ F3 / /; s/ B0 / B0 F2 /; s/ B1 / B1 F3 /; }' "$out/saved.plan" >"$out/mine.plan"
python tools/simulate.py --schedule-file "$out/mine.plan" --text

echo "=== Train: both plans, on 2 ranks of this CPU"
export CUDA_VISIBLE_DEVICES= VOCAB_SIZE="${VOCAB_SIZE-32k}"
export HIDDEN_SIZE=256 SEQ_LENGTH=256 PIPELINE_SIZE=2 GPUS_PER_NODE=2 GLOBAL_BATCH_SIZE=4 EXIT_INTERVAL=8
for plan in saved mine; do
  bash pretrain_gpt.sh --schedule-file "$out/$plan.plan" --vocab-parallel vocab-2 |
    tee "$out/$plan.log"
done

echo "=== Losses: saved plan, own plan"
losses() { sed -n 's/.*lm loss: \([^ ]*\).*/\1/p' "$out/$1.log"; }
paste <(losses saved) <(losses mine)
