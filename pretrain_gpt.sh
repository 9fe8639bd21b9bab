#!/usr/bin/env bash
# Pretrains GPT from nothing but Python 3.10 and a package index:
#
#   VOCAB_PARALLEL=1 VOCAB_SIZE=256k bash pretrain_gpt.sh [FLAG...]
#
# makes .venv, prepares sample data, and starts torchrun with one rank per GPU or, without GPUs, one
# rank per core. Every FLAG goes to pretrain_gpt.py and overrides the flags set here; a FLAG @FILE
# stands for the flags of a file (docs/running.md).
#
# Environment variables: those of the pretrain_gpt.sh of VocabularyParallelism ("the original") and
# of the examples/pretrain_*.sh of zero-bubble-pipeline-parallelism, with their meaning, and a few
# more. A switch is off when it is 0, empty or not set, and on with any other value.
#
#   Vocabulary layers
#     VOCAB_PARALLEL       switch: split over all pipeline ranks (vocab-2)
#     FB_SPLIT             switch, with VOCAB_PARALLEL: with two barriers instead of one (vocab-1)
#     INTERLACED_SCHEDULE  switch, with VOCAB_PARALLEL: interlaced, for comparison
#     ENABLE_LAYER_REDISTRIBUTION
#                          switch, without VOCAB_PARALLEL: fewer transformer layers on the stages
#                          that hold the vocabulary layers (redis)
#     FINAL_STAGE_LAYERS   with redis: layers of the last stage; balanced by default
#   Schedule; others are flags, for example --pipeline-schedule 1f1b-v
#     ENABLE_ZERO_BUBBLE   switch: zero bubble, and post-validation unless FP32 or SYNC_OPTIMIZER
#     ZERO_BUBBLE_MEM_LIMIT
#                          with zero bubble: the most microbatches in flight on a rank, or auto, as
#                          many as memory has room for; by default 2p, and what the schedule holds
#                          if it has a V shape
#     ZERO_BUBBLE_V_SCHEDULE
#                          switch: zero bubble in a V shape (zb-v)
#     ZERO_BUBBLE_V_SCHEDULE_MEM_SETUP
#                          with it: half (v-half), min (v-min) or zb (zb-v)
#     INTERLEAVED_1F1B     switch: interleaved 1F1B, one layer per stage
#     OFFLOAD              switch: activations wait on the host for their backward
#     OFFLOAD_CHUNK_NUM    with it: only those of so many chunks of every rank
#     ENABLE_OPTIMIZER_POST_VALIDATION
#                          switch: the optimizer steps before it knows the global norm; 0 forbids
#                          what ENABLE_ZERO_BUBBLE would do
#     SYNC_OPTIMIZER       switch: with zero bubble, the same as the 0 above
#     ENABLE_EXACTLY_NUMERIC_MATCH
#                          switch: the result of post-validation is that without; it always is
#     SCHEDULE_TIMER_START SCHEDULE_TIMER_END
#                          time the passes of these iterations, and make the plan anew from that;
#                          with zero bubble also ZERO_BUBBLE_TIMER_START and ZERO_BUBBLE_TIMER_END
#   Model, data and length
#     LAYERS HIDDEN_SIZE ATTENTION_HEADS SEQ_LENGTH
#                          without GPUs, HIDDEN_SIZE and MICRO_BATCH_SIZE are chosen by a timing of
#                          this machine, so that 30 iterations on the sample data take about a
#                          minute; the torchrun line has the choice, and .cache/sizes-* keeps it
#     IMM_SIZE or FFN_HIDDEN_SIZE
#                          width of the MLP; 4 HIDDEN_SIZE by default
#     GQA                  groups of query heads that share a key and a value
#     VOCAB_SIZE           of the sample data, for example 8k; 256k by default
#     DATA_PATH, TOKENIZER_MODEL
#                          your own data set (PREFIX of .bin and .idx) and its sentencepiece model
#     MICRO_BATCH_SIZE GLOBAL_BATCH_SIZE    in samples
#     EXIT_INTERVAL        iterations to train, and the span of the learning rate: 1000 with GPUs,
#                          30 without
#     EVAL_INTERVAL        iterations between evaluations; there are none if it is not set
#     FP32                 switch: fp32 instead of bf16
#     ORIGINAL_RECIPE      switch: learning rate, warm-up, clipping and precision (fp16) of the
#                          original, which plans for 146,484,375 samples; EXIT_INTERVAL ends it
#   What a run prints and writes
#     LOG_INTERVAL         iterations between lines
#     PROFILED             switch: trace a few iterations, into profile/
#     AIP_RUN_NAME         with PROFILED: into profile/AIP_RUN_NAME
#   Ranks
#     PIPELINE_SIZE        pipeline ranks p; all ranks, divided by TP_SIZE and CP_SIZE, by default.
#                          With fewer, the ranks are replicas of the model (data parallelism)
#     TP_SIZE              ranks t that share every layer (tensor parallelism); 1 by default
#     SEQUENCE_PARALLEL    switch, with TP_SIZE: they share the sequence too
#     CP_SIZE              ranks c that share every sequence (context parallelism); 1 by default
#     GPUS_PER_NODE        ranks on this node; all GPUs by default, or the cores, 2 to 4
#     WORLD_SIZE RANK MASTER_ADDR MASTER_PORT
#                          number of nodes, this node's number, and where node 0 listens
#   This script
#     EXTRA_OPTIONS        more flags, before those of the command line
#     DRY_RUN              switch: only print the torchrun line, with sizes that no timing has chosen
#     VENV, PYTHON         see tools/setup_venv.sh
#     LD_PRELOAD           as usual. If it is not set and there are no GPUs, an installed jemalloc is
#                          preloaded (Debian: apt install libjemalloc2); LD_PRELOAD= takes glibc's
#
# Refused, as it is not built yet: INTERLEAVE_GROUP. Without effect: OFFLOAD_TIME and NO_BARRIER.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

die() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

# on NAME: succeeds if the switch NAME is on.
on() { [[ -n "${!1:-}" && "${!1}" != 0 ]]; }

# idle REASON NAME...: notes of every variable NAME that is set that it changes nothing.
idle() {
  local reason="$1" name
  for name in "${@:2}"; do
    if [[ -n "${!name:-}" ]]; then
      printf 'note: %s=%s changes nothing: %s\n' "$name" "${!name}" "$reason" >&2
    fi
  done
}

# whole NAME MINIMUM [MAXIMUM]: refuses a value of NAME that is no whole number from MINIMUM on.
whole() {
  [[ -z "${!1:-}" || "${!1}" =~ ^(0|[1-9][0-9]{0,17})$ && "${!1}" -ge "$2" && \
    "${!1}" -le "${3:-${!1}}" ]] ||
    die "$1=${!1} is not a whole number of at least $2${3:+ and at most $3}"
}

# show WORD...: prints a command line that can be pasted, without needless quotes.
show() {
  local word
  for word in "$@"; do
    if [[ "$word" =~ ^[A-Za-z0-9_./:,=@%+-]+$ ]]; then printf '%s ' "$word"; else printf '%q ' "$word"; fi
  done
  echo
}

# has_library NAME: succeeds if the cache of the dynamic linker lists the shared library NAME.
has_library() {
  [[ "$(PATH="$PATH:/usr/sbin:/sbin" ldconfig -p 2>/dev/null)" == *[[:space:]]"$1 "* ]]
}

count_gpus() {
  local present=0 visible
  if command -v nvidia-smi >/dev/null; then
    present="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')" || present=0
  fi
  if [[ -n "${CUDA_VISIBLE_DEVICES+set}" ]]; then
    visible="$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '^[0-9A-Z]')" || visible=0
    ((visible < present)) && present="$visible"
  fi
  echo "$present"
}

# is_unknown HOST: succeeds if HOST is no address, and no name server knows it.
is_unknown() { command -v getent >/dev/null && ! getent ahosts "$1" >/dev/null; }

count_cores() { nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2; }

# Only these CPUs multiply bf16 matrices faster than fp32 ones. (A timing of the machine knows better.)
cpu_has_bf16() { grep -qE '\b(amx_bf16|avx512_bf16)\b' /proc/cpuinfo 2>/dev/null; }

# --- The settings, checked before anything takes time

for name in LAYERS HIDDEN_SIZE IMM_SIZE FFN_HIDDEN_SIZE \
  ATTENTION_HEADS GQA SEQ_LENGTH MICRO_BATCH_SIZE GLOBAL_BATCH_SIZE EXIT_INTERVAL LOG_INTERVAL \
  EVAL_INTERVAL OFFLOAD_CHUNK_NUM SCHEDULE_TIMER_START SCHEDULE_TIMER_END ZERO_BUBBLE_TIMER_START \
  ZERO_BUBBLE_TIMER_END; do
  whole "$name" 1
done
for name in PIPELINE_SIZE TP_SIZE CP_SIZE GPUS_PER_NODE WORLD_SIZE MASTER_PORT; do
  whole "$name" 1 65535
done
whole RANK 0
whole FINAL_STAGE_LAYERS 0
for name in VOCAB_PARALLEL FB_SPLIT INTERLACED_SCHEDULE ENABLE_LAYER_REDISTRIBUTION \
  ENABLE_ZERO_BUBBLE ZERO_BUBBLE_V_SCHEDULE INTERLEAVED_1F1B SYNC_OPTIMIZER \
  ENABLE_EXACTLY_NUMERIC_MATCH OFFLOAD NO_BARRIER FP32 ORIGINAL_RECIPE PROFILED DRY_RUN \
  SEQUENCE_PARALLEL; do
  on "$name" || unset "$name"
done

t="${TP_SIZE:-1}"
c="${CP_SIZE:-1}"
per_stage="$((t * c))" # ranks
((t > 1)) || idle "TP_SIZE is 1" SEQUENCE_PARALLEL
if [[ -n "${INTERLEAVE_GROUP:-}" ]]; then
  die "INTERLEAVE_GROUP=$INTERLEAVE_GROUP: grouped microbatches are not built yet; unset it"
fi
on OFFLOAD || idle "OFFLOAD is off" OFFLOAD_CHUNK_NUM
idle "copies to the host follow from the link to it" OFFLOAD_TIME NO_BARRIER

if on VOCAB_PARALLEL && on ENABLE_LAYER_REDISTRIBUTION; then
  die "ENABLE_LAYER_REDISTRIBUTION=$ENABLE_LAYER_REDISTRIBUTION leaves the vocabulary layers" \
    "whole, VOCAB_PARALLEL=$VOCAB_PARALLEL splits them: unset one"
fi
on VOCAB_PARALLEL || idle "VOCAB_PARALLEL is off" FB_SPLIT INTERLACED_SCHEDULE
if on VOCAB_PARALLEL && on INTERLACED_SCHEDULE; then
  idle "INTERLACED_SCHEDULE has two barriers by itself" FB_SPLIT
fi
on ENABLE_LAYER_REDISTRIBUTION || idle "ENABLE_LAYER_REDISTRIBUTION is off" FINAL_STAGE_LAYERS

if on ZERO_BUBBLE_V_SCHEDULE; then
  ENABLE_ZERO_BUBBLE=1
else
  idle "ZERO_BUBBLE_V_SCHEDULE is off" ZERO_BUBBLE_V_SCHEDULE_MEM_SETUP
fi
if on ENABLE_ZERO_BUBBLE; then
  SCHEDULE_TIMER_START="${SCHEDULE_TIMER_START:-${ZERO_BUBBLE_TIMER_START:-}}"
  SCHEDULE_TIMER_END="${SCHEDULE_TIMER_END:-${ZERO_BUBBLE_TIMER_END:-}}"
else
  idle "ENABLE_ZERO_BUBBLE is off" \
    ZERO_BUBBLE_MEM_LIMIT ZERO_BUBBLE_TIMER_START ZERO_BUBBLE_TIMER_END SYNC_OPTIMIZER
fi
[[ -n "${SCHEDULE_TIMER_START:-}" ]] || idle "SCHEDULE_TIMER_START is not set" SCHEDULE_TIMER_END
if [[ -n "${IMM_SIZE:-}" && "${FFN_HIDDEN_SIZE:-$IMM_SIZE}" != "$IMM_SIZE" ]]; then
  die "IMM_SIZE=$IMM_SIZE and FFN_HIDDEN_SIZE=$FFN_HIDDEN_SIZE are both the width of the MLP:" \
    "unset one"
fi
on PROFILED || idle "PROFILED is off" AIP_RUN_NAME

if [[ -n "${DATA_PATH:-}" || -n "${TOKENIZER_MODEL:-}" ]]; then
  [[ -n "${DATA_PATH:-}" && -n "${TOKENIZER_MODEL:-}" ]] ||
    die "DATA_PATH='${DATA_PATH:-}' TOKENIZER_MODEL='${TOKENIZER_MODEL:-}': set both for an own" \
      "data set, or neither for the sample data"
  [[ -z "${VOCAB_SIZE:-}" ]] ||
    die "VOCAB_SIZE=$VOCAB_SIZE chooses the sample data, but DATA_PATH and TOKENIZER_MODEL name" \
      "another: unset VOCAB_SIZE, or those two"
else
  VOCAB_SIZE="${VOCAB_SIZE:-256k}"
  [[ "$VOCAB_SIZE" =~ ^[1-9][0-9]{0,8}k?$ ]] ||
    die "VOCAB_SIZE=$VOCAB_SIZE is no size of a vocabulary: give one such as 8k or 8000, or set" \
      "DATA_PATH and TOKENIZER_MODEL to an own data set"
  [[ "$VOCAB_SIZE" != *000 ]] || VOCAB_SIZE="${VOCAB_SIZE%000}k"
fi

# --- Ranks

nodes="${WORLD_SIZE:-1}"
if ((nodes > 1)); then
  [[ -n "${RANK:-}" && -n "${MASTER_ADDR:-}" ]] ||
    die "WORLD_SIZE=$nodes nodes: set RANK (0 to $((nodes - 1)), this node) and MASTER_ADDR (the" \
      "address of node 0) on each of them"
fi
((${RANK:-0} < nodes)) || die "RANK=$RANK is not below the number of nodes WORLD_SIZE=$nodes"

gpus="$(count_gpus)"
if ((gpus > 0)); then
  ranks_per_node="${GPUS_PER_NODE:-$gpus}"
  ((ranks_per_node <= gpus)) ||
    die "GPUS_PER_NODE=$ranks_per_node, but this node has $gpus: every rank needs a GPU of its own"
else
  cores="$(count_cores)"
  cores="$((cores < 2 ? 2 : cores > 4 ? 4 : cores))"
  # As few as make a replica, or else whole stages.
  cores="$((cores > per_stage ? cores / per_stage * per_stage : per_stage))"
  fewest="${PIPELINE_SIZE:+$(((per_stage * PIPELINE_SIZE + nodes - 1) / nodes))}"
  ranks_per_node="${GPUS_PER_NODE:-$fewest}"
  ranks_per_node="${ranks_per_node:-$cores}"
fi
ranks="$((nodes * ranks_per_node))"
p="${PIPELINE_SIZE:-$((ranks < per_stage ? 1 : ranks / per_stage))}"
replica="PIPELINE_SIZE=$p"
((c == 1)) || replica="CP_SIZE=$c x $replica"
((t == 1)) || replica="TP_SIZE=$t x $replica"
((ranks_per_node <= 65535)) ||
  die "$replica takes $ranks_per_node ranks of each of $nodes nodes, more than 65535: lower it"
((per_stage * p <= ranks)) ||
  die "$replica is more than the $nodes x $ranks_per_node ranks (WORLD_SIZE x GPUS_PER_NODE):" \
    "lower it, or add nodes"
((ranks % (per_stage * p) == 0)) ||
  die "$replica does not divide the $nodes x $ranks_per_node ranks (WORLD_SIZE x GPUS_PER_NODE)" \
    "into replicas: start a multiple of $((per_stage * p)) ranks"

# --- Set up and prepare the data

# The user's flags, in which underscores count as dashes.
read -rd '' -a extra <<<"${EXTRA_OPTIONS:-}" || true # all lines of it; it fails at the end
own=(${extra[@]+"${extra[@]}"} "$@")
typed=(${own[@]+"${own[@]}"})
files=""
if [[ " ${own[*]-}" == *" @"* ]]; then
  files=some
  # A word @FILE stands for the flags of a file. The line below keeps the word; this script needs the flags.
  python="${PYTHON:-python3}"
  if [[ -x "$root/.venv/bin/python" ]]; then python="$root/.venv/bin/python"; fi
  if [[ -n "${VENV:-}" ]]; then python="$VENV/bin/python"; fi
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "$("$python" --version 2>&1) is too old to read a flag file: install Python 3.10 or newer, or" \
      "name one as in PYTHON=python3.12"
  quoted="$(PYTHONPATH="$root" "$python" -m megatron.run.flag_files "${own[@]}")" || exit 2
  eval "typed=($quoted)"
fi
given=" ${typed[*]-} "
given="${given//_/-}"
if [[ -n "$files" ]]; then # no default of a variable is set yet
  while read -r option names; do
    if [[ "$given" == *" $option "* || "$given" == *" $option="* ]]; then
      read -ra names <<<"$names"
      idle "$option replaces it (a flag file, or a flag beside it)" "${names[@]}"
    fi
  done <<'END'
--pipeline-model-parallel-size PIPELINE_SIZE
--tensor-model-parallel-size TP_SIZE
--context-parallel-size CP_SIZE
--num-layers LAYERS
--hidden-size HIDDEN_SIZE
--ffn-hidden-size IMM_SIZE FFN_HIDDEN_SIZE
--num-attention-heads ATTENTION_HEADS
--num-query-groups GQA
--seq-length SEQ_LENGTH
--micro-batch-size MICRO_BATCH_SIZE
--global-batch-size GLOBAL_BATCH_SIZE
--log-interval LOG_INTERVAL
--eval-interval EVAL_INTERVAL
--exit-interval EXIT_INTERVAL
END
fi
if ((nodes > 1)) && ! on DRY_RUN; then
  # torchrun would wait for an unknown host without a word; a cluster's name server may be late.
  for _ in {1..15}; do
    is_unknown "$MASTER_ADDR" || break
    sleep 1
  done
  ! is_unknown "$MASTER_ADDR" ||
    die "MASTER_ADDR=$MASTER_ADDR is no host that this machine knows: set it to the name or the" \
      "address of node 0"
fi
own_data=0 own_tokenizer=0
for word in ${typed[@]+"${typed[@]}"}; do
  case "${word%%=*}" in
    --data-path | --train-data-path | --data-args-path | --per-split-data-args-path) own_data=1 ;;
    --tokenizer-type | --tokenizer-model) own_tokenizer=1 ;;
  esac
done
needs_data=0 samples=0
if [[ -n "${DATA_PATH:-}" ]] || ! ((own_data && own_tokenizer)); then needs_data=1; fi
if [[ -z "${DATA_PATH:-}" ]] && ((needs_data)); then samples=1; fi
compiling=""
if on DRY_RUN; then
  venv="${VENV:-.venv}"
else
  meanwhile="" # beside the setup; it is done again below, where it finds itself done
  if ((samples)); then meanwhile="tools/sample_data.py --vocab-size $VOCAB_SIZE"; fi
  venv="$(MEANWHILE="$meanwhile" "$root/tools/setup_venv.sh")"
  # One process answers a misspelt flag before anything is compiled, made or measured.
  env ONLY_WORDS=1 "$venv/bin/python" "$root/tools/check_flags.py" ${own[@]+"${own[@]}"}
  for word in ${own[@]+"${own[@]}"}; do
    case "$word" in -h | --help) exit 0 ;; esac # the process has printed the help
  done
  PYTHONPATH="$root" "$venv/bin/python" -m megatron.native.build &
  compiling=$!
fi
if ((needs_data)); then
  if ((samples)) && on DRY_RUN; then
    DATA_PATH="SAMPLE_DATA_$VOCAB_SIZE" TOKENIZER_MODEL="SAMPLE_TOKENIZER_$VOCAB_SIZE"
  elif ((samples)); then
    sample="$("$venv/bin/python" "$root/tools/sample_data.py" --vocab-size "$VOCAB_SIZE")"
    DATA_PATH="$(sed -n 's/^DATA_PATH=//p' <<<"$sample")"
    TOKENIZER_MODEL="$(sed -n 's/^TOKENIZER_MODEL=//p' <<<"$sample")"
  fi
fi
[[ -z "$compiling" ]] || wait "$compiling" || true

# --- Sizes: the original's with GPUs; without GPUs, sizes whose 30 iterations take about a minute

# choose_sizes: sets HIDDEN_SIZE, MICRO_BATCH_SIZE and measured_precision by a timing of this machine.
# The same question gets the same answer later, so that runs with and without a switch are comparable.
choose_sizes() {
  local found kept words=(--ranks "$((p * per_stage))" --cores "$(count_cores)" --layers "$LAYERS"
    --seq-length "$SEQ_LENGTH" --microbatches "$((3 * p))")
  if [[ "$VOCAB_SIZE" == *k ]]; then
    words+=(--vocab-size "${VOCAB_SIZE%k}000")
  else
    words+=(--vocab-size "$VOCAB_SIZE")
  fi
  if on FP32; then
    words+=(--precision fp32)
  elif on ORIGINAL_RECIPE || [[ "$given" =~ \ --(bf16|fp16)\  ]]; then
    words+=(--precision bf16)
  fi
  words+=(${HIDDEN_SIZE:+--hidden-size "$HIDDEN_SIZE"} ${ATTENTION_HEADS:+--heads "$ATTENTION_HEADS"}
    ${MICRO_BATCH_SIZE:+--micro-batch-size "$MICRO_BATCH_SIZE"})
  mkdir -p "$root/.cache" 2>/dev/null || true
  kept="$root/.cache/sizes-$(cksum <<<"${words[*]} $(uname -n)" | tr ' ' -)"
  if [[ -s "$kept" ]]; then
    found="$(<"$kept")"
    printf 'The model has the sizes that were chosen before (%s; remove it to time anew)\n' "$kept" >&2
  else
    printf 'Timing a product of the model on this machine, to choose its size: some seconds\n' >&2
    found="$(OMP_NUM_THREADS=1 "$venv/bin/python" "$root/tools/first_model.py" "${words[@]}")" ||
      return 0 # it has said why
    { printf '%s\n' "$found" >"$kept"; } 2>/dev/null || true # the folder may be read-only
  fi
  measured_precision="$(sed -n 's/^PRECISION=//p' <<<"$found")"
  HIDDEN_SIZE="$(sed -n 's/^HIDDEN_SIZE=//p' <<<"$found")"
  MICRO_BATCH_SIZE="$(sed -n 's/^MICRO_BATCH_SIZE=//p' <<<"$found")"
}

measured_precision=""
if ((gpus == 0)); then
  LAYERS="${LAYERS:-$((2 * p))}"
  SEQ_LENGTH="${SEQ_LENGTH:-64}" # many short samples: the loss of a small batch falls more smoothly
  # Ranks and groups of queries must divide the heads, and a width of its own has fewer than 8.
  if ((t > 1)) || [[ -n "${GQA:-}" ]]; then ATTENTION_HEADS="${ATTENTION_HEADS:-8}"; fi
  # A batch of an own size may not divide; flags of sizes win anyway; nodes must not differ.
  sizes=' --(hidden-size|num-layers|seq-length|micro-batch-size)[= ]'
  batches=' --(global-batch-size|rampup-batch-size|batch-size-steps|step-batch-size-schedule)[= ]'
  if [[ -n "${GLOBAL_BATCH_SIZE:-}" || "$given" =~ $batches ]]; then
    MICRO_BATCH_SIZE="${MICRO_BATCH_SIZE:-1}"
  fi
  if ((samples && nodes == 1)) && ! on DRY_RUN && ! [[ "$given" =~ $sizes ]] &&
    [[ -z "${HIDDEN_SIZE:-}" || -z "${MICRO_BATCH_SIZE:-}" ]]; then
    choose_sizes
  fi
  HIDDEN_SIZE="${HIDDEN_SIZE:-256}" MICRO_BATCH_SIZE="${MICRO_BATCH_SIZE:-4}"
fi
MICRO_BATCH_SIZE="${MICRO_BATCH_SIZE:-1}"
GLOBAL_BATCH_SIZE="${GLOBAL_BATCH_SIZE:-$((3 * ranks / per_stage * MICRO_BATCH_SIZE))}"
if ((gpus > 0)); then
  LAYERS="${LAYERS:-$((4 * p))}"
  HIDDEN_SIZE="${HIDDEN_SIZE:-4096}"
  ATTENTION_HEADS="${ATTENTION_HEADS:-32}"
  SEQ_LENGTH="${SEQ_LENGTH:-2048}"
  iterations="${EXIT_INTERVAL:-1000}"
  eval_iterations=40
  device=cuda init_std=0.006 warmup_share=0.1
  rates=(--lr 3.0e-4 --min-lr 3.0e-5 --lr-decay-style cosine)
else
  ATTENTION_HEADS="${ATTENTION_HEADS:-$((HIDDEN_SIZE % 32 ? 8 : HIDDEN_SIZE / 32))}"
  iterations="${EXIT_INTERVAL:-30}"
  eval_iterations=10
  # A batch of a few thousand tokens takes this rate only after a longer warm-up. The rate falls with
  # the width, as Adam moves each weight alike, and a product adds up as many as the width. With twice
  # this rate single batches threw the loss up by as much as 6.
  device=cpu init_std=0.02 warmup_share=0.3
  rate="$(awk -v h="$HIDDEN_SIZE" 'BEGIN { r = 0.256 / h; printf "%.2e", (r > 2e-3) ? 2e-3 : r }')"
  rates=(--lr "$rate" --min-lr "$(awk -v r="$rate" 'BEGIN { printf "%.2e", r / 10 }')" --lr-decay-style cosine)
fi
clip=1.0
length=(--train-iters "$iterations")
warmup=(--lr-warmup-fraction "$warmup_share")
precision=()
asks_about_gpus=0
[[ "$given" == *" --dry-run "* ]] && asks_about_gpus=1
if [[ -z "$measured_precision" ]] && cpu_has_bf16; then measured_precision=bf16; fi
if ! on FP32 && { ((gpus > 0 || asks_about_gpus)) || [[ "$measured_precision" == bf16 ]]; }; then
  precision=(--bf16)
fi
if on ORIGINAL_RECIPE; then
  init_std=0.006
  rates=(--lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --lr-decay-samples 126953125)
  clip=8.0
  length=(--train-samples 146484375 --exit-interval "$iterations")
  warmup=(--lr-warmup-samples 183105)
  on FP32 || precision=(--fp16 --initial-loss-scale 65536)
fi

options=(
  --device "$device"
  --pipeline-model-parallel-size "$p"
  --num-layers "$LAYERS"
  --hidden-size "$HIDDEN_SIZE"
  --ffn-hidden-size "${IMM_SIZE:-${FFN_HIDDEN_SIZE:-$((4 * HIDDEN_SIZE))}}"
  --num-attention-heads "$ATTENTION_HEADS"
  ${GQA:+--group-query-attention --num-query-groups "$GQA"}
  --seq-length "$SEQ_LENGTH"
  --max-position-embeddings "$SEQ_LENGTH"
  --untie-embeddings-and-output-weights
  --attention-dropout 0
  --hidden-dropout 0
  --init-method-std "$init_std"
  --micro-batch-size "$MICRO_BATCH_SIZE"
  --global-batch-size "$GLOBAL_BATCH_SIZE"
  --weight-decay 0.1
  --adam-beta1 0.9
  --adam-beta2 0.95
  --clip-grad "$clip"
  --log-interval "${LOG_INTERVAL:-1}"
  --split "98,2,0"
  --tokenizer-type GPTSentencePieceTokenizer
)

# A flag that the user gives replaces flags of this script that exclude it.
if [[ "$given" =~ \ --(lr|min-lr|lr-decay-style)[=\ ] ]]; then
  [[ "$given" =~ \ --lr[=\ ] ]] || options+=("${rates[@]:0:2}")
else
  options+=("${rates[@]}")
fi
if [[ -n "${EVAL_INTERVAL:-}" || "$given" == *" --eval-interval"* ]]; then
  [[ -z "${EVAL_INTERVAL:-}" ]] || options+=(--eval-interval "$EVAL_INTERVAL")
  options+=(--eval-iters "$eval_iterations")
fi
if [[ "$given" != *" --train-"* ]]; then
  options+=("${length[@]}")
elif [[ -n "${EXIT_INTERVAL:-}" ]]; then
  options+=(--exit-interval "$EXIT_INTERVAL")
fi
[[ "$given" == *" --lr-warmup-"* ]] || options+=("${warmup[@]}")
[[ "$given" =~ \ --(bf16|fp16)\  ]] || options+=(${precision[@]+"${precision[@]}"})

# --- The vocabulary layers, the schedule and the profile

if ((t > 1)); then
  options+=(--tensor-model-parallel-size "$t")
  if on SEQUENCE_PARALLEL; then options+=(--sequence-parallel); fi
fi
if ((c > 1)); then options+=(--context-parallel-size "$c"); fi
if [[ "$given" =~ \ --vocab-parallel[=\ ] ]]; then
  unset VOCAB_PARALLEL # the flag replaces it
fi
if on VOCAB_PARALLEL; then options+=(--enable-vocab-parallel); fi
if on VOCAB_PARALLEL && on INTERLACED_SCHEDULE; then
  options+=(--use-interlaced-schedule)
elif on VOCAB_PARALLEL && on FB_SPLIT; then
  options+=(--disable-backward-fusion)
fi
if on ENABLE_LAYER_REDISTRIBUTION; then
  options+=(--enable-layer-redistribution
    ${FINAL_STAGE_LAYERS:+--final-stage-num-layers "$FINAL_STAGE_LAYERS"})
fi
if on ENABLE_ZERO_BUBBLE; then
  options+=(--enable-zero-bubble)
  if on ZERO_BUBBLE_V_SCHEDULE; then
    setup="${ZERO_BUBBLE_V_SCHEDULE_MEM_SETUP:-}"
    options+=(--zero-bubble-v-schedule ${setup:+--zero-bubble-v-schedule-mem-setup "$setup"})
  else
    ZERO_BUBBLE_MEM_LIMIT="${ZERO_BUBBLE_MEM_LIMIT:-$((2 * p))}"
  fi
  options+=(${ZERO_BUBBLE_MEM_LIMIT:+--zero-bubble-max-pending-backward "$ZERO_BUBBLE_MEM_LIMIT"})
  if ! on FP32 && ! on SYNC_OPTIMIZER; then
    ENABLE_OPTIMIZER_POST_VALIDATION="${ENABLE_OPTIMIZER_POST_VALIDATION:-1}"
  fi
fi
if on INTERLEAVED_1F1B; then options+=(--num-layers-per-virtual-pipeline-stage 1); fi
if on OFFLOAD; then
  options+=(--cpu-offload ${OFFLOAD_CHUNK_NUM:+--offload-chunk-num "$OFFLOAD_CHUNK_NUM"})
fi
if on ENABLE_OPTIMIZER_POST_VALIDATION; then options+=(--enable-optimizer-post-validation); fi
if on ENABLE_EXACTLY_NUMERIC_MATCH; then options+=(--enable-exactly-numeric-match); fi
if [[ -n "${SCHEDULE_TIMER_START:-}" ]]; then
  if ((${SCHEDULE_TIMER_END:-$SCHEDULE_TIMER_START} > iterations)); then
    idle "the run ends at iteration $iterations" SCHEDULE_TIMER_START SCHEDULE_TIMER_END
  else
    options+=(--profile-schedule-start "$SCHEDULE_TIMER_START"
      ${SCHEDULE_TIMER_END:+--profile-schedule-end "$SCHEDULE_TIMER_END"} --replan)
  fi
fi
if on PROFILED; then
  options+=(--profile ${AIP_RUN_NAME:+--profile-dir "profile/$AIP_RUN_NAME"})
fi

# --- How the ranks run

environment=(
  "PYTHONUNBUFFERED=1"
  # One thread per rank on CPUs; on GPUs the host's work is too small for more threads.
  "OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}"
)
if ((gpus > 0)); then
  # The driver reads it at its start: passes, collectives and every communicator have own streams.
  environment+=("CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32}")
else
  # glibc returns a freed block above a limit to the kernel at once; the next pass gets it back page
  # fault by page fault. Logits of 256k columns are such blocks: keeping them saves a tenth or more
  # of an iteration. (A higher MALLOC_MMAP_THRESHOLD_ does the same only in newer glibc; older
  # versions cap it at 32 MB.)
  environment+=(
    "MALLOC_MMAP_MAX_=${MALLOC_MMAP_MAX_:-0}"
    "MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-1099511627776}"
  )
  # jemalloc with settings that keep freed blocks saves another 2 %: it reuses the block of a size
  # that was freed last, which is more often still in cache.
  if [[ -z "${LD_PRELOAD+set}" ]] && has_library libjemalloc.so.2; then
    environment+=(
      "LD_PRELOAD=libjemalloc.so.2"
      "MALLOC_CONF=${MALLOC_CONF:-dirty_decay_ms:-1,muzzy_decay_ms:-1}"
    )
  fi
fi
if ((nodes > 1)); then
  rendezvous=(--nnodes "$nodes" --node-rank "$RANK" --master-addr "$MASTER_ADDR"
    --master-port "${MASTER_PORT:-10086}")
elif [[ -n "${MASTER_PORT:-}" ]]; then
  rendezvous=(--master-addr "${MASTER_ADDR:-localhost}" --master-port "$MASTER_PORT")
else
  idle "WORLD_SIZE is 1 node, and MASTER_PORT is not set" MASTER_ADDR
  rendezvous=(--standalone) # on any free port, so that jobs on one machine do not collide
fi

# --- Train

if ((${#files})); then # flags of this script that a file replaces are left out, as there are many
  kept=() keeps=1
  for word in "${options[@]}"; do
    if [[ "$word" == --* ]]; then
      keeps=1
      [[ "$given" != *" $word "* && "$given" != *" $word="* ]] || keeps=0
    fi
    if ((keeps)); then kept+=("$word"); fi
  done
  options=(${kept[@]+"${kept[@]}"})
fi
if ((needs_data)); then options+=(--data-path "$DATA_PATH" --tokenizer-model "$TOKENIZER_MODEL"); fi
command=(env "${environment[@]}" "$venv/bin/torchrun" "${rendezvous[@]}"
  --nproc-per-node "$ranks_per_node" "$root/pretrain_gpt.py" "${options[@]}" ${own[@]+"${own[@]}"})
if ! on DRY_RUN; then
  # The same process judges all flags together, before torchrun starts ranks that would all find them.
  env WORLD_SIZE="$ranks" LOCAL_WORLD_SIZE="$ranks_per_node" "$venv/bin/python" \
    "$root/tools/check_flags.py" "${options[@]}" ${own[@]+"${own[@]}"}
fi
show "${command[@]}"
on DRY_RUN || printf 'Starting %s ranks: each loads PyTorch first, 5 to 30 s\n' "$ranks_per_node" >&2
if ! on DRY_RUN; then exec "${command[@]}"; fi
