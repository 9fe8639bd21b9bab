"""The model that flags make."""

from dataclasses import fields, replace
from typing import Any, Final

from megatron.flags.groups import Flags
from megatron.flags.tree import nodes_of
from megatron.layers.settings import (
    AttentionSettings,
)
from megatron.model.settings import (
    ModelSettings,
    ShapeSettings,
    completed,
)

MODEL_GROUPS: Final = (ShapeSettings, *nodes_of(ModelSettings).values())
"""The groups of flags that make a model, without its vocabulary."""


def model_of(flags: Flags, vocab_size: int) -> ModelSettings:
    """Return the model, with all widths and numbers of heads derived.

    Args:
        flags: flags of a command line.
        vocab_size: real vocabulary entries V.
    """
    nodes: dict[str, Any] = {name: flags[kind] for name, kind in nodes_of(ModelSettings).items()}
    attention = flags[AttentionSettings]
    if not attention.group_query_attention:
        groups = attention.num_attention_heads
        nodes["attention"] = replace(attention, num_query_groups=groups)
    shape = flags[ShapeSettings]
    sizes = {own.name: getattr(shape, own.name) for own in fields(ShapeSettings)}
    return completed(ModelSettings(**sizes, vocab_size=vocab_size, **nodes))


def sound_model(flags: Flags) -> ModelSettings:
    """Return the model that flags ask for, with a vocabulary of 1 entry; rules use the rest.

    Flags that contradict each other make a model too; rules about them report the mistake.
    """
    return model_of(flags, vocab_size=1)
