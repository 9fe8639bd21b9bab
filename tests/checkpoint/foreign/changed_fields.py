"""Changes of single fields of a ``config.json``, and a comparison of both programs after each.

The reference is the model that ``transformers`` makes of the changed ``config.json``, with random
weights.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from megatron.checkpoint.choose import choose
from megatron.checkpoint.foreign.families import family_of
from megatron.checkpoint.foreign.fields import Fields
from megatron.checkpoint.foreign.hugging_face import CONFIG, import_model, open_model, plan_export
from megatron.checkpoint.foreign.layouts import ForeignError
from megatron.checkpoint.saved_model import differences, stored
from megatron.model.settings import ModelSettings
from megatron.run.command_line import parse
from megatron.run.megatron_words import words_of_megatron
from tools.conversions_table import (
    CONFIGS,
    loaded_model,
    random_model_of,
    run_logits,
    some_tokens,
    their_logits,
)

CLOSE: Final = 1e-4
"""Largest difference of two logits in fp32; they are of the order of 10."""

LEFT_OUT: Final = object()
"""The value of a field that is left out."""

_LENGTH: Final = 20
_OTHERS_FIELDS: Final = {
    *("architectures", "model_type", "transformers_version", "dtype"),
    *("full_attention", "sliding_attention"),
}
"""Fields that choose the class or the precision of a model, and fields within other fields."""

_ACTIVATIONS: Final = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "nonsense")
_LINEAR: Final = {"rope_type": "linear", "factor": 4.0}
_DYNAMIC: Final = {"rope_type": "dynamic", "factor": 4.0}
_YARN: Final = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA_3: Final = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_ROPES: Final[tuple[Any, ...]] = (
    {},
    {"rope_type": "default"},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "linear", "factor": 1.5},
    {"rope_type": "longrope", "factor": 2.0},
    {"rope_type": None},
    {"rope_theta": 500.0, "rope_type": "default"},
    *(
        kind | more
        for kind in (_LINEAR, _DYNAMIC, _YARN, _LLAMA_3)
        for more in (
            {},
            {"mscale_all_dim": 0.7},
            {"mscale": 0.5, "mscale_all_dim": 0.7},
            {"mscale": None, "mscale_all_dim": 0.7},
            {"mscale": 0, "mscale_all_dim": 0.7},
            {"mscale": 0.5},
            {"partial_rotary_factor": 0.5},
            {"rope_theta": 700.0},
            {"attention_factor": 1.3},
        )
    ),
    *(
        _YARN | more
        for more in (
            {"truncate": False},
            {"truncate": None},
            {"beta_fast": 2.0, "beta_slow": 0.5},
            {"beta_fast": 0, "beta_slow": None},
            {"beta_fast": 1.0, "beta_slow": 3.0},
            {"factor": None},
            {"factor": 1.0},
            {"factor": 0.5},
            {"original_max_position_embeddings": None},
            {"attention_factor": 1.1386294361119891},
        )
    ),
)
_OLDER: Final[dict[str, tuple[Any, ...]]] = {
    "rope_parameters": _ROPES,
    "full_attention": _ROPES,
    "sliding_attention": (_LINEAR, {"rope_theta": 700.0}, {}),
    "rope_scaling": (_LINEAR, _DYNAMIC, _YARN | {"mscale": 0.5}, {}),
    "rope_theta": (500.0, 1000, 10000.5, 0, "10000"),
    "partial_rotary_factor": (0.5, 1, 1.0, 0),
    "rope_local_base_freq": (500.0, 10000.5),
    "sliding_window_pattern": (2, 1, 100, 0, None),
    "layer_types": ("reversed", "sliding", "full", "other"),
    "hidden_act": _ACTIVATIONS,
    "hidden_activation": _ACTIVATIONS,
    "activation_function": _ACTIVATIONS,
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "clip_qkv": (0, 0.5, None),
    "num_local_experts": (0, 1, 4),
    "qkv_bias": (True, False),
    "use_sliding_window": (True, False),
    "sliding_window": (0, 1, 2, 5, 4096, None),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc", "nonsense"),
    "scoring_func": ("softmax", "sigmoid"),
    "mlp_only_layers": ([0], [0, 1, 2, 3], [9], [-1], None),
    "n_group": (1, 2, 3, 4, 5, 8, 0, None),
    "topk_group": (1, 2, 3, 4, 5, 0, None),
    "num_experts_per_tok": (1, 2, 3, 4, 5, 6, 8, 9, 0),
    "moe_layer_freq": (1, 2),
    "use_bidirectional_attention": (True, False, None),
    "original_max_position_embeddings": (16, 32),
}
"""Values of fields that are tried beside those that follow from a field's kind."""

_ANYWHERE: Final = (
    *("rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"),
    *("layer_types", "sliding_window", "use_sliding_window", "sliding_window_pattern"),
    *("rope_local_base_freq", "num_local_experts", "attention_bias", "hidden_act", "clip_qkv"),
    *("scoring_func", "moe_layer_freq", "mlp_bias"),
)
"""Fields of other families and of older files, which are tried in every family."""


@dataclass(frozen=True)
class Change:
    """Another value of one field.

    Attributes:
        path: name of the field, and of the field that holds it, if one does.
        value: the value, or ``LEFT_OUT``.
    """

    path: tuple[str, ...]
    value: Any

    def __str__(self) -> str:
        words = "left out" if self.value is LEFT_OUT else json.dumps(self.value)
        return f"{'.'.join(self.path)}: {words}"

    def of(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return a configuration with the change."""
        first, *rest = self.path
        if rest:
            inner = Change(tuple(rest), self.value).of(config[first])
            return config | {first: inner}
        if self.value is LEFT_OUT:
            return {name: value for name, value in config.items() if name != first}
        return config | {first: self.value}


def config_of(family: str) -> dict[str, Any]:
    """Return the ``config.json`` of a family's model that is to be changed."""
    kind, values = CONFIGS[family]
    found: dict[str, Any] = json.loads(getattr(transformers, kind)(**values).to_json_string())
    return found


def changes(family: str) -> dict[str, list[Change]]:
    """Return for every field the changes of its value alone."""
    config = config_of(family)
    aliases = getattr(transformers, CONFIGS[family][0]).attribute_map
    names = [n for n in dict.fromkeys([*config, *_ANYWHERE, *aliases]) if n not in _OTHERS_FIELDS]
    return {
        name: list(
            _distinct(_changes((name,), config.get(aliases.get(name, name), LEFT_OUT), config))
        )
        for name in names
    }


def _distinct(found: Iterator[Change]) -> Iterator[Change]:
    seen = set()
    for change in found:
        if str(change) not in seen:
            seen.add(str(change))
            yield change


def _changes(path: tuple[str, ...], value: Any, config: dict[str, Any]) -> Iterator[Change]:
    if value is not LEFT_OUT:
        yield Change(path, LEFT_OUT)
        yield Change(path, None)
    for other in _OLDER.get(path[-1], ()):
        if path[-1] == "layer_types":
            other = _layer_types(other, config)
        if other != value or type(other) is not type(value):
            yield Change(path, other)
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _changes((*path, name), inner, config)
    else:
        for other in _others(value):
            yield Change(path, other)


def _layer_types(word: str, config: dict[str, Any]) -> Any:
    layers = config.get("num_hidden_layers", 3)
    own = config.get("layer_types") or ["sliding_attention"] + ["full_attention"] * (layers - 1)
    return {
        "reversed": own[::-1],
        "sliding": ["sliding_attention"] * layers,
        "full": ["full_attention"] * layers,
        "other": ["chunked_attention"] * layers,
    }[word]


def _others(value: Any) -> Iterator[Any]:
    match value:
        case bool():
            yield not value
        case int():
            yield from (value + 1, 2 * value, max(value // 2, 1), 1, 0, -1)
        case float():
            yield from (2 * value + 0.125, value / 2, 0.0, -1.0, 1)
        case str():
            yield "nonsense"
        case list():
            yield from (value[::-1], [])
        case None:
            yield from (1, 0, 0.5, True)


def tokens_of(config: dict[str, Any]) -> torch.Tensor:
    """Return tokens that the vocabulary has."""
    return some_tokens(_LENGTH) % int(config.get("vocab_size", 99))


class Comparison:
    """Compares both programs after changes of a family's ``config.json``.

    Args:
        family: name of the family among ``CONFIGS``.
    """

    def __init__(self, family: str) -> None:
        self._config = config_of(family)
        self._right: dict[ModelSettings, torch.Tensor] = {}

    def fault_of(self, change: Change, folder: Path) -> str | None:
        """Return a line on what is wrong after a change; ``None``: right, or refused by name.

        Args:
            change: the change.
            folder: an empty folder for files.
        """
        config = change.of(self._config)
        try:
            fields = Fields(config, CONFIG)
            model = family_of(fields).model_of(fields, _LENGTH)
        except ForeignError as error:
            return _named(str(error), change, self._config["model_type"])
        (folder / CONFIG).write_text(json.dumps(config))
        try:
            theirs = random_model_of(transformers.AutoConfig.from_pretrained(folder))
            wanted = their_logits(theirs, tokens_of(config))
        except Exception:  # whatever transformers does not take has no right value
            return told_by_training(model) or None
        if model in self._right and torch.equal(self._right[model], wanted):
            return None  # the same program on the same weights
        theirs.save_pretrained(folder)
        (folder / CONFIG).write_text(json.dumps(config))
        try:
            fault = _fault(folder, wanted, tokens_of(config))
        except ForeignError as error:
            return _named(str(error), change, self._config["model_type"])
        if fault is None:
            self._right[model] = wanted
        return fault


_LEARNED: Final = {"gpt2": "n_positions", "opt": "max_position_embeddings"}
"""The field of the number of learned positions, by ``model_type``."""


def _fault(theirs: Path, wanted: torch.Tensor, tokens: torch.Tensor) -> str | None:
    """Import a folder and export it again; return what is wrong.

    Raises:
        ForeignError: the folder is not imported.
    """
    opened = open_model(theirs, _LENGTH)
    import_model(opened, theirs / "ours", lambda _: None)
    where, again = choose(theirs / "ours", None), theirs / "again"
    if off := _apart(run_logits(where, tokens), wanted, lambda: _exact(theirs, tokens)):
        return f"imported logits: {off}"
    if told := told_by_training(opened.model):
        return told
    family = family_of(Fields.read(theirs / CONFIG)).name
    try:
        plan_export(where, lambda _: None, family).write(again, 1 << 30)
    except ForeignError as error:
        return f"imported and not exported: {error}"
    if off := _apart(
        their_logits(loaded_model(again), tokens), wanted, lambda: _exact(theirs, tokens)
    ):
        return f"exported logits: {off}"
    if open_model(again, _LENGTH).model != opened.model:
        return "imported again as another model"
    return None


def _named(message: str, change: Change, kind: str) -> str | None:
    learned = _LEARNED.get(kind)
    if "is less than --seq-length" in message and learned is None:
        return f"RoPE and ALiBi have no last position, and the import says: {message}"
    if any(part in message for part in (*change.path, learned or change.path[0])):
        return None
    return f"refused without its name: {message}"


def told_by_training(model: ModelSettings) -> str:
    """Return how the model of the flags that an import prints differs; "" if it does not."""
    words = [word for option, own in model.flags().items() for word in (option, *own)]
    given = ["--vocab-size", str(model.vocab_size), "--make-vocab-size-divisible-by", "1"]
    try:
        made = parse(words_of_megatron({}, [*given, *words]), 1, speak=False).model
    except ValueError as error:
        return f"imported, and training says: {error}"
    return "; ".join(differences(stored(model), made))


def _exact(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of ``transformers`` in float64."""
    return their_logits(loaded_model(folder).double(), tokens)


def _apart(ours: torch.Tensor, theirs: torch.Tensor, exact: Callable[[], torch.Tensor]) -> str:
    """Return how far logits are apart; "": no further than rounding takes them."""
    if not theirs.isfinite().all():
        return "" if not ours.isfinite().all() else "theirs are not finite"
    largest = float((ours - theirs).abs().max())
    if largest < CLOSE or largest < 2 * float((theirs - exact()).abs().max()):
        return ""
    return f"{largest:.3g} of {theirs.abs().max():.3g}"
