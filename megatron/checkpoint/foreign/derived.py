"""Tensors of a folder that hold nothing of their own: copies, and tables that follow from sizes.

None of them is read past without a comparison. A copy of the embedding that differs from the
embedding is an output matrix of its own. A table that differs is refused.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from megatron.checkpoint.foreign.layouts import ForeignError, Table
from megatron.checkpoint.foreign.tensor_files import StoredTensor
from megatron.layers.rope_scaling import plain_frequencies
from megatron.model.ownership import OUTPUT_LAYER, WORD_EMBEDDINGS
from megatron.model.settings import ModelSettings

Follows = Callable[[Tensor, ModelSettings], bool]
"""Returns whether a stored table is the table that follows from a model's sizes."""

Read = Callable[[str], Tensor]
"""Returns a tensor by its name."""


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same elements, where NaN equals NaN.

    Tensors of different dtypes are compared in a dtype that holds the elements of both.
    """
    if one.shape != other.shape:
        return False
    dtype = torch.promote_types(one.dtype, other.dtype)
    return torch.equal(_bits(one.to(dtype)), _bits(other.to(dtype)))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def is_rotation(table: Tensor, model: ModelSettings) -> bool:
    """Return whether a table holds RoPE's frequencies, scaled or not.

    The frequencies may have been rounded to 16 bits before they were stored.
    """
    positions = model.positions
    pairs = int(model.attention.kv_channels * positions.rotary_percent) // 2
    base = positions.rotary_base
    scaling = model.rope_scaling.scaling(model.seq_length)
    plain_r = plain_frequencies(base, pairs)
    wanted = [plain_r, plain_r / positions.rotary_seq_len_interpolation_factor]
    if scaling is not None:
        wanted.append(scaling.frequencies(base, pairs))
    found = table.double().flatten()
    return any(
        found.shape == right.shape and torch.allclose(found, right, rtol=2**-7, atol=1e-7)
        for right in wanted
    )


def is_causal_mask(table: Tensor, model: ModelSettings) -> bool:
    """Return whether a table is 1 where a position sees another, and 0 elsewhere."""
    positions = table.shape[-1]
    if table.numel() != positions**2:
        return False
    wanted = torch.ones(positions, positions, dtype=table.dtype).tril()
    return torch.equal(table.view(positions, positions), wanted)


def is_score_of_hidden(table: Tensor, model: ModelSettings) -> bool:
    """Return whether a table is the one number that scores of hidden positions have."""
    return table.numel() == 1 and table.item() <= _HIDDEN


_HIDDEN: Final = -9984.0
"""The score -10000 of hidden positions in GPT-2's files, as bf16 rounds it; some have less."""


def check_tables(
    model: ModelSettings,
    tables: Mapping[str, Follows],
    stored: Mapping[str, StoredTensor],
    read: Read,
) -> None:
    """Refuse a table that does not follow from its model.

    Args:
        model: the model.
        tables: for each ending of a table's name, its check.
        stored: tables of a folder by their names.
        read: reads one of them.

    Raises:
        ForeignError: a table differs; the message names it, its file and the way out.
    """
    for name, where in stored.items():
        follows = next(check for ending, check in tables.items() if name.endswith(ending))
        if not follows(read(name), model):
            raise ForeignError(
                f"{where.file}: {name} is a table that follows from config.json, and the stored "
                "one differs: mend config.json (such as rope_theta), or save the model without "
                "the table"
            )


def untied(
    model: ModelSettings, table: Table, known: Mapping[str, StoredTensor], read: Read
) -> tuple[ModelSettings, set[str], list[str]]:
    """Compare a tied output matrix, where files have one, with the embedding.

    Args:
        model: the model that ``config.json`` tells of.
        table: table of the family.
        known: all tensors by name.
        read: returns a tensor by its name.

    Returns:
        The model, whose embedding is not tied if its files have another output matrix; the names
        of copies of the embedding; and a note for the user if the model is changed.

    Raises:
        ForeignError: a copy of the output matrix differs from the embedding, and the output matrix
            does not.
    """
    output, *copies = table[OUTPUT_LAYER].names_in(model)
    found = [name for name in (output, *copies) if name in known]
    embedding = table[WORD_EMBEDDINGS].names[0]
    if not model.vocabulary.tie_embeddings or not found or embedding not in known:
        return model, set(), []
    wanted = read(embedding)
    differing = [name for name in found if not same_numbers(read(name), wanted)]
    if not differing:
        return model, set(found), []
    if output not in differing:
        first = differing[0]
        raise ForeignError(
            f"{known[first].file}: {first} differs from {embedding}, to which tie_word_embeddings "
            "of config.json ties it"
        )
    note = (
        f"{output} differs from {embedding}, although config.json has tie_word_embeddings true: "
        "both are imported, and the model is untied (--untie-embeddings-and-output-weights)"
    )
    return model.replaced(tie_embeddings=False), set(), [note]


def told_of(model: ModelSettings, folder: Path) -> list[str]:
    """Return notes on what an imported model computes otherwise than ``transformers``."""
    original, factor = (
        model.rope_scaling.original_max_position_embeddings,
        model.rope_scaling.rotary_scaling_factor,
    )
    if model.rope_scaling.rope_type == "longrope":
        return [
            f"{folder / 'config.json'} scales RoPE by longrope. Here --seq-length decides whether "
            f"all samples count as long ones, of more than {original} tokens, and in transformers "
            "the length of each text does: logits of texts on the other side then differ"
        ]
    if model.rope_scaling.rope_type != "dynamic" or factor == 1:
        return []
    return [
        f"{folder / 'config.json'} scales RoPE dynamically. In samples of more than {original} "
        "tokens theta follows --seq-length here, and in transformers the length of each text: "
        f"logits of shorter texts than --seq-length then differ. Up to {original} tokens both are "
        "equal"
    ]
