"""From a TOML file of torchtitan to flags. Keys that are left out have torchtitan's defaults.

Only the settings of the training are there: the sizes of the model stand in torchtitan's code under
the name and flavor that the file gives. ``--model`` tells them. A flag that depends on a key which
only a run would tell is left out, and so is a note about it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from megatron.foreign.launches import USUAL, Ranks
from megatron.foreign.torchtitan_keys import DEFAULTS, IDLE, SAME, Keys, Table
from megatron.schedules.torch_csv import OF_TORCHTITAN

_RATE: Final = "optimizer.lr"
_STEPS: Final = "training.steps"
_LOCAL: Final = "training.local_batch_size"
_WHOLE: Final = "training.global_batch_size"
_MODE: Final = "activation_checkpoint.mode"
_SHARD: Final = "parallelism.data_parallel_shard_degree"
_COPIES: Final = "parallelism.data_parallel_replicate_degree"
_AXES: Final = tuple(f"parallelism.{a}_parallel_degree" for a in ("tensor", "pipeline", "context"))
_PIPELINE: Final = _AXES[1]
_MICRO: Final = "parallelism.pipeline_parallel_microbatch_size"


@dataclass
class Translation:
    """A configuration as flags.

    Attributes:
        words: the flags with their values.
        notes: how keys were read.
        left: keys that were not translated, with their values.
        ranks: the processes.
        unknown: flags that were left out, because only a run would tell their keys.
    """

    words: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    ranks: Ranks = field(default_factory=lambda: Ranks(None, None))
    unknown: list[str] = field(default_factory=list)

    def add(self, option: str, *values: object, known: bool = True) -> None:
        """Add a flag with its values, if they are ``known``; else tell that it is left out."""
        if known:
            self.words += map(str, (option, *values))
        else:
            self.unknown.append(option)


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
        computed: keys and sections of which only a run would tell the values. Flags that depend on
            them are left out. ``EVERYTHING`` stands for all that the table lacks.

    Raises:
        ValueError: a size is no number.
    """
    keys = Keys(table, computed)
    found, done = Translation(), set(DEFAULTS)
    for key, option in SAME.items():
        if keys.get(key) not in (None, ""):
            found.add(option, keys.get(key), known=keys.are_known(key))
            done.add(key)
    done |= set().union(
        _batch(keys, found),
        _learning_rate(keys, found),
        _pipeline(keys, found),
        _others(keys, found),
    )
    if found.unknown:
        found.notes.append(f"left out, because a run computes them: {', '.join(found.unknown)}")
    left_out = (key for key in DEFAULTS if key not in keys.given and keys.are_known(key))
    if taken := [f"{key} = {DEFAULTS[key]}" for key in left_out]:
        found.notes.append(f"torchtitan's defaults: {', '.join(taken)}")
    given = keys.given
    name = f"{given.get('model.name', '?')} {given.get('model.flavor', '?')}"
    if not has_model:
        found.notes.append(
            f"the sizes of the model {name} stand in torchtitan's code: give --model config.json, "
            "the file of the same model in Hugging Face's form"
        )
    left = [key for key in given if key not in done and key not in IDLE and not _is_off(given[key])]
    found.left += [f"{key} = {given[key]!r}" for key in left if key.split(".")[0] != "profiling"]
    return found


def _is_off(value: object) -> bool:
    return value is False or value in ("", [])


def _batch(keys: Keys, found: Translation) -> set[str]:
    """Add the batch and the ranks."""
    shard, copies = keys.number(_SHARD, -1), keys.number(_COPIES, 1)
    degrees = [keys.number(axis, 1) for axis in _AXES]
    local, whole = keys.number(_LOCAL, 8), keys.number(_WHOLE, -1)
    cuts = degrees[1] > 1
    micro, of = (keys.number(_MICRO, 1), _MICRO) if cuts else (local, _LOCAL)
    found.add("--micro-batch-size", micro, known=keys.are_known(_PIPELINE, of))
    if shard > 0 and keys.are_known(_SHARD, _COPIES, *_AXES):
        world = shard * copies * degrees[0] * degrees[1] * degrees[2]
        found.ranks = Ranks(1, world) if world <= USUAL else Ranks(None, None, total=world)
    if whole > 0:
        found.add("--global-batch-size", whole)
    elif shard > 0 or not keys.are_known(_WHOLE, _LOCAL, _SHARD, _COPIES):
        known = keys.are_known(_WHOLE, _LOCAL, _SHARD, _COPIES)
        found.add("--global-batch-size", local * shard * copies, known=known)
    else:
        found.notes.append(
            f"the batch is local_batch_size {local} of every replica: add --global-batch-size "
            f"{local} x replicas to the line"
        )
    if shard != 1:
        found.add("--use-distributed-optimizer", known=keys.are_known(_SHARD))
    if shard != 1 and keys.are_known(_SHARD):
        found.notes.append(
            "data_parallel_shard_degree (FSDP): here states of the optimizer are sharded over all "
            "replicas (--use-distributed-optimizer), parameters and gradients are not"
        )
    return {_SHARD, _COPIES, _WHOLE, _MICRO}


def _learning_rate(keys: Keys, found: Translation) -> set[str]:
    rate, name = keys.get(_RATE), keys.get("optimizer.name")
    found.add("--lr", rate, known=keys.are_known(_RATE))
    found.add("--optimizer", "adam", known=keys.are_known("optimizer.name"))
    if name not in ("AdamW", "Adam"):
        found.left.append(f"optimizer.name = {name!r} (adam is taken)")
    least = "lr_scheduler.min_lr_factor"
    if keys.get(least):
        known = keys.are_known(_RATE, least)
        found.add("--min-lr", keys.real(_RATE) * keys.real(least) if known else 0, known=known)
    _decay(keys, found)
    return {"lr_scheduler.decay_ratio"}


def _decay(keys: Keys, found: Translation) -> None:
    shape, share = "lr_scheduler.decay_type", "lr_scheduler.decay_ratio"
    kind, ratio = str(keys.get(shape)), keys.get(share)
    steps = keys.number(_STEPS, 10_000)
    known = keys.are_known(shape, share)
    if ratio is None:
        found.add("--lr-decay-style", "cosine" if kind == "cosine" else "linear", known=known)
        if kind == "sqrt" and known:
            found.left.append("lr_scheduler.decay_type = 'sqrt' (linear is taken)")
        return
    found.add("--lr-decay-style", "WSD")
    style = "minus_sqrt" if kind == "sqrt" else kind
    found.add("--lr-wsd-decay-style", style, known=keys.are_known(shape))
    iterations = max(1, round(keys.real(share) * steps))
    found.add("--lr-wsd-decay-iters", iterations, known=keys.are_known(_STEPS))


def _pipeline(keys: Keys, found: Translation) -> set[str]:
    key = "parallelism.pipeline_parallel_schedule"
    if keys.number(_PIPELINE, 1) > 1:
        name = str(keys.get(key, "1F1B"))
        ours = OF_TORCHTITAN.get(name.lower())
        if ours is None:
            found.left.append(f"{key} = {name!r} (docs/coming-from.md names the nearest)")
        else:
            found.add("--pipeline-schedule", ours, known=keys.are_known(key))
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


def _others(keys: Keys, found: Translation) -> set[str]:
    """Add precision, recomputation, sequence parallelism and checkpoints."""
    number = "training.mixed_precision_param"
    if keys.get(number, "bfloat16") == "bfloat16":
        found.add("--bf16", known=keys.are_known(number))
    _recomputation(keys, found)
    if keys.number(_AXES[0], 1) > 1:
        found.add("--sequence-parallel")
    _checkpoints(keys, found)
    return {
        *("model.name", "model.flavor", "model.tokenizer_path", "model.hf_assets_path"),
        *("training.mixed_precision_param", "checkpoint.folder", "checkpoint.interval"),
        *("activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"),
    }


def _recomputation(keys: Keys, found: Translation) -> None:
    mode, known = keys.get(_MODE, "selective"), keys.are_known(_MODE)
    if mode == "full":
        found.add("--recompute-granularity", "full")
        found.add("--recompute-method", "uniform")
        found.add("--recompute-num-layers", 1)
    elif mode == "selective":
        found.add("--recompute-activations", known=known)
        if known:
            found.notes.append(
                "activation_checkpoint.mode selective: only attention is computed again here"
            )


def _checkpoints(keys: Keys, found: Translation) -> None:
    if not keys.get("checkpoint.enable", keys.get("checkpoint.enable_checkpoint")):
        return
    where, every = "checkpoint.folder", "checkpoint.interval"
    for option in ("--save", "--load"):
        found.add(option, keys.get(where, "checkpoint"), known=keys.are_known(where))
    found.add("--save-interval", keys.get(every, 500), known=keys.are_known(every))
