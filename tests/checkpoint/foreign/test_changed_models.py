"""After a change of any field of a model, its export computes the same logits, or it is refused.

``transformers`` is the reference of what an exported folder computes. Models that no flags make do
not count. Every field is changed in every family. Families of which a field has the same other
values share these out, so that every value is tried in some of them.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch

pytest.importorskip("transformers", reason="the reference: pip install transformers")

from checkpoint.foreign.changed_fields import CLOSE, config_of, told_by_training

from megatron.checkpoint.boxed import StreamedTensor
from megatron.checkpoint.choose import choose
from megatron.checkpoint.foreign.families import FAMILIES, family_of
from megatron.checkpoint.foreign.fields import Fields
from megatron.checkpoint.foreign.hugging_face import open_model, plan_export
from megatron.checkpoint.foreign.layouts import ForeignError, tensor_shapes
from megatron.checkpoint.foreign.same_models import OF_TRAINING
from megatron.checkpoint.foreign.weights import write_weights
from megatron.flags.tree import declared_in, values_of
from megatron.layers.patterns import LayerPattern
from megatron.model.settings import ModelSettings
from tools.conversions_table import CONFIGS, loaded_model, run_logits, some_tokens, their_logits

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers are none of ours

_WORDS: Final[dict[str, tuple[Any, ...]]] = {
    "position_embedding_type": ("rope", "learned_absolute", "alibi", "none"),
    "rope_type": ("rope", "yarn", "dynamic"),
    "softmax_type": ("vanilla", "off-by-one", "learnable"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "moe_router_score_function": ("softmax", "sigmoid"),
    "window_size": (3, None),
    "activation": (
        *("gelu", "exact_gelu", "relu", "swiglu", "squared_relu", "geglu", "quick_geglu"),
    ),
    "window_attn_skip_freq": (LayerPattern(every=2), None),
    "no_rope_freq": (LayerPattern(listed=(1, 0)),),
    "moe_layer_freq": (LayerPattern(every=2), LayerPattern(listed=(0, 1)), LayerPattern(every=1)),
    "softmax_scale": (0.3, None),
    "rotary_base_local": (500, None),
    "q_lora_rank": (6, None),
    "latent_norm_epsilon": (1e-3, None),
    "activation_func_clamp_value": (1.0, None),
    "moe_router_group_best": (1, 2, None),
    "mscale": (0.0, 0.5),
    "mscale_all_dim": (0.0, 0.5),
}
_OF_WORDS: Final = (
    *("group_query_attention", "query_pre_attn_scalar", "scale_embeddings_by_hidden_size"),
)
"""Fields of command lines, of which other fields of a model follow."""

FIELDS: Final = [
    name
    for name in ("vocab_size", *declared_in(ModelSettings))
    if name not in (*OF_TRAINING, *_OF_WORDS) and name not in ("seq_length", "mtp_num_layers")
]


def values(field: str, value: Any) -> Iterator[Any]:
    """Yield other values of a field; numbers are even where ``transformers`` needs it."""
    if field in _WORDS:
        yield from (other for other in _WORDS[field] if other != value)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from {value + 2, 2 * value, max(value // 4 * 2, 1)} - {value}
    elif isinstance(value, float):
        yield from {0.5 * value, 2 * value, 1.0, 0.0} - {value}


def fault_of(model: ModelSettings, family: str, folder: Path) -> str | None:
    """Return a line on what is wrong with the export of a model; ``None``: nothing."""
    if told_by_training(model):
        return None
    streamed = {
        f"weight.{name}": StreamedTensor(shape, torch.float32, partial(weight, shape, number))
        for number, (name, shape) in enumerate(tensor_shapes(model).items())
    }
    write_weights(folder / "ours", model, streamed)
    where, again = choose(folder / "ours", None), folder / "theirs"
    try:
        plan_export(where, lambda _: None, family).write(again, 1 << 30)
    except ForeignError as error:
        told = str(error)  # names fields of the model, or a field of config.json
        named = "has no such model: " in told or any(name in told for name in FIELDS)
        return None if named else f"refused without a name: {told}"
    chosen = FAMILIES[family]
    if chosen.config_of(open_model(again, model.seq_length).model) != chosen.config_of(model):
        return "imported as another model"
    tokens, theirs = some_tokens() % model.vocab_size, loaded_model(again)
    in_fp32, own = their_logits(theirs, tokens), run_logits(where, tokens)
    if (off := (in_fp32 - own).abs().max()) < CLOSE:
        return None
    rounding = (their_logits(theirs.double(), tokens) - in_fp32).abs().max()
    return None if off < 2 * rounding else f"exported logits: {off:.3g}, rounding {rounding:.3g}"


def weight(shape: tuple[int, ...], number: int) -> torch.Tensor:
    """Return the weights of a tensor."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(number))
    return noise * 1.5 / shape[-1] ** 0.5 if len(shape) > 1 else 1 + 0.2 * noise


@cache
def named_model(family: str) -> tuple[str, ModelSettings]:
    """Return what the program calls a family, and the model that is changed."""
    config = Fields(config_of(family), "config.json")
    chosen = family_of(config)
    return chosen.name, chosen.model_of(config, 20)


@cache
def others_of(field: str) -> Mapping[str, Sequence[Any]]:
    """Return the values of a field to which each family's own is changed."""
    models = {family: named_model(family)[1] for family in CONFIGS}
    return {family: [*values(field, values_of(own)[field])] for family, own in models.items()}


def tried(family: str, field: str) -> Sequence[Any]:
    """Return those of a family's other values that are tried in it."""
    others = others_of(field)
    sharing = [own for own in CONFIGS if others[own] == others[family]]
    parts = max(1, min(len(others[family]), len(sharing)))
    return others[family][sharing.index(family) % parts :: parts]


@pytest.mark.parametrize("field", FIELDS)
def test_every_other_value_is_tried_in_a_family_that_has_it(field: str) -> None:
    others = others_of(field)
    for own in others.values():
        sharing = [family for family in CONFIGS if others[family] == own]
        found = [value for family in sharing for value in tried(family, field)]
        assert all(value in found for value in own)


@pytest.mark.one_in(65)
@pytest.mark.parametrize(("family", "field"), [(one, f) for one in CONFIGS for f in FIELDS])
def test_an_export_is_right_or_the_field_is_named(
    family: str, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # half of the time, and nothing is kept
    name, model = named_model(family)
    for number, value in enumerate(tried(family, field)):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert fault_of(model.replaced(**{field: value}), name, folder) is None, value
