"""Tensors of a checkpoint of Megatron-Core that no tensor of ours is made of: none is lost."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from megatron.checkpoint.foreign.core_reader import CoreReader, CoreTensor
from megatron.checkpoint.foreign.derived import same_numbers
from megatron.checkpoint.foreign.layouts import ForeignError, without_number
from megatron.model.ownership import LAYERS, OUTPUT_LAYER, WORD_EMBEDDINGS
from megatron.model.settings import ModelSettings
from megatron.parallel.box import Box

_NO_WEIGHT: Final = re.compile(r"(^|\.)optimizer\.|(^|[./])_extra_state|^rng_state|^rerun_state")
"""Names of tensors that training needs and a model does not."""


def check_rest(reader: CoreReader, found: Mapping[str, CoreTensor], model: ModelSettings) -> None:
    """Refuse weights of a checkpoint for which a model has no use.

    Args:
        reader: reader of their checkpoint.
        found: where our tensors lie in it.
        model: the model.

    Raises:
        ForeignError: their checkpoint has another tensor or more layers, or an output matrix that
            differs from the embedding to which the model ties it.
    """
    used = {tensor.name for tensor in found.values()}
    rest = {name for name in reader.tensors if name not in used and not _NO_WEIGHT.search(name)}
    if model.vocabulary.tie_embeddings and OUTPUT_LAYER in rest:
        _check_copy(reader, found[WORD_EMBEDDINGS])
        rest.remove(OUTPUT_LAYER)
    if rest:
        raise ForeignError(
            f"{reader.path} has a tensor {min(rest)}, for which the model has no use: give the "
            "flags of the model that was saved"
        )
    for name in sorted(used):
        stacked = name.startswith(LAYERS) and not without_number(name)[1].isdecimal()
        layers = reader.tensors[name].size[0]
        if stacked and layers != model.num_layers:
            raise ForeignError(
                f"{reader.path}: {name} has {layers} layers, and --num-layers is {model.num_layers}"
            )


def _check_copy(reader: CoreReader, embedding: CoreTensor) -> None:
    """Refuse an output matrix that differs from the embedding to which it is to be tied."""
    saved = reader.tensors[OUTPUT_LAYER]
    size, dtype = tuple(saved.size), saved.properties.dtype
    copy = replace(embedding, name=OUTPUT_LAYER, shape=size, dtype=dtype)
    same = embedding.box & Box.whole(size) == embedding.box and same_numbers(
        reader.read(copy, lambda _: None), reader.read(embedding, lambda _: None)
    )
    if not same:
        raise ForeignError(
            f"{reader.path}: {OUTPUT_LAYER} differs from {embedding.name}: the saved model is not "
            "tied; give --untie-embeddings-and-output-weights"
        )
