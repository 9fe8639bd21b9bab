"""The package DeepEP on a pretended GPU: the sizes of what it returns, and no values.

As in a count, all experts have equally many tokens. A travel is entered as one collective of the
group, and the first one of a microbatch lets the host wait for the numbers that arrive. The
package's own buffers are not there.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property, wraps
from typing import Any

import torch.distributed as dist
from parallel.deep_ep_stand_in import Buffer, EventOverlap, installed
from torch import Tensor

from megatron.training.planning.count.assumed_routes import AssumedBuffer
from megatron.training.planning.count.recorder import Recorder


class _Waiting(Recorder):
    """In place of a count's recorder: lets the host wait."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self._wait = wait

    def let_the_host_wait(self) -> None:
        """As in ``Recorder``."""
        self._wait()


class PretendedBuffer(Buffer):
    """Returns tensors of the sizes that a count assumes; has the signatures of the stand-in.

    Attributes:
        wait: called where the host waits for the device.
    """

    wait: Callable[[], None]

    @cached_property
    def _assumed(self) -> AssumedBuffer:
        return AssumedBuffer(_Waiting(self.wait), self.group_size)

    @wraps(Buffer.get_dispatch_layout)
    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int, *given: Any, **named: Any
    ) -> tuple[Any, ...]:
        return self._assumed.get_dispatch_layout(topk_idx, num_experts)

    @wraps(Buffer.dispatch)
    def dispatch(self, x: Tensor, handle: Any = None, **named: Any) -> tuple[Any, ...]:
        self._check_rows(x)
        *found, _ = self._assumed.dispatch(x, handle, **named)
        self._enter(x, found[0])
        return *found, EventOverlap()

    @wraps(Buffer.combine)
    def combine(
        self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, **named: Any
    ) -> tuple[Any, ...]:
        self._check_rows(x)
        *found, _ = self._assumed.combine(x, handle, topk_weights)
        self._enter(x, found[0])
        return *found, EventOverlap()

    def _enter(self, sent: Tensor, received: Tensor) -> None:
        """Enter a travel of rows, the same number to and from every rank."""
        sizes = [
            [rows // self.group_size] * (self.group_size - 1) for rows in (len(received), len(sent))
        ]
        for own, rows in zip(sizes, (received, sent), strict=True):
            own.append(len(rows) - sum(own))
        dist.all_to_all_single(received, sent, *sizes, group=self.group)


def deep_ep(wait: Callable[[], None]) -> AbstractContextManager[Any]:
    """Return a context in which the package is there; ``wait`` lets the host wait."""
    return installed(type("Buffer", (PretendedBuffer,), {"wait": staticmethod(wait)}))
