#!/usr/bin/env bash
# Plans a job for 8 GPUs on a laptop: what fits into their memory, how fast it will be, and which
# schedule to take. Nothing is started, and no GPU is needed.
#
#   bash examples/eight_gpus.sh [GPU]        for instance H100; A100-40GB by default
#
# You should see that 1F1B without vocabulary parallelism does not fit a GPU of 40 GiB, a list of
# what would, the fastest first, and then the best of them: its beginning as a picture, seconds of
# an iteration, MFU, and the GiB of every rank. Last stands the line that starts the job.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PATH="$("$root/tools/setup_venv.sh")/bin:$PATH"

gpu="${1:-A100-40GB}"
job=(
  --pipeline-model-parallel-size 8 --num-layers 32 --hidden-size 4096 --num-attention-heads 32
  --seq-length 2048 --max-position-embeddings 2048 --untie-embeddings-and-output-weights
  --micro-batch-size 1 --global-batch-size 16 --train-iters 1000 --lr 3e-4 --bf16
  --attention-dropout 0 --hidden-dropout 0
)
predict() {
  python "$root/pretrain_gpt.py" --dry-run --dry-run-gpu "$gpu" --vocab-size 256000 \
    "${job[@]}" "$@"
}

echo "=== 1F1B, vocabulary layers on the first and the last stage"
predict --pipeline-schedule 1f1b --vocab-parallel none

echo "=== zb-v with vocab-2"
predict --pipeline-schedule zb-v --vocab-parallel vocab-2

echo "=== On the machine with 8 GPUs"
echo torchrun --nproc-per-node 8 pretrain_gpt.py "${job[@]}" \
  --pipeline-schedule zb-v --vocab-parallel vocab-2 \
  --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model tokenizer.model \
  --data-path my_text_document
