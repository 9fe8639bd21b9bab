"""A model as a checkpoint keeps it: its values by name, as plain data.

Checkpoints of versions before November 2026 have other names for some values; ``renewed`` reads
them too.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from megatron.checkpoint.foreign.same_models import OF_TRAINING
from megatron.flags.declare import option_of
from megatron.flags.tree import declared_in, told, values_of
from megatron.layers.experts.settings import BalanceSettings, ExpertSettings
from megatron.layers.patterns import LayerPattern
from megatron.model.settings import ModelSettings

Values = Mapping[str, Any]
"""Values of a ``ModelSettings`` by name."""

FREE: Final = frozenset({"seq_length", "group_query_attention", *OF_TRAINING}) - {
    "moe_router_dtype"
}
"""Values that do not have to fit the weights."""

_PATTERNS: Final = ("window_attn_skip_freq", "no_rope_freq", "moe_layer_freq")

_OFF_AT_ZERO: Final = frozenset(
    {"num_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"}
)
"""Widths and numbers that are 0 where no flag gives them."""

_KNOWN: Final = frozenset(("vocab_size", *declared_in(ModelSettings)))
_OF_EXPERTS: Final = frozenset((*declared_in(ExpertSettings), *declared_in(BalanceSettings)))


def stored(model: ModelSettings) -> dict[str, Any]:
    """Return a model as numbers, words, and tuples of them."""
    values = values_of(model)
    return values | {name: _words(values[name]) for name in _PATTERNS}


def _words(pattern: LayerPattern | None) -> str | None:
    return None if pattern is None else str(pattern)


def read_model(saved: Values, *, passes_over_unknown: bool = False) -> ModelSettings:
    """Return the model that a checkpoint keeps; a value that it lacks has its default.

    Args:
        saved: the values as the checkpoint keeps them.
        passes_over_unknown: whether names may stand there that this version does not know.

    Raises:
        ValueError: this version does not know a name.
        TypeError: a value is missing that has no default.
    """
    values = renewed(saved)
    unknown = sorted(values.keys() - _KNOWN)
    if passes_over_unknown:
        values = {name: value for name, value in values.items() if name in _KNOWN}
    elif unknown:
        raise ValueError(
            f"is of a model with {', '.join(unknown)}, which this version does not know"
        )
    return ModelSettings.of(**values)


def differences(saved: Values, own: ModelSettings) -> list[str]:
    """Return a line on each difference between two models that keeps them from sharing weights.

    Args:
        saved: the model of a checkpoint. A value that is missing in it does not count.
        own: the model of this run.
    """
    return _differences(saved, own, FREE)


def differences_of_dense(saved: Values, own: ModelSettings) -> list[str]:
    """Return the ``differences`` between a dense model and a mixture that begins with its weights.

    Values about experts do not count. The width of MLPs does not count if the mixture has no MLPs.
    """
    is_pure = all(map(own.experts.in_layer, range(own.num_layers)))
    return _differences(
        saved, own, FREE | _OF_EXPERTS | ({"ffn_hidden_size"} if is_pure else set())
    )


def _differences(saved: Values, own: ModelSettings, free: frozenset[str]) -> list[str]:
    known = {name: value for name, value in renewed(saved).items() if name in _KNOWN}
    both = [own.replaced(**known), own]
    there, here = map(values_of, both)
    names = [name for name in here if name in known.keys() - free and here[name] != there[name]]
    # A value that no flag of either model gives follows from other values, which differ too.
    decided = {
        name
        for name in names
        if name != "vocab_size" and not any(any(_flags(name, model)) for model in both)
    }
    if any(model.latent.multi_latent_attention for model in both):
        decided.add("kv_channels")
    if not any(model.attention.group_query_attention for model in both):
        decided.add("num_query_groups")
    return [
        f"{_told(name, both[0], own)} there, {_told(name, own, both[0])} here"
        for name in names
        if name not in decided
    ]


def _told(name: str, model: ModelSettings, other: ModelSettings) -> str:
    """Return the flags that give a field its value; if there are none, the flags that are missing.

    Args:
        name: the field's name.
        model: the model.
        other: another model, which has another value in this field.
    """
    value = values_of(model)[name]
    if name == "vocab_size":  # the tokenizer decides it, with or without --vocab-size
        return f"a vocabulary of {value}"
    if name == "num_query_groups":
        grouped = model.attention.group_query_attention
        option = "--group-query-attention"
        return f"{option} {option_of(name)} {value}" if grouped else f"no {option}"
    given = " ".join(_flags(name, model))
    options = (word.split()[0] for word in _flags(name, other))
    return given or " ".join(f"no {option}" for option in options)


def _flags(name: str, model: ModelSettings) -> Iterator[str]:
    """Yield the flags that give a field its value, but for a value that other fields decide."""
    value, declared = values_of(model)[name], declared_in(ModelSettings)[name]
    is_off = value == 0 and type(value) is int and name in _OFF_AT_ZERO
    is_quiet = not all(own.facts.is_told_if_derived for own in declared)
    if not is_off and not (is_quiet and model.replaced(**{name: None}) == model):
        yield from told(ModelSettings, name, value)


def renewed(saved: Values) -> dict[str, Any]:
    """Return the values of a checkpoint by today's names, as ``ModelSettings`` has them.

    Args:
        saved: the values as a checkpoint keeps them; some may be missing.
    """
    values: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in saved.items()
    }
    for name in _PATTERNS:
        if isinstance(values.get(name), str):
            values[name] = LayerPattern.read(values[name])
    return dict(_renewed(values))


def _renewed(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield values with today's names; see ``renewed``."""
    active = [name for name in _ACTIVATIONS if values.get(name)]
    if not _ACTIVATIONS.keys().isdisjoint(values):
        yield "activation", _ACTIVATIONS[active[0]] if active else "gelu"
    if not _ROUTER_TYPES.keys().isdisjoint(values):
        wide = [dtype for name, dtype in _ROUTER_TYPES.items() if values.get(name)]
        yield "moe_router_dtype", wide[-1] if wide else None
    for name, value in values.items():
        if name in _OLD_PATTERNS:
            yield _OLD_PATTERNS[name], LayerPattern(listed=value) if value else None
        elif name in _SINGLE and not isinstance(value, tuple):
            yield name, (value,)
        elif name in _GROUPS and value == 1 and values.get("moe_router_num_groups") == 1:
            yield name, None
        elif name not in _ACTIVATIONS and name not in _ROUTER_TYPES:
            yield name, value


_ACTIVATIONS: Final = {
    name: name for name in ("swiglu", "geglu", "quick_geglu", "squared_relu", "exact_gelu", "relu")
}
"""For each value of old checkpoints that was on for an activation function, the function.

Old checkpoints have none of the last two functions; models that are written in their words may.
"""

_ROUTER_TYPES: Final = {"moe_router_in_fp32": "fp32", "moe_router_in_fp64": "fp64"}

_OLD_PATTERNS: Final = {
    "window_pattern": "window_attn_skip_freq",
    "no_rope_pattern": "no_rope_freq",
    "moe_layer_pattern": "moe_layer_freq",
}
"""For each pattern of old checkpoints, which repeats over the layers, today's name."""

_SINGLE: Final = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
_GROUPS: Final = ("moe_router_num_groups", "moe_router_group_topk")
