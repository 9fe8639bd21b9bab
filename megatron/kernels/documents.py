"""Where the documents of a microbatch begin, for attention that keeps them apart.

Shapes: b samples, s positions of a sample, k documents of all samples; a query heads, g key/value
heads, d channels of a head.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of a microbatch; no position attends to another document.

    Attributes:
        first_bs: for every position the first position of its document, int64 [b, s], on the
            device.
        host_first_bs: ``first_bs`` on the host, so that the host need not wait for the device.
        bounds_k: the positions at which documents begin, counted through all samples, and the end
            of the last document; int32 [k + 1], on the device.
        longest: tokens of the longest document.
        derived: results on the host that layers have derived from the documents. A key is a name,
            with everything else on which the result depends. All layers of a stage can use them.
    """

    first_bs: Tensor
    host_first_bs: Tensor
    bounds_k: Tensor
    longest: int
    derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def are_of(self, q_basd: Tensor, k_bgsd: Tensor) -> bool:
        """Whether queries and keys cover all positions; false where ranks share a sequence."""
        positions = self.host_first_bs.shape[1]
        return q_basd.shape[2] == k_bgsd.shape[2] == positions

    @classmethod
    def of(cls, first_bs: Tensor, move: Callable[[Tensor], Tensor]) -> "Documents":
        """Return the documents whose first positions are in a tensor on the host.

        Args:
            first_bs: for every position the first position of its document, int64 [b, s].
            move: copies a tensor from the host to the device.
        """
        begins_n = (first_bs == torch.arange(first_bs.shape[1])).flatten()
        end = torch.tensor([begins_n.numel()])
        bounds_k = torch.cat((begins_n.nonzero().flatten(), end))
        return cls(
            move(first_bs),
            first_bs,
            move(bounds_k.to(torch.int32)),
            int(bounds_k.diff().max()),
        )
