"""The order in which experts see tokens: the first expert's tokens, then the second expert's, ...

A token that chooses k experts has k *slots*. ``spread`` copies tokens into their slots, and
``join`` adds the slots of every token up. Each is the adjoint of the other, so the backward of one
is the other. A later pass can form slots again from the tokens, which take k times less memory.

Shapes: b batch, s tokens of a sequence, k choices of a token, z = b s k slots, e experts, h any
width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.kernels.face import Kernels


class Order(NamedTuple):
    """Which token stands in which slot.

    Attributes:
        choice_z: int64, the choice in every slot: the token's index times k, plus the index of the
            choice among the token's k choices.
        slot_bsk: int64, the slot of every choice.
        ends: int32 [e], the end of every expert's slots: the index after its last slot. Usually
            on the device; on the host if the code that multiplies the slots needs that.
    """

    choice_z: Tensor
    slot_bsk: Tensor
    ends: Tensor

    @classmethod
    def by_expert(cls, experts_bsk: Tensor, experts: int, kernels: Kernels) -> "Order":
        """Return the order for given choices; the slots of an expert are in token order.

        Args:
            experts_bsk: int64, the experts that every token has chosen; a token's experts differ.
            experts: e.
            kernels: of the layer, here and below.
        """
        choice_z, slot_nk, ends = kernels.slots_by_expert(experts_bsk.flatten(0, 1), experts)
        return cls(choice_z, slot_nk.view(experts_bsk.shape), ends)

    def first(self, experts: int, slots: int) -> "Order":
        """Return the order of the first experts alone, which have the first slots.

        The other choices then have no slot; ``slot_bsk`` has numbers behind the last slot there.

        Args:
            experts: how many experts are left.
            slots: how many slots they have.
        """
        own_z = self.choice_z[:slots].clone()  # a view would keep the slots of all experts alive
        return Order(own_z, self.slot_bsk, self.ends[:experts])

    def known_to_host(self) -> "Order":
        """Return the order with ``ends`` on the host. The host waits for the device meanwhile."""
        return self._replace(ends=self.ends.cpu())

    @property
    def times(self) -> Tensor:
        """How many slots every expert has, int64 [e]."""
        return self.ends.diff(prepend=self.ends.new_zeros(1)).long()

    def spread(self, x_bsh: Tensor, kernels: Kernels) -> Tensor:
        """Return the token of every slot, [z, h]."""
        return kernels.spread(x_bsh.flatten(0, 1), self.choice_z, self.slot_bsk.shape[2])

    def join(self, y_zh: Tensor, kernels: Kernels) -> Tensor:
        """Return the sum of every token's slots, [b, s, h]."""
        sums_bsh: Tensor = kernels.join(y_zh, self.slot_bsk.flatten(0, 1)).unflatten(
            0, self.slot_bsk.shape[:2]
        )
        return sums_bsh

    def slots_of(self, x_bsk: Tensor) -> Tensor:
        """Return a number for every slot, [z], given one for every choice."""
        return x_bsk.flatten().index_select(0, self.choice_z)

    def choices_of(self, y_z: Tensor) -> Tensor:
        """Return the value of every choice's slot, [b, s, k, ...]; 0 for choices without a slot."""
        shape = self.slot_bsk.shape
        if len(self.choice_z) == shape.numel():
            found = y_z.index_select(0, self.slot_bsk.flatten())
        else:
            zeros = y_z.new_zeros(shape.numel(), *y_z.shape[1:])
            found = zeros.index_copy_(0, self.choice_z, y_z)
        by_choice: Tensor = found.unflatten(0, shape)
        return by_choice


def times_chosen(chosen: Tensor, experts: int) -> Tensor:
    """Return how often every expert is chosen, int64 [..., e]; the host does not wait.

    Args:
        chosen: int64 [..., c], numbers of experts.
        experts: e.
    """
    times = chosen.new_zeros(*chosen.shape[:-1], experts)
    return times.scatter_add_(-1, chosen, torch.ones_like(chosen))
