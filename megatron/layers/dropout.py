"""Dropout masks that depend on their place in the run, not on the rank that draws them.

Every use of dropout seeds the generators for itself. So a mask depends neither on the number of
ranks nor on the order in which a schedule runs the passes, and a recomputed layer has the same
mask. (Dropout inside attention is an exception: its mask depends on the number of ranks, and of
slices.)
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from megatron.layers.seeds import stable_seed
from megatron.layers.site import Site
from megatron.layers.slices import SequenceSlice


@dataclass(frozen=True)
class DropoutSeeds:
    """The place in a run of one forward pass through one layer.

    Attributes:
        seed: of the run.
        iteration: training iteration.
        microbatch: number of the microbatch within the global batch.
        layer: index of the layer in the whole model; -1 stands for the embedding.
        part: the slice of every sample that the pass is of; ``None``: the samples are whole.
    """

    seed: int
    iteration: int
    microbatch: int
    layer: int = -1
    part: SequenceSlice | None = None

    def begin_attention(self, site: Site) -> None:
        """Seed the dropout of attention, for this rank's heads and tokens."""
        use = "attention" if self.part is None else f"attention from {self.part.first} on"
        self.begin(use, site.context.rank * site.tensor.size + site.tensor.rank)

    def begin(self, use: str, shard: int = 0) -> None:
        """Seed PyTorch's default generators for one use of dropout in the layer.

        ``torch.manual_seed`` would do the same, but it asks every backend and takes ten times as
        long.

        Args:
            use: name of the use, such as ``attention``.
            shard: index of this rank's part, if ranks draw different parts of a mask.
        """
        value = stable_seed(
            self.seed, "dropout", self.iteration, self.microbatch, self.layer, use, shard
        )
        torch.default_generator.manual_seed(value)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(value)  # for the current device, which is the rank's


def dropout(
    x: Tensor, probability: float, seeds: DropoutSeeds | None, use: str, site: Site
) -> Tensor:
    """Return ``x`` with some elements dropped and the others scaled up.

    Args:
        x: of any shape. If ranks share the tokens of a sample, [b, u, h] with u tokens per sample.
        probability: probability that an element is dropped, below 1.
        seeds: place in the run; ``None``: nothing is dropped, as outside of training.
        use: name of the use, see ``DropoutSeeds.begin``.
        site: says how many ranks share the tokens of a sample.
    """
    if seeds is None or not probability:
        return x
    seeds.begin(use)
    if site.tensor.sequence_parts * site.context.size == 1 and seeds.part is None:
        return _dropped(x, probability)
    return x * _own_mask(x, probability, site, seeds.part) * (1 / (1 - probability))


def _dropped(x: Tensor, probability: float) -> Tensor:
    """Return ``x`` with some elements dropped and the others scaled up.

    On a GPU both branches launch the same kernel. On the meta device, which counts a GPU's work,
    the first branch would count the operations of a CPU.
    """
    if x.is_cpu:
        return functional.dropout(x, probability)
    return torch.native_dropout(x, probability, True)[0]


def _own_mask(x_buh: Tensor, probability: float, site: Site, part: SequenceSlice | None) -> Tensor:
    """Return this rank's part [b, u, h] of the mask of all tokens: True for elements that stay.

    Every rank draws the whole mask, in every slice, because a generator's numbers depend on the
    size of the drawn tensor. With n slices the whole mask costs t c n times the time of this rank's
    part, and takes memory for a moment.
    """
    return own_noise(
        x_buh, lambda b, s, h: _dropped(x_buh.new_ones(b, s, h), probability), site, part
    ).ne(0)


def own_noise(
    x_buh: Tensor,
    draw: Callable[[int, int, int], Tensor],
    site: Site,
    part: SequenceSlice | None,
) -> Tensor:
    """Return this rank's part [b, u, h] of random numbers for all tokens of a microbatch.

    Args:
        x_buh: gives the shape of the part.
        draw: returns the numbers for all tokens, given their shape [b, s, h].
        site: says which ranks share the tokens of a sample.
        part: the slice that the tokens are in; ``None``: the samples are whole.
    """
    b, u, h = x_buh.shape
    if part is None:
        all_bsh = draw(b, u * site.tensor.sequence_parts * site.context.size, h)
    else:
        all_bsh = draw(b, part.length, h)[:, part.first : part.end]
    return site.tensor.own_tokens(site.context.own_tokens(all_bsh))
