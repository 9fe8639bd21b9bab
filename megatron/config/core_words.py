"""The flags of a model that Megatron-LM has trained, from the arguments that it saved."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from megatron.config.declare import option_of
from megatron.config.flags import DECLARED, ModelFlags
from megatron.config.layer_flags import LayerFlags

_RUN: Final = ("--micro-batch-size", "1", "--train-iters", "1", "--lr", "1", "--dry-run")
"""Flags that every run must have, and that say nothing of its model."""

_TYPES: Final = ("--bf16", "--fp16")
"""One of them a dry run must have."""

_OPPOSITES: Final = {"disable_bias_linear": "add_bias_linear"}
"""Flags of ours whose argument there says the opposite."""


def words_of(saved: Mapping[str, Any], given: Sequence[str]) -> list[str]:
    """Return a command line that makes the model of a run of Megatron-LM.

    Args:
        saved: its arguments by name; what they do not say has its default.
        given: words of ours that count in place of what was saved.

    Raises:
        ValueError: the model has experts.
    """
    if saved.get("num_experts"):
        raise ValueError(
            f"num_experts {saved['num_experts']}: a mixture of experts, which this program does "
            "not train"
        )
    options = {word.split("=")[0] for word in given}
    words = [*_RUN, *given]
    if options.isdisjoint(_TYPES):
        words.append(_TYPES[0])
    for option, value in _told(saved):
        if option not in options:
            words += [option] if value is True else [option, str(value)]
    return words


def _told(saved: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the flags that differ from our defaults, and their values."""
    declared = DECLARED
    for field in [*fields(ModelFlags), *fields(LayerFlags)]:
        value = saved.get(field.name)
        if field.name in _OPPOSITES and _OPPOSITES[field.name] in saved:
            value = not saved[_OPPOSITES[field.name]]
        if isinstance(value, (tuple, list)):
            value = ",".join(map(str, value))
        is_word = isinstance(value, (bool, int, float, str))
        if is_word and value is not False and value != declared[option_of(field.name)].default:
            yield option_of(field.name), value
    size = saved.get("vocab_size") or saved.get("padded_vocab_size")
    if size is not None:
        yield "--vocab-size", size
