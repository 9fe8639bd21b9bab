"""Dropout masks that depend on layer and microbatch, not on the rank that runs them."""

import torch

from megatron.layers.seeds import stable_seed


def seed_dropout(seed: int, iteration: int, microbatch: int, layer: int) -> None:
    """Seed PyTorch's default generators for one forward pass through one layer.

    It is called before every layer while training with dropout. The masks then do not depend on
    the number of pipeline ranks or on the order in which a schedule runs the passes.
    ``torch.manual_seed`` would do the same, but it asks every backend and takes ten times as long.

    Args:
        seed: the seed of the run.
        iteration: training iteration.
        microbatch: number of the microbatch within the global batch.
        layer: global index of the layer; -1 stands for the embedding.
    """
    value = stable_seed(seed, "dropout", iteration, microbatch, layer)
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value)  # of the current device, the rank's own
