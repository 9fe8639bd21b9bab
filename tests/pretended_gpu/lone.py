"""The rank of ``tools/gpu_sections/lone_rank.py`` on a pretended GPU."""

import warnings
from typing import Any
from unittest.mock import patch

from pretended_gpu.gpu import DEVICE, PretendedGpu
from pretended_gpu.rank import let_no_schedule_wait, of_pairs_too
from torch import Tensor

from megatron.simulator.costs.gpus import gpu as gpu_of
from tools.gpu_sections import peers
from tools.gpu_sections.lone_rank import LoneRank


class PretendedSpinner:
    """Enters the launches of ``Spinner`` into the ledger.

    Args:
        gpu: the pretended GPU.
    """

    def __init__(self, gpu: PretendedGpu) -> None:
        self._gpu = gpu
        self.launches: list[tuple[int, str, float]] = []

    def begin(self) -> None:
        """Enter nothing."""

    def launch(
        self, blocks: int, ready: float, seconds: float, source: Tensor, destination: Tensor
    ) -> None:
        """Enter a copy."""
        stream = self._gpu.current_stream()
        self.launches.append((blocks, stream, ready + seconds))
        self._gpu.use("stand-in", stream, [source], [destination])


def run_lone_rank(flags: str, ranks: int, rank: int) -> tuple[list[str], Any, list[Any]]:
    """Run two iterations of a rank; return faults, pairs of the second one, and launches."""
    gpu = PretendedGpu()
    spinner = PretendedSpinner(gpu)
    with (
        warnings.catch_warnings(),
        gpu,
        of_pairs_too(gpu),
        patch.object(peers, "make_spinner", lambda device: spinner),
    ):
        warnings.simplefilter("error")
        lone = LoneRank(flags, ranks, rank, DEVICE, gpu_of("H200"))
        simulated = lone.simulated(lone.forecast.alone)
        lone.run(simulated.clocks)
        spinner.launches.clear()
        let_no_schedule_wait(gpu, lone.state)
        lone.run(simulated.clocks)
        lone.close()
    return list(dict.fromkeys(gpu.faults)), simulated.pairs(), spinner.launches
