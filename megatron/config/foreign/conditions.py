"""Conditions under which a missing feature is not asked for."""

from megatron.config.foreign.line import Condition, without

NO_FP8 = without("--fp8-format", "--fp8", "--fp8-hybrid", "--fp8-e4m3")
SAME_STD = Condition(
    "with the value of --init-method-std",
    lambda line: (
        line.number("--embedding-init-method-std") == line.number("--init-method-std", 0.02)
    ),
)
GROUPS_OF_PIPELINE = Condition(
    "without interleaving, or at the number of pipeline ranks",
    lambda line: (
        line.given.keys().isdisjoint(
            ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")
        )
        or line.word("--microbatch-group-size-per-virtual-pipeline-stage")
        == line.word("--pipeline-model-parallel-size")
    ),
)
WITHOUT_TABLE = Condition(
    "with positions that are no learned table",
    lambda line: line.word("--position-embedding-type") in ("rope", "alibi", "none"),
)
WITH_TABLE = Condition("with learned positions", lambda line: not WITHOUT_TABLE.holds(line))

INDEXED = Condition(
    "with --dataset MMAP or Idxmap",
    lambda line: (line.word("--dataset") or "MMAP").endswith(("MMAP", "Idxmap")),
)
LIMIT_IN_MICROBATCHES = Condition(
    "beside a number of --zero-bubble-max-pending-backward",
    lambda line: line.number("--zero-bubble-max-pending-backward") > 0,
)
NO_RECOMPUTATION = without(
    "--recompute-granularity",
    "--recompute-activations",
    "--checkpoint-activations",
    "--activations-checkpoint-method",
)
NOT_SHARED = Condition(
    "without recomputation, or at --tensor-model-parallel-size 1",
    lambda line: (
        NO_RECOMPUTATION.holds(line) or line.number("--tensor-model-parallel-size", 1) <= 1
    ),
)
NO_RECORDS = without("--tensorboard-dir", "--wandb-project")
DYNAMIC_SCALE = Condition(
    "beside --fp16 without --loss-scale",
    lambda line: "--fp16" in line.given and "--loss-scale" not in line.given,
)
NOT_BF16_GRADIENTS = Condition(
    "without --main-grads-dtype bf16",
    lambda line: line.word("--main-grads-dtype") != "bf16",
)
