"""SmolLM 3: Llama in which every fourth layer does not rotate queries and keys."""

from typing import Any, Final

from megatron.checkpoint.foreign.family import (
    Values,
    biases,
    layer_types,
    llama_like,
    windows,
    written_biases,
    written_window,
)
from megatron.checkpoint.foreign.fields import Fields
from megatron.checkpoint.foreign.llama import (
    NORMS,
    check_no_windows,
    common_fields,
    written_fields,
)
from megatron.layers.patterns import LayerPattern
from megatron.model.settings import ModelSettings

_BASE: Final = 2_000_000


def _read(c: Fields) -> Values:
    common = common_fields(
        Fields({"tie_word_embeddings": True} | dict(c.all), c.origin), groups=4, base=_BASE
    )
    layers = common["num_layers"]
    rotates = _rotating(c, layers)
    plain = tuple(1 - entry for entry in rotates)
    common |= biases(c) | {"no_rope_freq": LayerPattern(listed=plain)}
    if not c.truth("use_sliding_window", False):
        check_no_windows(c, layers)
        return common
    size = c.whole_or_none("sliding_window", None)
    if size is None:
        check_no_windows(c, layers)
    return common | windows(c, size, list(plain))


def _rotating(c: Fields, layers: int) -> list[int]:
    """Return for every layer 1 (it rotates) or 0."""
    given: Any = c.any("no_rope_layers", None)
    if given is None:
        period = c.whole("no_rope_layer_interval", 4)
        return [int((layer + 1) % period != 0) for layer in range(layers)]
    right = isinstance(given, list) and len(given) >= layers
    if not right or any(type(entry) is not int or entry not in (0, 1) for entry in given):
        raise c.fault("no_rope_layers", f"0 or 1 for each of {layers} layers (num_hidden_layers)")
    return list(given[:layers])


def _write(model: ModelSettings) -> Values:
    window = written_window(model)
    return (
        written_fields(model)
        | written_biases(model)
        | {
            "no_rope_layers": [int(model.positions.rotates(i)) for i in range(model.num_layers)],
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "layer_types": layer_types(model),
            "pad_token_id": None,  # by default a token that smaller vocabularies lack
        }
    )


SMOLLM3: Final = llama_like("smollm3", "SmolLM3", NORMS, _read, _write)
