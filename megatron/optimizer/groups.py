"""Groups of masters with the same rates: what one call of PyTorch's fused kernels updates."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron.optimizer.lr_schedule import Rates
from megatron.optimizer.mixed_precision import Master


@dataclass(frozen=True)
class Group:
    """Masters with the same rates.

    Attributes:
        masters: at least one.
        decays: whether their weights decay.
        in_vocabulary: whether they are of the vocabulary layers.
    """

    masters: tuple[Master, ...]
    decays: bool
    in_vocabulary: bool

    @property
    def weights(self) -> list[Tensor]:
        """In full precision."""
        return [master.weight for master in self.masters]

    @property
    def gradients(self) -> list[Tensor]:
        """Of the weights, as many."""
        return [master.gradient for master in self.masters]

    def lr(self, rates: Rates) -> float:
        """Return the learning rate of a step."""
        return rates.vocabulary_lr if self.in_vocabulary else rates.lr

    def weight_decay(self, rates: Rates) -> float:
        """Return the weight decay of a step."""
        return rates.weight_decay if self.decays else 0.0


def groups_of(masters: Sequence[Master]) -> list[Group]:
    """Return groups by whether masters decay, and whether they are of the vocabulary layers."""
    found: dict[tuple[bool, bool], list[Master]] = {}
    for master in masters:
        found.setdefault((master.part.weight_decay, master.in_vocabulary), []).append(master)
    return [Group(tuple(own), *key) for key, own in found.items()]
