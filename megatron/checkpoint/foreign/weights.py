"""Writes imported weights as a checkpoint of ours."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

from megatron.checkpoint import storage
from megatron.checkpoint.boxed import StreamedTensor
from megatron.model.config import ModelConfig
from megatron.parallel.groups import ConnectedAxis

Advance = Callable[[int], None]
"""Is told the bytes that have been converted since it was last called."""

_ALONE: Final = ConnectedAxis("world", 0, (0,))


def write_weights(root: Path, model: ModelConfig, tensors: Mapping[str, StreamedTensor]) -> Path:
    """Write a checkpoint of iteration 0 that has weights only, as ``--finetune`` loads it.

    Args:
        root: folder of checkpoints.
        model: whose weights they are.
        tensors: under the names of checkpoints; made one after the other.

    Returns:
        The folder of the checkpoint.

    Raises:
        SaveError: it was not written.
    """
    common = {
        "iteration": 0,
        "consumed_samples": 0,
        "optimizer_steps": 0,
        "has_optimizer": False,
        "model": asdict(model),
        "plan": "",
    }
    return storage.write(root, 0, tensors, common, _ALONE)
