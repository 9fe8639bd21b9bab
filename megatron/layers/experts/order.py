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


class Order(NamedTuple):
    """Which token stands in which slot.

    Attributes:
        choice_z: int64, the choice in every slot: the token's index times k, plus the index of the
            choice among the token's k choices.
        slot_bsk: int64, the slot of every choice.
        ends: int32 [e], the end of every expert's slots: the index after its last slot.
    """

    choice_z: Tensor
    slot_bsk: Tensor
    ends: Tensor

    @classmethod
    def by_expert(cls, experts_bsk: Tensor, experts: int) -> "Order":
        """Return the order for given choices; the slots of an expert are in token order.

        Args:
            experts_bsk: int64, the experts that every token has chosen; a token's experts differ.
            experts: e.
        """
        chosen_z = experts_bsk.flatten()
        choice_z = chosen_z.argsort(stable=True)
        slot_z = torch.empty_like(choice_z)
        slot_z[choice_z] = torch.arange(len(slot_z), device=slot_z.device)
        ends = times_chosen(chosen_z, experts).cumsum(0, dtype=torch.int32)
        return cls(choice_z, slot_z.view(experts_bsk.shape), ends)

    def spread(self, x_bsh: Tensor) -> Tensor:
        """Return the token of every slot, [z, h]."""
        return x_bsh.flatten(0, 1).index_select(0, self.choice_z // self.slot_bsk.shape[2])

    def join(self, y_zh: Tensor) -> Tensor:
        """Return the sum of every token's slots, [b, s, h]."""
        by_choice = y_zh.index_select(0, self.slot_bsk.flatten())
        sums_bsh: Tensor = by_choice.unflatten(0, self.slot_bsk.shape).sum(2)
        return sums_bsh


def times_chosen(chosen: Tensor, experts: int) -> Tensor:
    """Return how often every expert is chosen, int64 [..., e]; the host does not wait.

    Args:
        chosen: int64 [..., c], numbers of experts.
        experts: e.
    """
    times = chosen.new_zeros(*chosen.shape[:-1], experts)
    return times.scatter_add_(-1, chosen, torch.ones_like(chosen))
