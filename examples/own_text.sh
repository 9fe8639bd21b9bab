#!/usr/bin/env bash
# Trains a GPT on your own text, with vocabulary parallelism: first it makes a tokenizer and token
# files from the text, then it trains, with one rank per GPU or per core (2 to 4).
#
#   bash examples/own_text.sh [FILE...]        UTF-8 text; by default this project's own files
#   VOCAB_SIZE=2k bash examples/own_text.sh    with another vocabulary; by default 8k
#   SAVE=FOLDER bash examples/own_text.sh      keeps the model there; by default in examples/out/own_text
#
# You should see the torchrun line, the memory of every rank, and then a line for each of 30
# iterations. The loss begins near 9.0, the logarithm of the 8,000 entries of the vocabulary, and
# falls to between 6 and 6.5 on the project's own files, batch by batch. The last line is a command
# that lets the model go on from words of yours.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PATH="$("$root/tools/setup_venv.sh")/bin:$PATH"

if (($# == 0)); then set -- "$root"/README.md "$root"/docs/*.md "$root"/megatron/*/*.py; fi

# It prints DATA_PATH=... and TOKENIZER_MODEL=..., which pretrain_gpt.sh reads.
made="$(python "$root/tools/sample_data.py" --vocab-size "${VOCAB_SIZE:-8k}" --text "$@")"
unset VOCAB_SIZE # which names the sample data for pretrain_gpt.sh
while IFS='=' read -r name value; do export "$name=$value"; done <<<"$made"

save="${SAVE:-$root/examples/out/own_text}"
SEQ_LENGTH=256 MICRO_BATCH_SIZE=1 VOCAB_PARALLEL=1 bash "$root/pretrain_gpt.sh" --save "$save"

if [[ "${DRY_RUN:-0}" != 0 ]]; then exit; fi
cat <<EOF
The model is in $save. To let it go on from words of yours:
$(printf '%q ' python "$root/tools/generate.py" "$save" --prompt "The model")
EOF
