"""``pretrain_gpt.py`` on CUDA, watched: whether a host waits within a schedule, and memory grows.

PyTorch notices where one of its own operations makes the host wait for the device (not where
somebody synchronises expressly). The tests of ``pretended_gpu`` look for both without a GPU.

With ``WATCHED=error`` in its environment the job ends at the first wait, and when memory grows;
with ``WATCHED=say`` it trains on, and its last lines say where a host waited, and how often.
"""

import os
import sys
import warnings
from collections import Counter
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
        self._waits: Counter[str] = Counter()

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
                for one in caught:
                    if "synchronizing CUDA operation" in str(one.message):
                        self._waits[f"{Path(one.filename).name}:{one.lineno}"] += 1

        setattr(PipelineRank, train.__name__, watched)

    def last_lines(self) -> list[str]:
        """Return the lines about waits and growth, none if there were none."""
        lines = []
        if self._waits:
            places = ", ".join(f"{place} x{count}" for place, count in self._waits.most_common(6))
            lines.append(f"{WAITS}{places}")
        if len(self._held) > 1 and self._held[-2] < self._held[-1]:
            lines.append(f"{GROWS}{', '.join(map(str, self._held))} bytes")
        return lines

    def _look_at_memory(self) -> None:
        self._held.append(torch.cuda.memory_allocated())
        growths = sum(before < after for before, after in pairwise(self._held))
        if self._strict and growths > GROWTHS:
            raise MemoryError(
                f"device memory grows before schedule {len(self._held)}: {self._held} bytes"
            )


if __name__ == "__main__":
    watch = Watch(strict=os.environ.get("WATCHED", "error") == "error")
    watch.begin()
    main()
    print("\n".join(watch.last_lines()), flush=True)
