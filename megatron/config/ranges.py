"""The numbers each flag may take by itself, as one table."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

from megatron.config.flags import Flags


class _Range(NamedTuple):
    """Numbers a flag may take; NaN lies in none."""

    words: str
    contains: Callable[[float], bool]


_COUNT = _Range("at least 1 and finite", lambda x: 1 <= x < math.inf)
_POSITIVE = _Range("greater than 0 and finite", lambda x: 0 < x < math.inf)
_NOT_NEGATIVE = _Range("at least 0 and finite", lambda x: 0 <= x < math.inf)
_SHARE = _Range("at least 0 and below 1", lambda x: 0 <= x < 1)
_PERCENT = _Range("greater than 0 and at most 1", lambda x: 0 < x <= 1)

_RANGES: tuple[tuple[_Range, str], ...] = (
    (_COUNT, "num_layers hidden_size num_attention_heads seq_length max_position_embeddings"),
    (_COUNT, "ffn_hidden_size num_query_groups kv_channels rotary_base"),
    (_POSITIVE, "norm_epsilon"),
    (_NOT_NEGATIVE, "init_method_std z_loss_coeff logit_softcap"),
    (_SHARE, "attention_dropout hidden_dropout label_smoothing"),
    (_PERCENT, "rotary_percent"),
    (_COUNT, "pipeline_model_parallel_size tensor_model_parallel_size"),
    (_COUNT, "num_virtual_stages_per_pipeline_rank num_layers_per_virtual_pipeline_stage"),
    (_COUNT, "zero_bubble_max_pending_backward profile_schedule_start profile_schedule_end"),
    (_NOT_NEGATIVE, "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers"),
    (_NOT_NEGATIVE, "final_stage_num_layers"),
    (_COUNT, "make_vocab_size_divisible_by distributed_timeout_minutes"),
    (_COUNT, "micro_batch_size global_batch_size train_iters train_samples"),
    (_COUNT, "exit_interval eval_interval"),
    (_NOT_NEGATIVE, "eval_iters seed"),
    (_POSITIVE, "lr adam_eps"),
    (_NOT_NEGATIVE, "min_lr lr_warmup_init lr_warmup_iters lr_warmup_samples"),
    (_NOT_NEGATIVE, "weight_decay clip_grad"),
    (_COUNT, "lr_decay_iters lr_decay_samples"),
    (_SHARE, "lr_warmup_fraction adam_beta1 adam_beta2"),
    (_COUNT, "vocab_size log_interval profile_step_start profile_step_end"),
    (_POSITIVE, "peak_tflops"),
)


def check_ranges(flags: Flags) -> None:
    """Refuse the first number that lies outside its flag's range.

    Raises:
        ValueError: naming flag, value and range.
    """
    ranges = {name: allowed for allowed, names in _RANGES for name in names.split()}
    for group_field in dataclasses.fields(flags):
        group = getattr(flags, group_field.name)
        for field in dataclasses.fields(group):
            value, allowed = getattr(group, field.name), ranges.get(field.name)
            if allowed is not None and value is not None and not allowed.contains(value):
                flag = "--" + field.name.replace("_", "-")
                raise ValueError(f"{flag} {value}: must be {allowed.words}")
