"""The package DeepEP on a pretended GPU: the sizes of what it returns, and no values.

As in a count, all experts have equally many tokens. A travel is entered as one collective of the
group, and the first one of a microbatch lets the host wait for the numbers that arrive. The
package's own buffers are not there.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property, wraps
from typing import Any

import torch
import torch.distributed as dist
from parallel.deep_ep_stand_in import Buffer, EventOverlap, installed
from torch import Tensor

from megatron.planning.count.assumed_routes import AssumedBuffer
from megatron.planning.count.recorder import Recorder


class _Waiting(Recorder):
    """In place of a count's recorder: lets the host wait."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self._wait = wait

    def let_the_host_wait(self) -> None:
        """As in ``Recorder``."""
        self._wait()


class _Sizes:
    """The methods of the stand-in's ``Buffer`` that move rows, with the sizes that a count assumes.

    Attributes:
        group: as in ``Buffer``.
        group_size: as in ``Buffer``.
        wait: lets the host wait for the device.
    """

    group: dist.ProcessGroup
    group_size: int
    wait: Callable[[], None]

    @cached_property
    def _assumed(self) -> AssumedBuffer:
        return AssumedBuffer(_Waiting(self.wait), self.group_size)

    @wraps(Buffer.get_dispatch_layout)
    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        return self._assumed.get_dispatch_layout(topk_idx, num_experts)

    @wraps(Buffer.dispatch)
    def dispatch(self, x: Tensor, handle: Any = None, **named: Any) -> tuple[Any, ...]:
        *found, _ = self._assumed.dispatch(x, handle, **named)
        self._enter(x, found[0])
        return *found, EventOverlap()

    @wraps(Buffer.combine)
    def combine(
        self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, **named: Any
    ) -> tuple[Any, ...]:
        *found, _ = self._assumed.combine(x, handle, topk_weights)
        self._enter(x, found[0])
        return *found, EventOverlap()

    def _enter(self, sent: Tensor, received: Tensor) -> None:
        """Enter a travel of rows, nearly as many from and to each rank."""
        assert sent.is_contiguous()
        assert sent.dtype == torch.bfloat16
        of_ranks = [
            [len(part) for part in rows.tensor_split(self.group_size)] for rows in (received, sent)
        ]
        dist.all_to_all_single(received, sent, of_ranks[0], of_ranks[1], group=self.group)


def deep_ep(wait: Callable[[], None]) -> AbstractContextManager[Any]:
    """Return a context in which the package is there; ``wait`` lets the host wait."""
    return installed(type("PretendedBuffer", (_Sizes, Buffer), {"wait": staticmethod(wait)}))
