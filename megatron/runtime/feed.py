"""Brings the microbatches of an iteration to the device while the one before is trained on.

A worker reads a batch, packs it into one buffer of the host, and has the GPU copy that on a stream
of its own. Training takes the batch by letting its stream wait for an event: the host never waits.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.runtime.batch import DeviceMicrobatch, HostMicrobatch, HostStep


@dataclass(frozen=True, eq=False)
class Staged:
    """A batch on its way to the device.

    ``copied`` is recorded after the copy to the buffer number ``place``; ``None``: there was none
    to make.
    """

    step: HostStep
    buffer: Tensor
    place: int = 0
    copied: torch.Event | None = None


class Feed:
    """Copies batches to a device, each while the one before is trained on.

    Buffers take turns: the iteration under way reads one, and the next batch goes to another. That
    was read by an iteration before, all of whose work was issued when this one's batch was taken.
    So a copy waits for an event of that moment.

    The ``kept`` batches that were taken last, 1 or more, must stay as they are.
    """

    def __init__(self, device: torch.device, kept: int = 1) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(kept + 1)]
        self._in_use = deque(range(kept), maxlen=kept)
        self._taken: torch.Event | None = None

    def stage(self, microbatches: Sequence[HostMicrobatch]) -> Staged:
        """Pack a batch and begin its copy; one thread at a time, whichever it is.

        A batch that is staged and not taken gives its place to the next one.
        """
        if self._stream is None:
            step = HostStep.of(microbatches, self._device)
            return Staged(step, step.buffer)
        # A thread begins on GPU 0, and returns there when it leaves a stream of another one. That
        # makes a context there: half a GB on the first GPU for every rank of the machine.
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(self._stream):  # for memory of the host, too
            step = HostStep.of(microbatches, self._device)
            [place] = set(range(len(self._buffers))).difference(self._in_use)
            if self._taken is not None:
                self._stream.wait_event(self._taken)
            size = step.buffer.numel()
            if self._buffers[place].numel() < size:
                self._buffers[place] = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._buffers[place][:size].copy_(step.buffer, non_blocking=True)
            return Staged(step, self._buffers[place], place, self._stream.record_event())

    def take(
        self, staged: Staged, *, replicas: int, loss_scale: float = 1.0
    ) -> list[DeviceMicrobatch]:
        """Return a batch for work of the current stream; further arguments as of ``to_device``.

        Those that are no longer kept must not be used by work that is issued from now on.
        """
        if staged.copied is not None:
            current = torch.cuda.current_stream()
            current.wait_event(staged.copied)
            self._taken = current.record_event()
            self._in_use.append(staged.place)
        return staged.step.on(
            staged.buffer, torch.float32, replicas=replicas, loss_scale=loss_scale
        )
