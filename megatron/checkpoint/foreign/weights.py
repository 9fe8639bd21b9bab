"""Writes imported weights as a checkpoint of this program."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from torch import Tensor

from megatron.checkpoint import storage
from megatron.checkpoint.boxed import StreamedTensor
from megatron.checkpoint.foreign.layouts import ForeignError
from megatron.checkpoint.saved_model import stored
from megatron.checkpoint.saved_tokenizer import SavedTokenizer
from megatron.data.tokenizers.settings import TokenizerSettings
from megatron.model.settings import ModelSettings
from megatron.parallel.groups import ConnectedAxis

Advance = Callable[[int], None]
"""Called with the number of bytes that were converted since its last call."""

_ALONE: Final = ConnectedAxis("world", 0, (0,))


def write_weights(
    root: Path,
    model: ModelSettings,
    tensors: Mapping[str, StreamedTensor],
    used: TokenizerSettings | None = None,
) -> Path:
    """Write a checkpoint of iteration 0 that has weights only, as ``--finetune`` loads it.

    Args:
        root: folder of checkpoints.
        model: configuration of the model.
        tensors: tensors by their names in a checkpoint; they are made one after the other.
        used: the model's tokenizer, whose files are copied; ``None``: it is not known.

    Returns:
        The folder of the checkpoint.

    Raises:
        SaveError: the checkpoint was not written, or its tokenizer not copied.
    """
    common = {
        "iteration": 0,
        "consumed_samples": 0,
        "optimizer_steps": 0,
        "has_optimizer": False,
        "model": stored(model),
        "plan": "",
    }
    saved = None if used is None else SavedTokenizer.of(used)
    if saved is None or used is None:
        return storage.write(root, 0, tensors, common, _ALONE)
    where = storage.write(root, 0, tensors, common | saved.stored, _ALONE)
    try:
        saved.copy(root, used)
    except OSError as error:
        raise storage.SaveError(f"{where} has no tokenizer beside it: {error}") from error
    return where


def check_finite(tensor: Tensor, where: str) -> None:
    """Refuse weights that are NaN or infinite, because every loss would be NaN.

    Args:
        tensor: weights.
        where: file and name of the tensor, for the message.

    Raises:
        ForeignError: an element is NaN or infinite.
    """
    if all(bound.isfinite() for bound in tensor.aminmax()):  # needs no second tensor
        return
    nans, infinities = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    raise ForeignError(
        f"{where} has {nans:,} NaN and {infinities:,} infinite of {tensor.numel():,} elements, and "
        "a model with them has no finite loss: take a sound file, or import the tensor as it is "
        "with --allow-not-finite"
    )
