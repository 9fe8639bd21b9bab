"""Turns a saved model back into the flags that make it.

A saved model is the fields of ``ModelConfig``, or the arguments that Megatron-LM saved.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from megatron.checkpoint.foreign.same_models import OF_TRAINING
from megatron.config.balancing import BalancingFlags
from megatron.config.experts import ExpertFlags, is_about_experts, word_of_experts
from megatron.config.latent_attention import LatentFlags
from megatron.config.layer_patterns import words_of_pattern
from megatron.config.layers import LayerFlags
from megatron.config.model import ModelFlags
from megatron.config.rope_scaling import RopeScalingFlags
from megatron.flags.declare import option_of
from megatron.flags.groups import all_declarations

FREE: Final = frozenset({"seq_length", *OF_TRAINING}) - {"moe_router_in_fp32", "moe_router_in_fp64"}
"""Fields of ``ModelConfig`` that do not have to fit the weights."""


_OPPOSITES: Final = {
    "add_bias_linear": "--disable-bias-linear",
    "tie_embeddings": "--untie-embeddings-and-output-weights",
}
"""For each field that a flag turns off, the flag."""


_PATTERNS: Final = {
    "window_pattern": ("--window-attn-skip-freq", 0),
    "no_rope_pattern": ("--no-rope-freq", 1),
}
"""For each pattern of layers, its flag, and the entry of every N-th layer if the flag is N."""


_DENSE: Final = (ModelFlags, LayerFlags, LatentFlags, RopeScalingFlags)
_DECLARED: Final = all_declarations((*_DENSE, ExpertFlags, BalancingFlags))
"""The flags that make a model, without the flags of its vocabulary."""

Model = Mapping[str, Any]
"""The fields of a ``ModelConfig`` by name, as a checkpoint keeps them."""


def model_flags(model: Model) -> dict[str, list[str]]:
    """Return the flags that make a model, each with the words behind it.

    A flag with its default is left out. So is a field that this version has no flag for.
    """
    found: dict[str, list[str]] = {}
    for name in model:
        for option, value in _flags_of(name, model):
            if option not in _DECLARED or value is False or value is None:
                continue
            value = tuple(value) if isinstance(value, list) else value
            if value != _DECLARED[option].default:
                words = value if isinstance(value, (tuple, list)) else (value,)
                found[option] = [] if value is True else list(map(str, words))
    return found


def differences(saved: Model, own: Model) -> list[str]:
    """Return a line on each difference between two models that keeps them from sharing weights.

    Args:
        saved: the model of a checkpoint. A field that is missing in it does not count.
        own: the model of this run.
    """
    names = [name for name in own if name not in FREE and name in saved]
    both = [(_written(name, saved), _written(name, own)) for name in names]
    return [f"{there} there, {here} here" for there, here in both if there != here]


def differences_of_dense(saved: Model, own: Model) -> list[str]:
    """Return the ``differences`` between a dense model and a mixture that begins with its weights.

    Fields about experts do not count. The width of MLPs does not count if the mixture has no MLPs.
    """
    shared = {name: value for name, value in own.items() if not is_about_experts(name)}
    if all(own["moe_layer_pattern"]):
        del shared["ffn_hidden_size"]
    return differences(saved, shared)


def _written(name: str, model: Model) -> str:
    """Return the flags that decide a field, as they stand on a command line."""
    words, missing = [], []
    for option, value in _flags_of(name, model):
        if value is False or value is None:
            missing.append(f"no {option}")
        else:
            words.append(option if value is True else f"{option} {value}")
    return " ".join(words) or missing[0]


def _flags_of(name: str, model: Model) -> Iterator[tuple[str, Any]]:
    """Yield the flags that decide a field, with their values; ``None``: the flag is not given."""
    value = model[name]
    if name in _OPPOSITES:
        yield _OPPOSITES[name], not value
    elif name == "num_query_groups":
        grouped = value != model.get("num_attention_heads")
        yield "--group-query-attention", grouped
        yield option_of(name), value if grouped else None
    elif name == "window_size":
        yield option_of(name), None if value is None else f"{value},0"
    elif is_about_experts(name):
        yield word_of_experts(name, model)
    elif name == "rope_type":
        default = "yarn" if model.get("multi_latent_attention") else "rope"
        yield option_of(name), None if value == default else value
    elif name == "kv_channels":
        yield option_of(name), None if model.get("multi_latent_attention") else value
    elif name in _PATTERNS:
        option, last = _PATTERNS[name]
        yield option, _pattern_words(value, last)
    elif name == "vocab_size":  # the tokenizer decides it, with or without --vocab-size
        yield "a vocabulary of", value
    else:
        yield option_of(name), value


def _pattern_words(pattern: Sequence[int], last: int) -> str | None:
    """Return a pattern of layers in the form of its flag; ``None``: the flag is not given."""
    if not pattern:
        return None
    if list(pattern) == [1 - last] * (len(pattern) - 1) + [last]:
        return str(len(pattern))
    return words_of_pattern(pattern)


_RUN: Final = ("--micro-batch-size", "1", "--train-iters", "1", "--lr", "1", "--dry-run")
"""Flags that every run must have, and that do not change its model."""


_TYPES: Final = ("--bf16", "--fp16")
"""A dry run must have one of these flags."""


_SAVED_OPPOSITES: Final = {"disable_bias_linear": "add_bias_linear"}
"""For each flag of ours that says the opposite of an argument of Megatron-LM, the argument."""


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
    """Yield our flags whose saved values differ from our defaults, with these values."""
    for field in (field for group in _DENSE for field in fields(group)):
        value = saved.get(field.name)
        if field.name in _SAVED_OPPOSITES and _SAVED_OPPOSITES[field.name] in saved:
            value = not saved[_SAVED_OPPOSITES[field.name]]
        if isinstance(value, (tuple, list)):
            value = ",".join(map(str, value))
        is_word = isinstance(value, (bool, int, float, str))
        if is_word and value is not False and value != _DECLARED[option_of(field.name)].default:
            yield option_of(field.name), value
    size = saved.get("vocab_size") or saved.get("padded_vocab_size")
    if size is not None:
        yield "--vocab-size", size
