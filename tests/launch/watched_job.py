"""``pretrain_gpt.py`` on CUDA, watched: a host that waits within a schedule, or growth, ends it.

PyTorch raises where one of its own operations would make the host wait for the device (not where
somebody synchronises expressly). The tests of ``pretended_gpu`` look for both without a GPU.
"""

from itertools import pairwise
from typing import Any

import torch

from megatron.runtime.pipeline import PipelineRank
from pretrain_gpt import main

GROWTHS = 4
"""Times that memory may grow: by moments, workspaces, and what is saved once steps are guessed."""


def watch() -> None:
    """Watch every schedule that this process trains."""
    train, held = PipelineRank.train, []

    def watched(self: PipelineRank, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        held.append(torch.cuda.memory_allocated())
        if sum(before < after for before, after in pairwise(held)) > GROWTHS:
            raise MemoryError(f"device memory grows before schedule {len(held)}: {held} bytes")
        torch.cuda.set_sync_debug_mode("error")
        try:
            return train(self, *args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    setattr(PipelineRank, train.__name__, watched)


if __name__ == "__main__":
    watch()
    main()
