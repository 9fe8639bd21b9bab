"""A schedule that PyTorch does not have, trained by PyTorch's own pipeline runtime.

Plans V-Half, which holds half the activations of PyTorch's ZB-V, writes it in PyTorch's form, and
runs one iteration of it on two ranks with torch.distributed.pipelining alone. Torchtitan reads the
same file.

    python examples/torchtitan_plan.py

You should see the flags for torchtitan, the simulated time and memory of three schedules, and, for
each rank, how far its gradients are from those of the whole model in one process: rounding errors
of float64.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from megatron.library.plans import (
    in_flight,
    own_stages,
    plan,
    simulate,
    to_torch_csv,
    torchtitan_schedule,
)

RANKS, MICROBATCHES, HIDDEN = 2, 8, 16
SCHEDULE = "v-half"


def make_stages(count: int) -> list[nn.Module]:
    """Return the stages of the whole model; every process draws the same numbers."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()).double() for _ in range(count)]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return a microbatch's loss."""
    return (output - target).square().mean()


def gradient_fault(rank: int, ranks: int, file: str) -> float:
    """Train an iteration of the plan in ``file``; return the largest fault of a gradient here."""
    made = plan(SCHEDULE, ranks, MICROBATCHES)
    modules, device = make_stages(len(made.stages)), torch.device("cpu")
    stages = [
        PipelineStage(modules[stage], stage, len(made.stages), device)
        for stage in own_stages(made, rank)
    ]
    runtime = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=loss_of, scale_grads=False)
    runtime._load_csv(file)

    generator = torch.Generator().manual_seed(1)
    shape = (4 * MICROBATCHES, HIDDEN)
    x, target = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    first, last = made.stages[0][0], made.stages[-1][0]
    inputs = [x] if rank == first else []
    options: dict[str, Any] = {"target": target} if rank == last else {}
    runtime.step(*inputs, **options, return_outputs=False)

    reference = make_stages(len(made.stages))
    for part, aim in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        loss_of(nn.Sequential(*reference)(part), aim).backward()
    pairs = [
        (own.grad, other.grad)
        for stage in own_stages(made, rank)
        for own, other in zip(
            modules[stage].parameters(), reference[stage].parameters(), strict=True
        )
    ]
    return max(float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None)


def play(rank: int, folder: str) -> None:
    """Be one rank: meet the other, run the iteration, and print the line."""
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    fault = gradient_fault(rank, RANKS, f"{folder}/plan.csv")
    line = f"rank {rank} of {RANKS}: gradients differ by {fault:.0e} from those of one process"
    print(f"{line}\n", end="", flush=True)  # one write, which no other rank's write can cut
    dist.destroy_process_group()


def main() -> None:
    """Write the plan, compare schedules, and run it."""
    made = plan(SCHEDULE, RANKS, MICROBATCHES)
    print("For torchtitan:")
    print("  --parallelism.pipeline_parallel_schedule_csv plan.csv")
    print(f"  --parallelism.pipeline_parallel_schedule {torchtitan_schedule(made)}")
    print("\nOn 8 ranks with 24 microbatches, F = B = W = 0.5 of a chunk:")
    for name in ("zb-v", "v-half", "v-min"):
        large = plan(name, 8, 24)
        timeline = simulate(large, {"F": 0.5, "B": 0.5, "W": 0.5})
        held = max(in_flight(large))
        print(f"  {name}: time {timeline.end:g}, holds up to {held:g} microbatches")
    print()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "plan.csv").write_text(to_torch_csv(made), encoding="ascii")
        torch.multiprocessing.spawn(play, (folder,), nprocs=RANKS)


if __name__ == "__main__":
    main()
