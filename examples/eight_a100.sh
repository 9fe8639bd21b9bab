#!/usr/bin/env bash
# Pretrains a model of 8 G parameters and 128,000 vocabulary entries on one machine with 8 A100s of
# 80 GB: one pipeline of 8 ranks.
#
#   bash examples/eight_a100.sh --dry-run     predicts the job, on any machine without a GPU
#   bash examples/eight_a100.sh DATA          DATA: prefix of a .bin and .idx file of token ids
#
# You should see the plan, the seconds of an iteration, its MFU and the memory of every rank; the
# training prints the same figures as they are. The schedule is predicted to be the fastest here; auto
# takes one that is 1 % slower and holds less. With 64 microbatches the pipeline fills and drains in a
# few percent of an iteration of 262,144 tokens.
set -euo pipefail
if (($# == 0)); then
  echo "usage: bash examples/eight_a100.sh --dry-run | DATA" >&2
  exit 2
fi
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PATH="$("$root/tools/setup_venv.sh")/bin:$PATH"

job=(
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
  --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm
  --disable-bias-linear --position-embedding-type rope --rotary-base 500000
  --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
  --seq-length 4096 --max-position-embeddings 4096 --vocab-size 128000
  --pipeline-model-parallel-size 8 --pipeline-schedule zb-v --vocab-parallel vocab-2
  --micro-batch-size 1 --global-batch-size 64 --bf16
  --train-iters 100000 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000
  --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
)
if [[ "${1:-}" == --dry-run ]]; then
  exec python "$root/pretrain_gpt.py" "${job[@]}" --dry-run --dry-run-gpu A100
fi
exec torchrun --standalone --nproc-per-node 8 "$root/pretrain_gpt.py" "${job[@]}" \
  --tokenizer-type NullTokenizer --data-path "$1" --save checkpoints --save-interval 1000
