"""Counts the bytes that the F of a chunk leaves for its backward, and that may wait on the host."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from megatron.layers.slices import SeenKeys
from megatron.planning.count.recorder import Recorder
from megatron.runtime.batch import DeviceMicrobatch
from megatron.runtime.offload import handed_over, storages_of
from megatron.schedules.passes import Pass


class CountedActivations:
    """Notes the storages that a run would copy to the host; nothing is copied.

    Args:
        shared: tensors that live longer than a microbatch.
        recorder: records the passes.
    """

    def __init__(self, shared: Iterable[Tensor], recorder: Recorder) -> None:
        self._always = storages_of(shared)
        self._shared = self._always
        self._recorder = recorder

    def begin(self, units: Sequence[DeviceMicrobatch]) -> None:
        """Begin an iteration over ``units``."""
        self._shared = self._always | storages_of(t for own in units for t in own.kept_by_layers)

    def around(self, item: Pass, keys: SeenKeys | None) -> AbstractContextManager[object]:
        """Return the context of an F, whose storages are noted."""
        return handed_over(torch.device("meta"), self._shared, keys, self._recorder.may_move)
