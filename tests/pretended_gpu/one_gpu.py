"""What one GPU would make of an iteration of training, by the count of all that it launches.

It trains what ``tools/gpu_report.py`` trains on a real one. Launches follow one another without a
gap, each as fast as ``launches`` has it. So the MFU is a bound: what a GPU falls short of it by is
the host's time, and kernels that attain less.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final
from unittest.mock import patch

from pretended_gpu.gpu import DEVICE, PretendedGpu
from pretended_gpu.launches import Counter, Part, count, launch_rows, step_rows
from pretended_gpu.pool import GpuPool

from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.layers import site
from megatron.model.flops import iteration_flops
from megatron.optimizer.lr_schedule import Rates
from megatron.parallel.groups import single_rank
from megatron.planning.run_plan import make_run_plan
from megatron.runtime.batch import to_device
from megatron.training.post_validated_step import make_train_step
from megatron.training.setup import build_train_state
from megatron.training.step import Iteration
from tools.gpu_sections.timing import Scale
from tools.gpu_sections.training import case_of

PEAK: Final = 989e12
"""FLOP/s of an H200 in bf16, which MFU refers to."""


@dataclass(frozen=True)
class Trained:
    """An iteration.

    Attributes:
        part: what it launches.
        model_flops: FLOP of the model, as ``iteration_flops`` counts them.
    """

    part: Part
    model_flops: int

    @property
    def mfu(self) -> float:
        """Share of the GPU's peak."""
        return self.model_flops / self.part.seconds / PEAK


def train(which: str, rank: int) -> Trained:
    """Count the second iteration with the kernels of ``which``, as in ``launches.count``."""
    case, counter = case_of(Scale(DEVICE, small=False)), Counter()
    config = case.run_config()
    run_plan = make_run_plan(config)
    with PretendedGpu(), _kernels(which), counter:
        state = build_train_state(config, single_rank(DEVICE), run_plan)
        step = make_train_step(config.optimizer, state)
        for number in range(2):
            with counter.part("iteration"):
                batch = to_device(case.batch(), DEVICE)
                step.train(Iteration(number, batch, lambda _: Rates(1e-4, 1e-4, 0.1), 0))
        state.close()
    samples = config.train.num_microbatches * config.train.micro_batch_size
    flops = iteration_flops(config.model, samples)
    return Trained(counter.parts["iteration"], flops)


def _kernels(which: str) -> AbstractContextManager[Any]:
    """Return a context in which models get these kernels."""
    if which == "chosen":
        return nullcontext()
    return patch.object(site, "kernels_for", lambda device, dtype: ReferenceKernels())


def tables(gpus: GpuPool) -> list[str]:
    """Return all that is counted with PyTorch's operations and with the chosen kernels."""
    kinds = ("reference", "chosen")
    before, after = (gpus.map(count, which, ranks=1)[0] for which in kinds)
    trained = [gpus.map(train, which, ranks=1)[0] for which in kinds]
    return [
        *launch_rows(before, after),
        "",
        *step_rows(before, after),
        "",
        *iteration_rows(*trained),
    ]


def iteration_rows(before: Trained, after: Trained) -> list[str]:
    """Return a table of both."""
    numbers = [
        (len(each.part.launches), 1e3 * each.part.seconds, 100 * each.mfu)
        for each in (before, after)
    ]
    cells = zip(*numbers, strict=True)
    launches, milliseconds, mfu = (f"{first:,.0f} -> {last:,.0f}" for first, last in cells)
    return [
        "| launches | ms | MFU |",
        "|--:|--:|--:|",
        f"| {launches} | {milliseconds} | {mfu} % |",
    ]
