"""Launches kernels that stand in for communications on a GPU (``spinning_programs.py``)."""

import torch
from torch import Tensor

from tools.gpu_sections.spinning_programs import LAUNCH, WORDS, note_time, spin_and_copy


class Spinner:
    """Launches the kernels on a GPU.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._origin = torch.zeros(1, dtype=torch.int64, device=device)

    def begin(self) -> None:
        """Let the planned times count from here on the current stream."""
        note_time[(1,)](self._origin)

    def launch(
        self, blocks: int, ready: float, seconds: float, source: Tensor, destination: Tensor
    ) -> None:
        """Launch a stand-in for a communication on the current stream.

        Args:
            blocks: thread blocks.
            ready: seconds after ``begin`` at which the peers are there.
            seconds: of the communication.
            source: contiguous; its words are copied as often as they fit into ``destination``.
            destination: contiguous.
        """
        x_w, out_w = _words(source), _words(destination)
        spin_and_copy[(blocks,)](
            out_w,
            x_w,
            self._origin,
            round(1e6 * ready),
            round(1e6 * seconds),
            x_w.numel(),
            out_w.numel() // max(1, x_w.numel()),
            BLOCK=WORDS,
            **LAUNCH,
        )


def _words(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as words of 4 bytes; bytes after the last word are left out."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return flat[: flat.numel() // 4 * 4].view(torch.int32)
