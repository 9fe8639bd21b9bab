"""The keys of a configuration of torchtitan: defaults, equal flags, and which of them are known."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

Table = Mapping[str, Any]

DEFAULTS: Final[Mapping[str, Any]] = {
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

SAME: Final = {
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

IDLE: Final = frozenset(
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


class Keys:
    """The values of a configuration by key; keys that are left out have torchtitan's defaults.

    Args:
        table: the tables of a file.
        computed: keys and sections of which only a run would tell the values. ``EVERYTHING`` stands
            for all that the table lacks.

    Attributes:
        given: the values that stand in the table, by key.
    """

    def __init__(self, table: Table, computed: frozenset[str]) -> None:
        self.given = dict(_leaves(table))
        self._values = {**DEFAULTS, **self.given}
        self._computed = computed

    def get(self, key: str, otherwise: Any = None) -> Any:
        """Return the value of a key, or ``otherwise``."""
        return self._values.get(key, otherwise)

    def number(self, key: str, otherwise: int) -> int:
        """Return the whole number of a key.

        Raises:
            ValueError: it is no whole number.
        """
        value = self._values.get(key, otherwise)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{key} = {value!r}: must be a whole number")
        return value

    def real(self, key: str) -> float:
        """Return the finite number of a key.

        Raises:
            ValueError: it is none.
        """
        try:
            value = float(self._values[key])
        except (TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(f"{key} = {self._values[key]!r}: must be a number")
        return value

    def are_known(self, *keys: str) -> bool:
        """Return whether no run computes any of these keys, nor may change one that is left out."""
        return all(
            key in self.given or self._computed.isdisjoint((key, key.partition(".")[0], EVERYTHING))
            for key in keys
        )


def _leaves(table: Table, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
