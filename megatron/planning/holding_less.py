"""Changes of a run that hold less memory and take little time, with their flags.

The advice tries them on the run's own schedule. A further change is a function and a row here.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias

import torch

from megatron.config.precision import NARROW_SUMS
from megatron.config.run_config import RunConfig
from megatron.layers.recompute import PARTS, Part
from megatron.model.settings import ModelSettings

Change: TypeAlias = Callable[[RunConfig], tuple[str, RunConfig] | None]
"""Returns the flags of a change and the changed run; ``None``: the run has it, or cannot."""


def with_logits_again(config: RunConfig) -> tuple[str, RunConfig] | None:
    """Compute logits again: a rank then holds none of them from S to T."""
    if config.train.vocab_recompute:
        return None
    train = replace(config.train, vocab_recompute=True)
    return "--vocab-recompute", replace(config, train=train)


def with_narrow_sums(config: RunConfig) -> tuple[str, RunConfig] | None:
    """Add gradients up in bf16, which halves their memory, and rounds every sum."""
    train = config.train
    is_wide = train.gradient_dtype == torch.float32 and train.dtype != torch.float32
    if not is_wide or train.skip_train or config.optimizer.optimizer != "adam":
        return None
    return NARROW_SUMS, replace(config, train=replace(train, gradient_dtype=torch.bfloat16))


def with_ring(config: RunConfig) -> tuple[str, RunConfig] | None:
    """Pass keys on along a ring: a rank then keeps its own ones, and not those of all ranks."""
    parallel = config.parallel
    is_gathered = parallel.context_size > 1 and parallel.context_exchange == "all_gather"
    if not is_gathered or parallel.num_seq_splits > 1 or config.model.attention.attention_dropout:
        return None
    return "--cp-comm-type p2p", replace(config, parallel=replace(parallel, context_exchange="p2p"))


def with_parts_again(
    parts: Callable[[ModelSettings], tuple[Part, ...]], config: RunConfig
) -> tuple[str, RunConfig] | None:
    """Compute parts of a layer again that have no product, beside those of the run."""
    again = config.train.recomputation
    wanted = again.parts.union(parts(config.model))
    if again.group or wanted == again.parts:
        return None
    named = " ".join(part for part in PARTS if part in wanted)
    train = replace(config.train, recomputation=replace(again, parts=wanted))
    flags = f"--recompute-activations --recompute-modules {named}"
    return flags, replace(config, train=train)


def _norms(model: ModelSettings) -> tuple[Part, ...]:
    return ("layernorm",)


def _norms_and_activations(model: ModelSettings) -> tuple[Part, ...]:
    """Return the norms, and the activation functions that such a model has."""
    mixtures = list(map(model.experts.in_layer, range(model.num_layers)))
    has_mlp = not all(mixtures) or model.experts.moe_shared_expert_intermediate_size > 0
    found: list[Part] = ["layernorm"]
    if has_mlp and model.mlp.activation != "squared_relu":
        found.append("mlp_act")
    if any(mixtures):
        found.append("moe_act")
    return tuple(found)


_NORMS: Final[Change] = partial(with_parts_again, _norms)
_ACTIVATIONS: Final[Change] = partial(with_parts_again, _norms_and_activations)

CHANGES: Final[tuple[tuple[Change, ...], ...]] = (
    (with_logits_again,),
    (with_narrow_sums,),
    (with_ring,),
    (_NORMS,),
    (_ACTIVATIONS,),
    (with_narrow_sums, _NORMS),
    (with_narrow_sums, _ACTIVATIONS),
)
"""Every row is tried together."""


def holding_less(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yield the flags of every row of ``CHANGES`` that a run can have, and the changed run."""
    seen = set[str]()
    for row in CHANGES:
        words, changed = list[str](), config
        for change in row:
            found = change(changed)
            if found is None:
                break
            words.append(found[0])
            changed = found[1]
        flags = " ".join(words)
        if len(words) == len(row) and flags not in seen:
            seen.add(flags)
            yield flags, changed
