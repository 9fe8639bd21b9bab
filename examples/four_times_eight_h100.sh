#!/usr/bin/env bash
# Pretrains a model of 30 G parameters and 256,000 vocabulary entries on four machines with 8 H100s
# each: four replicas of a pipeline of 8 ranks. Ranks are numbered so that each pipeline stays in its
# machine; only gradients and parameters go over the network, beside the passes.
#
#   bash examples/four_times_eight_h100.sh --dry-run       predicts the job, on any machine
#   bash examples/four_times_eight_h100.sh DATA HOST       on every machine; HOST: name of the first
#
# You should see how the ranks lie in the machines, the plan, the seconds of an iteration, its MFU and
# the memory of every rank. V-Half is taken for its memory; --pipeline-schedule auto compares all.
# Under Slurm, slurm.sh starts the same job.
set -euo pipefail
if (($# == 0)); then
  echo "usage: bash examples/four_times_eight_h100.sh --dry-run | DATA HOST" >&2
  exit 2
fi
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PATH="$("$root/tools/setup_venv.sh")/bin:$PATH"

job=(
  --num-layers 48 --hidden-size 7168 --ffn-hidden-size 20480 --num-attention-heads 56
  --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm
  --disable-bias-linear --position-embedding-type rope --rotary-base 500000
  --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
  --seq-length 4096 --max-position-embeddings 4096 --vocab-size 256000
  --pipeline-model-parallel-size 8 --pipeline-schedule v-half --vocab-parallel vocab-2
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
  --micro-batch-size 1 --global-batch-size 256 --bf16
  --train-iters 100000 --lr 1.5e-4 --min-lr 1.5e-5 --lr-decay-style cosine --lr-warmup-iters 2000
  --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --exit-signal-handler
)
if [[ "${1:-}" == --dry-run ]]; then
  exec python "$root/pretrain_gpt.py" "${job[@]}" --dry-run --dry-run-gpu H100 --dry-run-replicas 4
fi
job+=(--tokenizer-type NullTokenizer --data-path "$1" --save checkpoints --save-interval 500)
if [[ -n "${SLURM_STEP_NUM_TASKS:-}" ]]; then # srun has started a process for every GPU
  exec python "$root/pretrain_gpt.py" "${job[@]}"
fi
exec torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint "$2:29400" \
  --rdzv-id "$(basename "$1")" "$root/pretrain_gpt.py" "${job[@]}"
