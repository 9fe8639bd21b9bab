"""The flags of long runs on many ranks: replicas, checkpoints, and what guards a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.config.declare import COUNT, POSITIVE, flag

# The formatter is off so that the flags read as a table.
# fmt: off


@dataclass(frozen=True)
class ReplicaFlags:
    """Data parallelism: as many replicas of the model as the ranks of the job make."""

    overlap_grad_reduce: bool = flag(False,
        "Reduce gradients over the replicas beside the passes, in every schedule.")
    ddp_bucket_size: int | None = flag(None,
        "Parameters whose gradients are reduced together.", COUNT,
        unset="400,000,000, or 1,000,000 for each replica if that is more",
        excludes="--ddp-num-buckets")
    ddp_num_buckets: int | None = flag(None,
        "About so many buckets a rank; no parameter is cut. Another way to give their size.", COUNT,
        unset="by --ddp-bucket-size")
    use_distributed_optimizer: bool = flag(False,
        "Every replica keeps the optimizer's state of its own share of the parameters only "
        "(ZeRO-1), updates these, and gathers the others.")
    overlap_param_gather: bool = flag(False,
        "Gather updated parameters beside passes that do not read them.")
    grad_reduce_in_bf16: bool = flag(False, "Reduce gradients in bf16, not in fp32.")
    use_tp_pp_dp_mapping: bool = flag(False,
        "Number the ranks of a pipeline in a row, not those of a replica group.")


@dataclass(frozen=True)
class CheckpointFlags:
    """Checkpoints; any layout loads those of any other."""

    save: Path | None = flag(None,
        "Folder to save checkpoints to, at the end and between; for one job at a time.",
        unset="nothing is saved")
    save_interval: int | None = flag(None, "Iterations between two checkpoints.", COUNT,
        unset="only at the end", idle_without="--save")
    save_retain_interval: int | None = flag(None,
        "Delete a checkpoint after the next one is saved, unless this number divides its "
        "iteration.", COUNT, unset="all are kept", idle_without="--save")
    async_save: bool = flag(False, "Go on with training while a checkpoint is written.",
        idle_without="--save")
    no_save_optim: bool = flag(False, "Save the weights only.", idle_without="--save")
    load: Path | None = flag(None, "Folder to load a checkpoint from, the last good one.",
        unset="train from random weights")
    use_checkpoint_args: bool = flag(False,
        "Take the flags of the model that are not given from the checkpoint.",
        idle_without="--load")
    ckpt_step: int | None = flag(None, "Iteration of the checkpoint to load.", COUNT,
        unset="the last good one", idle_without="--load")
    no_load_optim: bool = flag(False, "Load the weights only; the iteration goes on.",
        idle_without="--load")
    finetune: bool = flag(False, "Load the weights only, and start from iteration 0.",
        idle_without="--load")
    exit_on_missing_checkpoint: bool = flag(False, "End the run if there is nothing to load.",
        idle_without="--load")


@dataclass(frozen=True)
class GuardFlags:
    """What a run of weeks does when something goes wrong, or its time is over."""

    exit_signal_handler: bool = flag(False,
        "On SIGTERM or SIGUSR1 to any rank: save at the end of the iteration, and leave with 0.")
    exit_signal: Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"] = flag("SIGTERM",
        "One more signal that does so.", idle_without="--exit-signal-handler")
    exit_duration_in_mins: float | None = flag(None,
        "Save and leave at the end of the first iteration after so many minutes.", POSITIVE,
        unset="never")
    kill_switch_path: Path | None = flag(None,
        "Save and leave at the end of the iteration in which this file appears.", unset="none")
    trigger_path: Path | None = flag(None,
        "Folder to look into after every iteration: a file 'save' there lets the run save, a file "
        "'exit' lets it save and leave. Both are removed.", unset="none")
    no_check_for_nan_in_loss_and_grad: bool = flag(False,
        "Take no step where the loss or the gradient norm is not finite, and go on; otherwise the "
        "run ends there, naming rank and samples.")
    check_for_spiky_loss: bool = flag(False,
        "Tell of every loss that is 10 times the largest so far of this launch, with its samples.")
    iterations_to_skip: tuple[str, ...] = flag((),
        "Iterations, as the log counts them, whose samples are passed over without a step.",
        unset="none", metavar="N ...")
    hang_seconds: float | None = flag(None,
        "Seconds without progress of any rank after which the job ends, naming the stuck ones.",
        POSITIVE, unset="half of --distributed-timeout-minutes")
    log_straggler: bool = flag(False,
        "Time the passes of one iteration of every printed line, and tell which ranks are slow.")
