"""The flags that make the model of a run of Megatron-LM, from the arguments that it saved."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

from megatron.flags.tree import declared_in
from megatron.layers.experts.settings import BalanceSettings, ExpertSettings
from megatron.model.settings import ModelSettings

_RUN: Final = ("--micro-batch-size", "1", "--train-iters", "1", "--lr", "1", "--dry-run")
"""Flags that every run must have, and that do not change its model."""


_TYPES: Final = ("--bf16", "--fp16")
"""A dry run must have one of these flags."""


_OPPOSITES: Final = {"--disable-bias-linear": "add_bias_linear"}
"""For each flag of ours that says the opposite of an argument of Megatron-LM, the argument."""


_OF_EXPERTS: Final = {*declared_in(ExpertSettings), *declared_in(BalanceSettings)}


def words_of_megatron(saved: Mapping[str, Any], given: Sequence[str]) -> list[str]:
    """Return a command line that makes the model of a run of Megatron-LM.

    Args:
        saved: arguments of the run by name. A flag without an argument has its default.
        given: words of our command line, which count in place of the saved arguments.

    Raises:
        ValueError: the model has experts.
    """
    if saved.get("num_experts"):
        raise ValueError(
            f"num_experts {saved['num_experts']}: a mixture of experts, which cannot be "
            "converted yet"
        )
    options = {word.split("=")[0] for word in given}
    words = [*_RUN, *given]
    if options.isdisjoint(_TYPES):
        words.append(_TYPES[0])
    for option, value in _saved_flags(saved):
        if option not in options:
            words += [option] if value is True else [option, str(value)]
    return words


def _saved_flags(saved: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield our flags whose saved values differ from our defaults, with these values.

    Arguments about experts say nothing here, because the model has none.
    """
    dense = [own for name, own in declared_in(ModelSettings).items() if name not in _OF_EXPERTS]
    for own in chain.from_iterable(dense):
        value = saved.get(own.option.removeprefix("--").replace("-", "_"))
        if own.option in _OPPOSITES and _OPPOSITES[own.option] in saved:
            value = not saved[_OPPOSITES[own.option]]
        if isinstance(value, (tuple, list)):
            value = ",".join(map(str, value))
        is_word = isinstance(value, (bool, int, float, str))
        if is_word and value is not False and value != own.default:
            yield own.option, value
    size = saved.get("vocab_size") or saved.get("padded_vocab_size")
    if size is not None:
        yield "--vocab-size", size
