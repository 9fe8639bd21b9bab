"""Copies the next iteration's microbatches to the device while the current iteration runs.

A worker reads a batch, packs it into one buffer of the host, and starts a copy to the GPU on a
separate stream. Training lets its own stream wait for the end of the copy: the host never waits.
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

    The event ``copied`` is recorded after the copy to the buffer number ``place``; ``None``: on a
    CPU there is no copy.
    """

    step: HostStep
    buffer: Tensor
    place: int = 0
    copied: torch.Event | None = None


class Feed:
    """Copies batches to a device, each while training runs on the previous batch.

    Buffers take turns: the current iteration reads one buffer, and the next batch goes to another.
    An earlier iteration has read that other buffer. All of its work was issued before the current
    batch was taken, so the copy waits for an event of that moment.

    The last ``kept`` batches that were taken, 1 or more, are not overwritten.
    """

    def __init__(self, device: torch.device, kept: int = 1) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(kept + 1)]
        self._in_use = deque(range(kept), maxlen=kept)
        self._taken: torch.Event | None = None

    def stage(self, microbatches: Sequence[HostMicrobatch]) -> Staged:
        """Pack a batch and begin its copy; any thread may call, but only one at a time.

        If a batch is staged and not taken, the next batch overwrites it.
        """
        if self._stream is None:
            step = HostStep.of(microbatches, self._device)
            return Staged(step, step.buffer)
        # A thread starts on GPU 0, and returns there when it leaves a stream of another GPU. The
        # return makes a context on GPU 0: half a GB there for every rank of the machine.
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(self._stream):  # also for the allocation of pinned host memory
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
        self,
        staged: Staged,
        *,
        replicas: int,
        loss_scale: float = 1.0,
        by_microbatch: bool = False,
    ) -> list[DeviceMicrobatch]:
        """Return a batch for work of the current stream; the other arguments are of ``to_device``.

        Work that is issued from now on must not use batches older than the last ``kept`` ones.
        """
        if staged.copied is not None:
            current = torch.cuda.current_stream()
            current.wait_event(staged.copied)
            self._taken = current.record_event()
            self._in_use.append(staged.place)
        return staged.step.on(
            staged.buffer,
            torch.float32,
            replicas=replicas,
            loss_scale=loss_scale,
            by_microbatch=by_microbatch,
        )
