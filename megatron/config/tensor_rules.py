"""The rules about tensor parallelism: what its ranks share is cut evenly."""

from collections.abc import Iterator
from dataclasses import fields
from typing import TypeVar

from megatron.config.declare import Flags
from megatron.config.flags import ModelFlags, ParallelFlags
from megatron.config.layer_flags import LayerFlags
from megatron.config.resolve import model_config
from megatron.model.config import ModelConfig
from megatron.model.cut_faults import faults_of_cut

Group = TypeVar("Group", ModelFlags, LayerFlags)


def _cuts(flags: Flags) -> Iterator[str]:
    ranks, sequence = _size(flags), flags[ParallelFlags].sequence_parallel
    if ranks == 1:
        return
    try:
        model = sound_model(flags)
    except ValueError:  # another rule tells it
        return
    yield from faults_of_cut(model, ranks, sequence_parallel=sequence)
    if model.hidden_size % ranks:  # unless the width of a head is given, heads see to it
        yield (
            f"--tensor-model-parallel-size {ranks} does not divide --hidden-size "
            f"{model.hidden_size}: activations travel in as many parts, so choose a multiple of "
            f"{ranks}, or fewer ranks"
        )


def sound_model(flags: Flags) -> ModelConfig:
    """Return the model that flags ask for, but for its vocabulary; for rules.

    Raises:
        ValueError: they ask for none.
    """
    model, layers = _whole(ModelFlags, flags[ModelFlags]), _whole(LayerFlags, flags[LayerFlags])
    return model_config(flags.replaced(model, layers), vocab_size=1)


def _whole(kind: type[Group], group: Group) -> Group:
    """Return a group of flags all of which are sound; a rule that reads another one ends there."""
    return kind(**{field.name: getattr(group, field.name) for field in fields(kind)})


def _no_parts(flags: Flags) -> Iterator[str]:
    if flags[ParallelFlags].sequence_parallel and _size(flags) == 1:
        yield (
            "--sequence-parallel changes nothing at --tensor-model-parallel-size 1: the sequence "
            "is split over tensor-parallel ranks"
        )


def _size(flags: Flags) -> int:
    return flags[ParallelFlags].tensor_model_parallel_size


TENSOR_RULES = (_cuts,)
TENSOR_NOTES = (_no_parts,)
