"""Dropout masks that depend on their place in the run, not on the rank that draws them.

Every use of dropout seeds the generators for itself. So a mask depends neither on the number of
ranks nor on the order in which a schedule runs the passes, and a layer that is computed again drops
the same.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from megatron.layers.seeds import stable_seed


@dataclass(frozen=True)
class DropoutSeeds:
    """The place in a run of one forward pass through one layer.

    Attributes:
        seed: of the run.
        iteration: training iteration.
        microbatch: number of the microbatch within the global batch.
        layer: index of the layer in the whole model; -1 stands for the embedding.
    """

    seed: int
    iteration: int
    microbatch: int
    layer: int

    def begin(self, use: str, shard: int = 0) -> None:
        """Seed PyTorch's default generators for one use of dropout in the layer.

        ``torch.manual_seed`` would do the same, but it asks every backend and takes ten times as
        long.

        Args:
            use: name of the use, such as ``attention``.
            shard: number of this rank's part of what is dropped, if ranks draw different parts.
        """
        value = stable_seed(
            self.seed, "dropout", self.iteration, self.microbatch, self.layer, use, shard
        )
        torch.default_generator.manual_seed(value)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(value)  # of the current device, the rank's own


def dropout(x: Tensor, probability: float, seeds: DropoutSeeds | None, use: str) -> Tensor:
    """Return ``x`` with some elements dropped and the others scaled up.

    Args:
        x: of any shape.
        probability: of dropping an element.
        seeds: place in the run; ``None``: nothing is dropped, as outside of training.
        use: see ``DropoutSeeds.begin``.
    """
    if seeds is None or not probability:
        return x
    seeds.begin(use)
    return functional.dropout(x, probability)
