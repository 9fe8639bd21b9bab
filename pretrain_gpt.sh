#!/usr/bin/env bash
# Pretrains GPT from nothing but Python 3.10 and a package index:
#
#   VOCAB_PARALLEL=1 VOCAB_SIZE=256k bash pretrain_gpt.sh [FLAG...]
#
# makes .venv, prepares sample data, and starts torchrun with one rank per GPU or, without GPUs, one
# rank per core. Every FLAG goes to pretrain_gpt.py after, and so in place of, those set here.
# Environment variables (a switch is on when it is 1, and off when it is 0, empty or not set):
#
#   VOCAB_PARALLEL       switch: split the vocabulary layers over all pipeline ranks (vocab-2)
#   FB_SPLIT             switch: with two barriers instead of one (vocab-1)
#   INTERLACED_SCHEDULE  switch, with VOCAB_PARALLEL: the interlaced schedule, for comparison
#   ENABLE_LAYER_REDISTRIBUTION
#                        switch, without VOCAB_PARALLEL: fewer layers on the stages that hold the
#                        vocabulary layers (redis)
#   FINAL_STAGE_LAYERS   layers of the last stage then; balanced by default
#   VOCAB_SIZE           of the sample data: 32k, 64k, 128k or 256k (the default)
#   DATA_PATH, TOKENIZER_MODEL
#                        an own data set (PREFIX of .bin and .idx) and its sentencepiece model
#   PIPELINE_SIZE        pipeline ranks p; all ranks by default
#   LAYERS HIDDEN_SIZE IMM_SIZE ATTENTION_HEADS SEQ_LENGTH     size of the model (IMM_SIZE: the MLP)
#   MICRO_BATCH_SIZE GLOBAL_BATCH_SIZE                         in samples
#   EXIT_INTERVAL        iterations to train, which the learning rate is planned over too: 1000
#                        with GPUs, 30 without
#   LOG_INTERVAL EVAL_INTERVAL                                 in iterations; without the latter
#                        there is no evaluation
#   FP32                 switch: fp32 instead of bf16
#   PROFILED             switch: profile a few iterations
#   GPUS_PER_NODE        ranks on this node; all GPUs by default, or the cores, 2 to 4
#   WORLD_SIZE RANK MASTER_ADDR MASTER_PORT
#                        number of nodes, this node's number, and where node 0 listens
#   DRY_RUN              switch: only print the torchrun line
#   VENV, PYTHON         see tools/setup_venv.sh
#   LD_PRELOAD           as ever. Where it is not set and there are no GPUs, jemalloc is preloaded if
#                        it is installed (Debian: apt install libjemalloc2); LD_PRELOAD= for glibc's
#
# Other schedules are flags, for example --pipeline-schedule v-half. TP_SIZE is known, but tensor
# parallelism is not built yet: it is refused.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

die() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

# on NAME: whether the switch NAME is on.
on() {
  case "${!1:-0}" in
    0) return 1 ;;
    1) return 0 ;;
    *) die "$1=${!1} is neither 0 nor 1" ;;
  esac
}

# whole NAME MINIMUM: refuses a value of NAME that is no whole number from MINIMUM on.
whole() {
  [[ -z "${!1:-}" || "${!1}" =~ ^(0|[1-9][0-9]{0,17})$ && "${!1}" -ge "$2" ]] ||
    die "$1=${!1} is not a whole number of at least $2"
}

# show WORD...: prints a command line that can be pasted, without needless quotes.
show() {
  local word
  for word in "$@"; do
    if [[ "$word" =~ ^[A-Za-z0-9_./:,=@%+-]+$ ]]; then printf '%s ' "$word"; else printf '%q ' "$word"; fi
  done
  echo
}

# has_library NAME: whether the cache of the dynamic linker knows the shared library NAME.
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

count_cores() { nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2; }

# Only these CPUs multiply bf16 matrices faster than fp32 ones.
cpu_has_bf16() { grep -qE '\b(amx_bf16|avx512_bf16)\b' /proc/cpuinfo 2>/dev/null; }

# --- What was asked for, checked before anything takes time

for name in PIPELINE_SIZE TP_SIZE LAYERS HIDDEN_SIZE IMM_SIZE ATTENTION_HEADS SEQ_LENGTH \
  MICRO_BATCH_SIZE GLOBAL_BATCH_SIZE EXIT_INTERVAL LOG_INTERVAL EVAL_INTERVAL GPUS_PER_NODE \
  WORLD_SIZE; do
  whole "$name" 1
done
whole RANK 0
whole FINAL_STAGE_LAYERS 0
for name in VOCAB_PARALLEL FB_SPLIT INTERLACED_SCHEDULE ENABLE_LAYER_REDISTRIBUTION FP32 PROFILED \
  DRY_RUN; do
  on "$name" || true
done

if ((${TP_SIZE:-1} > 1)); then
  die "TP_SIZE=$TP_SIZE: tensor parallelism is not built yet; unset it, and raise PIPELINE_SIZE to" \
    "use more ranks"
fi
if on FB_SPLIT && ! on VOCAB_PARALLEL; then
  die "FB_SPLIT=1 splits the passes of vocabulary parallelism; set VOCAB_PARALLEL=1 too"
fi
if on INTERLACED_SCHEDULE && ! on VOCAB_PARALLEL; then
  die "INTERLACED_SCHEDULE=1 is a way of vocabulary parallelism; set VOCAB_PARALLEL=1 too"
fi
if on INTERLACED_SCHEDULE && on FB_SPLIT; then
  die "INTERLACED_SCHEDULE=1 has two barriers by itself, and FB_SPLIT=1 asks for them: unset one"
fi
if on ENABLE_LAYER_REDISTRIBUTION && on VOCAB_PARALLEL; then
  die "ENABLE_LAYER_REDISTRIBUTION=1 leaves the vocabulary layers whole, VOCAB_PARALLEL=1 splits" \
    "them: unset one"
fi
if [[ -n "${FINAL_STAGE_LAYERS:-}" ]] && ! on ENABLE_LAYER_REDISTRIBUTION; then
  die "FINAL_STAGE_LAYERS=$FINAL_STAGE_LAYERS is for redistributed layers; set" \
    "ENABLE_LAYER_REDISTRIBUTION=1 too"
fi

if [[ -n "${DATA_PATH:-}" || -n "${TOKENIZER_MODEL:-}" ]]; then
  [[ -n "${DATA_PATH:-}" && -n "${TOKENIZER_MODEL:-}" ]] ||
    die "DATA_PATH='${DATA_PATH:-}' TOKENIZER_MODEL='${TOKENIZER_MODEL:-}': set both for an own" \
      "data set, or neither for the sample data"
  [[ -z "${VOCAB_SIZE:-}" ]] ||
    die "VOCAB_SIZE=$VOCAB_SIZE chooses the sample data, but DATA_PATH and TOKENIZER_MODEL name" \
      "another: unset VOCAB_SIZE, or those two"
else
  VOCAB_SIZE="${VOCAB_SIZE:-256k}"
  case "$VOCAB_SIZE" in
    32k | 64k | 128k | 256k) ;;
    32000 | 64000 | 128000 | 256000) VOCAB_SIZE="${VOCAB_SIZE%000}k" ;;
    *) die "VOCAB_SIZE=$VOCAB_SIZE has no sample data: use 32k, 64k, 128k or 256k, or set DATA_PATH" \
      "and TOKENIZER_MODEL to an own data set" ;;
  esac
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
  ranks_per_node="${GPUS_PER_NODE:-${PIPELINE_SIZE:+$(((PIPELINE_SIZE + nodes - 1) / nodes))}}"
  ranks_per_node="${ranks_per_node:-$cores}"
fi
ranks="$((nodes * ranks_per_node))"
p="${PIPELINE_SIZE:-$ranks}"
((p <= ranks)) ||
  die "PIPELINE_SIZE=$p is more than the $nodes x $ranks_per_node ranks (WORLD_SIZE x" \
    "GPUS_PER_NODE): lower it, or add nodes"
((p == ranks)) ||
  die "PIPELINE_SIZE=$p with $nodes x $ranks_per_node ranks would be data parallel, which is not" \
    "built yet: set GPUS_PER_NODE and WORLD_SIZE so that their product is PIPELINE_SIZE"

# --- Sizes: the original's with GPUs; without, what trains in a few minutes on two cores

MICRO_BATCH_SIZE="${MICRO_BATCH_SIZE:-1}"
GLOBAL_BATCH_SIZE="${GLOBAL_BATCH_SIZE:-$((3 * p * MICRO_BATCH_SIZE))}"
if ((gpus > 0)); then
  LAYERS="${LAYERS:-$((4 * p))}"
  HIDDEN_SIZE="${HIDDEN_SIZE:-4096}"
  ATTENTION_HEADS="${ATTENTION_HEADS:-32}"
  SEQ_LENGTH="${SEQ_LENGTH:-2048}"
  iterations=1000
  eval_iterations=40
  options=(--device cuda --init-method-std 0.006)
  rates=(--lr 3.0e-4 --min-lr 3.0e-5 --lr-decay-style cosine)
else
  LAYERS="${LAYERS:-$((2 * p))}"
  HIDDEN_SIZE="${HIDDEN_SIZE:-256}"
  ATTENTION_HEADS="${ATTENTION_HEADS:-8}"
  SEQ_LENGTH="${SEQ_LENGTH:-256}"
  iterations=30
  eval_iterations=10
  options=(--device cpu --init-method-std 0.02)
  rates=(--lr 2.0e-3 --min-lr 2.0e-4 --lr-decay-style cosine)
fi

options+=(
  --pipeline-model-parallel-size "$p"
  --num-layers "$LAYERS"
  --hidden-size "$HIDDEN_SIZE"
  --ffn-hidden-size "${IMM_SIZE:-$((4 * HIDDEN_SIZE))}"
  --num-attention-heads "$ATTENTION_HEADS"
  --seq-length "$SEQ_LENGTH"
  --max-position-embeddings "$SEQ_LENGTH"
  --untie-embeddings-and-output-weights
  --attention-dropout 0
  --hidden-dropout 0
  --micro-batch-size "$MICRO_BATCH_SIZE"
  --global-batch-size "$GLOBAL_BATCH_SIZE"
  --weight-decay 0.1
  --adam-beta1 0.9
  --adam-beta2 0.95
  --clip-grad 1.0
  --log-interval "${LOG_INTERVAL:-1}"
  --split "98,2,0"
  --tokenizer-type GPTSentencePieceTokenizer
)
# Some flags exclude one another, or make sense together only: an own one on the command line takes
# the place of ours. (Flags may be written with underscores, too.)
given=" ${*//_/-} "
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
  options+=(--train-iters "${EXIT_INTERVAL:-$iterations}")
elif [[ -n "${EXIT_INTERVAL:-}" ]]; then
  options+=(--exit-interval "$EXIT_INTERVAL")
fi
[[ "$given" == *" --lr-warmup-"* ]] || options+=(--lr-warmup-fraction 0.1)
if ! on FP32 && { ((gpus > 0)) || cpu_has_bf16; }; then options+=(--bf16); fi
if on VOCAB_PARALLEL; then options+=(--enable-vocab-parallel); fi
if on FB_SPLIT; then options+=(--disable-backward-fusion); fi
if on INTERLACED_SCHEDULE; then options+=(--use-interlaced-schedule); fi
if on ENABLE_LAYER_REDISTRIBUTION; then
  options+=(--enable-layer-redistribution)
  options+=(${FINAL_STAGE_LAYERS:+--final-stage-num-layers "$FINAL_STAGE_LAYERS"})
fi
if on PROFILED; then options+=(--profile); fi

# --- How the ranks run

environment=(
  "PYTHONUNBUFFERED=1"
  # One thread a rank on CPUs; on GPUs the host's work is too small for more.
  "OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}"
)
if ((gpus > 0)); then
  # Read as the driver starts: passes, collectives and every communicator have streams of their own.
  environment+=("CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32}")
else
  # glibc gives a freed block above a limit back to the kernel at once, and asks for it, page fault
  # by page fault, at the next pass. Logits of 256k columns are such blocks: keeping them saves a
  # tenth and more of an iteration. (Raising MALLOC_MMAP_THRESHOLD_ does the same only in newer
  # glibc, older ones cap it at 32 MB.)
  environment+=(
    "MALLOC_MMAP_MAX_=${MALLOC_MMAP_MAX_:-0}"
    "MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-1099511627776}"
  )
  # jemalloc, told to keep freed blocks, too, saves another 2 %: the block that it gives is the
  # one of that size that was freed last, so more often still in cache.
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
  rendezvous=(--standalone) # on any free port, so that jobs on one machine do not collide
fi

# --- Set up, prepare the data, train

if on DRY_RUN; then
  venv="${VENV:-.venv}"
  DATA_PATH="${DATA_PATH:-SAMPLE_DATA_$VOCAB_SIZE}"
  TOKENIZER_MODEL="${TOKENIZER_MODEL:-SAMPLE_TOKENIZER_$VOCAB_SIZE}"
else
  venv="$("$root/tools/setup_venv.sh")"
  if [[ -z "${DATA_PATH:-}" ]]; then
    sample="$("$venv/bin/python" "$root/tools/sample_data.py" --vocab-size "$VOCAB_SIZE")"
    DATA_PATH="$(sed -n 's/^DATA_PATH=//p' <<<"$sample")"
    TOKENIZER_MODEL="$(sed -n 's/^TOKENIZER_MODEL=//p' <<<"$sample")"
  fi
fi
options+=(--data-path "$DATA_PATH" --tokenizer-model "$TOKENIZER_MODEL")

ours=() # without what the command line gives, as a flag stands there once
for word in "${options[@]}"; do
  if [[ "$word" == --* ]]; then flag="$word"; fi
  [[ "$given" == *" $flag"[=\ ]* ]] || ours+=("$word")
done

command=(env "${environment[@]}" "$venv/bin/torchrun" "${rendezvous[@]}"
  --nproc-per-node "$ranks_per_node" "$root/pretrain_gpt.py" "${ours[@]}" "$@")
show "${command[@]}"
if ! on DRY_RUN; then exec "${command[@]}"; fi
