"""From a TOML file of torchtitan to flags. Keys that are left out have torchtitan's defaults.

Only the settings of the training are there: the sizes of the model stand in torchtitan's code under
the name and flavor that the file gives. ``--model`` tells them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from megatron.commands.launch_scripts.launches import USUAL, Ranks
from megatron.schedules.torch_csv import OF_TORCHTITAN

Table = Mapping[str, Any]

_DEFAULTS: Final[Mapping[str, Any]] = {
    "optimizer.name": "AdamW",
    "optimizer.lr": 8e-4,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.95,
    "optimizer.eps": 1e-8,
    "optimizer.weight_decay": 0.1,
    "lr_scheduler.warmup_steps": 200,
    "lr_scheduler.decay_type": "linear",
    "lr_scheduler.min_lr_factor": 0.0,
    "training.local_batch_size": 8,
    "training.seq_len": 2048,
    "training.max_norm": 1.0,
    "training.steps": 10_000,
}
"""Defaults of torchtitan that differ from Megatron-LM's, or that a run needs."""

EVERYTHING: Final = "*"
"""Stands among computed keys for all that a table lacks."""

_SAME: Final = {
    "optimizer.beta1": "--adam-beta1",
    "optimizer.beta2": "--adam-beta2",
    "optimizer.eps": "--adam-eps",
    "optimizer.weight_decay": "--weight-decay",
    "lr_scheduler.warmup_steps": "--lr-warmup-iters",
    "training.seq_len": "--seq-length",
    "training.max_norm": "--clip-grad",
    "training.steps": "--train-iters",
    "training.seed": "--seed",
    "metrics.log_freq": "--log-interval",
    "parallelism.tensor_parallel_degree": "--tensor-model-parallel-size",
    "parallelism.pipeline_parallel_degree": "--pipeline-model-parallel-size",
    "parallelism.context_parallel_degree": "--context-parallel-size",
    "parallelism.expert_parallel_degree": "--expert-model-parallel-size",
    "parallelism.expert_tensor_parallel_degree": "--expert-tensor-parallel-size",
    "parallelism.pipeline_parallel_schedule_csv": "--schedule-file",
}
"""Keys with the flag that takes their value."""

_OPTIONS: Final = {
    **_SAME,
    "optimizer.lr": "--lr",
    "training.local_batch_size": "--micro-batch-size",
    "training.global_batch_size": "--global-batch-size",
    "lr_scheduler.min_lr_factor": "--min-lr",
    "lr_scheduler.decay_type": "--lr-decay-style",
    "parallelism.pipeline_parallel_schedule": "--pipeline-schedule",
}
"""Keys with the flag that depends on them, and that takes one value."""

_IDLE: Final = frozenset(
    {
        *("hf_assets_path", "dump_folder", "dataloader.dataset", "dataloader.dataset_path"),
        *("job.description", "job.print_args", "job.config_file", "job.dump_folder"),
        *("training.dataset", "training.compile", "training.gc_freq", "training.gc_debug"),
        *("training.mixed_precision_reduce", "compile.enable", "compile.components"),
        *("model.print_after_conversion", "optimizer.implementation"),
        *("metrics.enable_tensorboard", "metrics.save_tb_folder", "metrics.enable_wandb"),
        *("metrics.disable_color_printing", "metrics.save_for_all_ranks"),
        *("parallelism.fsdp_reshard_after_forward", "parallelism.disable_loss_parallel"),
        *("parallelism.enable_async_tensor_parallel", "parallelism.enable_compiled_autograd"),
        *("checkpoint.enable", "checkpoint.enable_checkpoint", "checkpoint.async_mode"),
        "checkpoint.export_dtype",
    }
)
"""Keys that change nothing that is computed, or that this program decides by itself."""


@dataclass
class Translation:
    """A configuration as flags.

    Attributes:
        words: the flags with their values.
        notes: how keys were read.
        left: keys that were not translated, with their values.
        ranks: the processes.
    """

    words: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    ranks: Ranks = field(default_factory=lambda: Ranks(None, None))

    def add(self, *words: object) -> None:
        """Add a flag with its values."""
        self.words += map(str, words)


def is_torchtitan(table: Table) -> bool:
    """Return whether a table has the sections of a training of torchtitan."""
    return isinstance(table.get("model"), Mapping) and isinstance(table.get("training"), Mapping)


def translated(
    table: Table, *, has_model: bool, computed: frozenset[str] = frozenset()
) -> Translation:
    """Return the flags of a configuration of torchtitan.

    Args:
        table: the tables of the file.
        has_model: whether the user tells the sizes of the model.
        computed: keys and sections of which only a run would tell the values. Their flags are left
            out. ``EVERYTHING`` stands for all that the table lacks.

    Raises:
        ValueError: a size is no number.
    """
    keys = dict(_leaves(table))
    values = {**_DEFAULTS, **keys}
    found, done = Translation(), set(_DEFAULTS)
    for key, option in _SAME.items():
        if key in values and values[key] not in (None, ""):
            found.add(option, values[key])
            done.add(key)
    done |= set().union(
        _batch(values, found),
        _learning_rate(values, found),
        _pipeline(values, found),
        _others(values, found),
    )
    unknown = [
        own for own in _OPTIONS if not computed.isdisjoint((own, own.partition(".")[0], EVERYTHING))
    ]
    if "training.local_batch_size" in unknown:  # a batch that is not given is made of it
        unknown.append("training.global_batch_size")
    _leave_out(unknown, keys, found)
    taken = [f"{key} = {_DEFAULTS[key]}" for key in _DEFAULTS if key not in (*keys, *unknown)]
    if taken:
        found.notes.append(f"torchtitan's defaults: {', '.join(taken)}")
    name = f"{keys.get('model.name', '?')} {keys.get('model.flavor', '?')}"
    if not has_model:
        found.notes.append(
            f"the sizes of the model {name} stand in torchtitan's code: give --model config.json, "
            "the file of the same model in Hugging Face's form"
        )
    left = [key for key in keys if key not in done and key not in _IDLE and not _is_off(keys[key])]
    found.left += [f"{key} = {keys[key]!r}" for key in left if key.split(".")[0] != "profiling"]
    return found


def _leave_out(unknown: Sequence[str], keys: Table, found: Translation) -> None:
    """Leave out the flags of keys that only a run would tell."""
    left = []
    for key in unknown:
        option = _OPTIONS[key]
        if key not in keys and option in found.words:
            at = found.words.index(option)
            del found.words[at : at + 2]
            left.append(option)
    if left:
        found.notes.append(f"left out, because a run computes them: {', '.join(left)}")


def _leaves(table: Table, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _is_off(value: object) -> bool:
    return value is False or value in ("", [])


def _number(values: Table, key: str, otherwise: int) -> int:
    """Return the whole number of a key.

    Raises:
        ValueError: it is no whole number.
    """
    value = values.get(key, otherwise)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key} = {value!r}: must be a whole number")
    return value


def _batch(values: Table, found: Translation) -> set[str]:
    """Add the batch and the ranks."""
    where = "parallelism.data_parallel_"
    shard = _number(values, f"{where}shard_degree", -1)
    copies = _number(values, f"{where}replicate_degree", 1)
    axes = [_number(values, f"parallelism.{a}_parallel_degree", 1) for a in _AXES]
    local = _number(values, "training.local_batch_size", 8)
    whole = _number(values, "training.global_batch_size", -1)
    micro = local
    if axes[1] > 1:
        micro = _number(values, "parallelism.pipeline_parallel_microbatch_size", 1)
    found.add("--micro-batch-size", micro)
    if shard > 0:
        world = shard * copies * axes[0] * axes[1] * axes[2]
        found.ranks = Ranks(1, world) if world <= USUAL else Ranks(None, None, total=world)
    if whole > 0:
        found.add("--global-batch-size", whole)
    elif shard > 0:
        found.add("--global-batch-size", local * shard * copies)
    else:
        found.notes.append(
            f"the batch is local_batch_size {local} of every replica: add --global-batch-size "
            f"{local} x replicas to the line"
        )
    if shard != 1:
        found.add("--use-distributed-optimizer")
        found.notes.append(
            "data_parallel_shard_degree (FSDP): here states of the optimizer are sharded over all "
            "replicas (--use-distributed-optimizer), parameters and gradients are not"
        )
    names = ("shard_degree", "replicate_degree")
    return {
        *(f"{where}{name}" for name in names),
        "training.global_batch_size",
        "parallelism.pipeline_parallel_microbatch_size",
    }


_AXES: Final = ("tensor", "pipeline", "context")


def _learning_rate(values: Table, found: Translation) -> set[str]:
    rate, steps = values["optimizer.lr"], _number(values, "training.steps", 10_000)
    found.add("--lr", rate)
    found.add("--optimizer", "adam")
    if values["optimizer.name"] not in ("AdamW", "Adam"):
        found.left.append(f"optimizer.name = {values['optimizer.name']!r} (adam is taken)")
    factor, ratio = values["lr_scheduler.min_lr_factor"], values.get("lr_scheduler.decay_ratio")
    if factor:
        found.add("--min-lr", float(rate) * float(factor))
    kind = str(values["lr_scheduler.decay_type"])
    if ratio is None:
        found.add("--lr-decay-style", "cosine" if kind == "cosine" else "linear")
        if kind == "sqrt":
            found.left.append("lr_scheduler.decay_type = 'sqrt' (linear is taken)")
    else:
        style = "minus_sqrt" if kind == "sqrt" else kind
        iterations = max(1, round(float(ratio) * steps))
        found.add("--lr-decay-style", "WSD", "--lr-wsd-decay-style", style)
        found.add("--lr-wsd-decay-iters", iterations)
    return {"lr_scheduler.decay_ratio"}


def _pipeline(values: Table, found: Translation) -> set[str]:
    key = "parallelism.pipeline_parallel_schedule"
    if _number(values, "parallelism.pipeline_parallel_degree", 1) > 1:
        name = str(values.get(key, "1F1B"))
        ours = OF_TORCHTITAN.get(name.lower())
        if ours is None:
            found.left.append(f"{key} = {name!r} (docs/coming-from.md names the nearest)")
        else:
            found.add("--pipeline-schedule", ours)
        found.notes.append(
            "stages: torchtitan gives the first and the last one a layer less, if no key says "
            "otherwise; here they are equal, or --layer-distribution says"
        )
    return {
        key,
        "parallelism.pipeline_parallel_first_stage_less_layers",
        "parallelism.pipeline_parallel_last_stage_less_layers",
        "parallelism.pipeline_parallel_layers_per_stage",
    }


def _others(values: Table, found: Translation) -> set[str]:
    """Add precision, recomputation, sequence parallelism and checkpoints."""
    if values.get("training.mixed_precision_param", "bfloat16") == "bfloat16":
        found.add("--bf16")
    mode = values.get("activation_checkpoint.mode", "selective")
    if mode == "full":
        found.add("--recompute-granularity", "full", "--recompute-method", "uniform")
        found.add("--recompute-num-layers", 1)
    elif mode == "selective":
        found.add("--recompute-activations")
        found.notes.append(
            "activation_checkpoint.mode selective: only attention is computed again here"
        )
    if _number(values, "parallelism.tensor_parallel_degree", 1) > 1:
        found.add("--sequence-parallel")
    if values.get("checkpoint.enable", values.get("checkpoint.enable_checkpoint")):
        folder = values.get("checkpoint.folder", "checkpoint")
        found.add("--save", folder, "--load", folder)
        found.add("--save-interval", values.get("checkpoint.interval", 500))
    return {
        *("model.name", "model.flavor", "model.tokenizer_path", "model.hf_assets_path"),
        *("training.mixed_precision_param", "checkpoint.folder", "checkpoint.interval"),
        *("activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"),
    }
