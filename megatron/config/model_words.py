"""The flags that make a certain model: the way back from ``ModelConfig`` to a command line."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from megatron.config.declare import option_of
from megatron.config.flags import DECLARED

FREE: Final = frozenset(
    {
        "seq_length",
        "attention_dropout",
        "hidden_dropout",
        "init_method_std",
        "label_smoothing",
        "z_loss_coeff",
        "mtp_loss_scaling_factor",
    }
)
"""Fields of ``ModelConfig`` that may change under the same weights."""

_OPPOSITES: Final = {
    "add_bias_linear": "--disable-bias-linear",
    "tie_embeddings": "--untie-embeddings-and-output-weights",
}
"""Flags that turn a field off."""

_PATTERNS: Final = {
    "window_pattern": ("--window-attn-skip-freq", 0),
    "no_rope_pattern": ("--no-rope-freq", 1),
}
"""Patterns of layers: their flags, and what an N-th layer has where these give a number."""

Model = Mapping[str, Any]
"""The fields of a ``ModelConfig`` by name, as a checkpoint keeps them."""


def model_flags(model: Model) -> dict[str, list[str]]:
    """Return the flags that make a model, each with the words behind it.

    What has its default is left out, and so is what this version has no flag for.

    Args:
        model: its fields.
    """
    declared = DECLARED
    found: dict[str, list[str]] = {}
    for name in model:
        for option, value in _flags_of(name, model):
            if option not in declared or value is False or value is None:
                continue
            if value != declared[option].default:
                found[option] = [] if value is True else [str(value)]
    return found


def differences(saved: Model, own: Model) -> list[str]:
    """Return the flags in which two models differ that cannot have the same weights.

    Args:
        saved: the model of a checkpoint; what it does not say does not differ.
        own: the model of this run.
    """
    names = [name for name in own if name not in FREE and name in saved]
    both = [(_written(name, saved), _written(name, own)) for name in names]
    return [f"{there} there, {here} here" for there, here in both if there != here]


def _written(name: str, model: Model) -> str:
    """Return the flags that decide a field as on a command line."""
    words, missing = [], []
    for option, value in _flags_of(name, model):
        if value is False or value is None:
            missing.append(f"no {option}")
        else:
            words.append(option if value is True else f"{option} {value}")
    return " ".join(words) or missing[0]


def _flags_of(name: str, model: Model) -> Iterator[tuple[str, Any]]:
    """Yield the flags that decide a field, and their values; ``None``: not given."""
    value = model[name]
    if name in _OPPOSITES:
        yield _OPPOSITES[name], not value
    elif name == "num_query_groups":
        grouped = value != model.get("num_attention_heads")
        yield "--group-query-attention", grouped
        yield option_of(name), value if grouped else None
    elif name == "window_size":
        yield option_of(name), None if value is None else f"{value},0"
    elif name in _PATTERNS:
        option, last = _PATTERNS[name]
        yield option, _pattern_words(value, last)
    elif name == "vocab_size":  # the tokenizer decides it, with or without --vocab-size
        yield "a vocabulary of", value
    else:
        yield option_of(name), value


def _pattern_words(pattern: Sequence[int], last: int) -> str | None:
    """Return a pattern of layers as its flag takes it; ``None``: it is not given."""
    if not pattern:
        return None
    if list(pattern) == [1 - last] * (len(pattern) - 1) + [last]:
        return str(len(pattern))
    return f"[{','.join(map(str, pattern))}]"
