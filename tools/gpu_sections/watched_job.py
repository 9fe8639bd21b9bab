"""``pretrain_gpt.py`` on CUDA, watched: whether a host waits within a schedule, and memory grows.

PyTorch notices where one of its own operations makes the host wait for the device (not where
somebody synchronises expressly). The tests of ``pretended_gpu`` look for both without a GPU.

With ``WATCHED=error`` in its environment the job ends at the first wait, and when memory grows;
with ``WATCHED=say`` it trains on, and prints at once where a host waited. (A job ends by
``os._exit``, so nothing could be printed after its end.)
"""

import os
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from megatron.runtime.pipeline import PipelineRank
from pretrain_gpt import main
from tools.gpu_sections.ranks import GROWS, WAITS

GROWTHS: Final = 4
"""Times that memory may grow: by moments, workspaces, and what is saved once steps are guessed."""


class Watch:
    """What was seen in the schedules of a rank.

    Args:
        strict: a wait, or growth, ends the job.
    """

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._held: list[int] = []
        self._waits: set[str] = set()

    def begin(self) -> None:
        """Watch every schedule that this process trains."""
        train = PipelineRank.train

        def watched(rank: PipelineRank, *args: Any, **kwargs: Any) -> torch.Tensor | None:
            self._look_at_memory()
            torch.cuda.set_sync_debug_mode("error" if self._strict else "warn")
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    return train(rank, *args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                for warning in caught:
                    if "synchronizing CUDA operation" in str(warning.message):
                        self._tell_wait(f"{Path(warning.filename).name}:{warning.lineno}")

        setattr(PipelineRank, "train", watched)  # noqa: B010  # a method is replaced on purpose

    def _tell_wait(self, place: str) -> None:
        if place not in self._waits:
            self._waits.add(place)
            print(f"{WAITS}{place}", flush=True)

    def _look_at_memory(self) -> None:
        self._held.append(torch.cuda.memory_allocated())
        growths = sum(before < after for before, after in pairwise(self._held))
        if self._strict and growths > GROWTHS:
            raise MemoryError(
                f"device memory grows before schedule {len(self._held)}: {self._held} bytes"
            )
        if len(self._held) > GROWTHS and self._held[-2] < self._held[-1]:
            print(f"{GROWS}{self._held} bytes", flush=True)


if __name__ == "__main__":
    Watch(strict=os.environ.get("WATCHED", "error") == "error").begin()
    main()
