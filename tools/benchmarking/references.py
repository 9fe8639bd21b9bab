"""The benchmark's references from outside: PyTorch's own pipelining, and no pipeline at all.

They train the same model on the same data, from the same weights, with nothing of this project but
the numbers that the weights begin with: plain modules, ``torch.distributed.pipelining``, gradients
where autograd leaves them. What is measured is the forward and backward of all microbatches.
"""

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from megatron.training.metrics.peak_memory import peak_memory
from tools.benchmarking.case import UPDATING, BenchmarkCase
from tools.benchmarking.harness import timed
from tools.benchmarking.measure import (
    WARM_UP_ITERATIONS,
    WARM_UP_MICROBATCHES,
    document,
    matrix_rates,
)
from tools.benchmarking.plain_model import Stage, make_stage

LR: Final = 1e-4
"""Learning rate of the updates; it does not matter for their time."""


@dataclass(frozen=True)
class Reference:
    """One rank of something to compare with.

    Attributes:
        stages: stages of this rank.
        prepare: makes, for so many microbatches, what runs their forward and backward and returns
            this rank's part of the mean loss. Gradients add up from call to call.
        optimizer: optimizer of the weights, if updates are measured too.
        threads: threads that an update may use.
    """

    stages: Sequence[Stage]
    prepare: Callable[[int], Callable[[], float]]
    optimizer: torch.optim.Optimizer | None = None
    threads: int = 1


def _single(case: BenchmarkCase, device: torch.device) -> Reference:
    """Train on the first rank alone, with as many threads as there are ranks."""
    if dist.get_rank() != 0:
        return Reference([], lambda microbatches: lambda: 0.0)
    stage = make_stage(case, 0, 1, device)
    tokens, targets = _data(case, device)

    def step(microbatches: int) -> float:
        torch.set_num_threads(case.processes)
        total = torch.zeros((), device=device)
        for i in range(microbatches):
            loss = stage(tokens[i : i + 1], targets[i : i + 1]) / microbatches
            loss.backward()
            total += loss.detach()
        torch.set_num_threads(1)
        return float(total)

    optimizer = torch.optim.AdamW(stage.parameters(), LR) if case.with_update else None
    return Reference(
        [stage], lambda microbatches: partial(step, microbatches), optimizer, case.processes
    )


def _pytorch_ddp(case: BenchmarkCase, device: torch.device) -> Reference:
    """Train replicas of the whole model by PyTorch; they share the optimizer's state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it uses torch.jit.script, PyTorch's
        from torch.distributed.optim import ZeroRedundancyOptimizer
    rank, replicas = dist.get_rank(), dist.get_world_size()
    stage = make_stage(case, 0, 1, device)
    model = DistributedDataParallel(stage, gradient_as_bucket_view=True)
    tokens, targets = _data(case, device)

    def step(microbatches: int) -> float:
        own = range(rank, microbatches, replicas)
        total = torch.zeros((), device=device)
        for i in own:
            with nullcontext() if i == own[-1] else model.no_sync():
                loss = model(tokens[i : i + 1], targets[i : i + 1]) / len(own)
                loss.backward()
            total += loss.detach()
        return float(total) / replicas

    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LR)
    return Reference([stage], lambda microbatches: partial(step, microbatches), optimizer)


def _pytorch_tp(case: BenchmarkCase, device: torch.device) -> Reference:
    """Train by PyTorch's tensor parallelism; embedding, output layer and loss are cut too."""
    stage = make_stage(case, 0, 1, device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    plan: dict[str, ParallelStyle] = {
        "embedding.word_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "output_layer": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for number in range(case.layers):
        layer = f"decoder.layers.{number}."
        for first, second in (("self_attention.linear_qkv", "self_attention.linear_proj"), _MLP):
            plan |= {layer + first: ColwiseParallel(), layer + second: RowwiseParallel()}
    parallelize_module(stage, mesh, plan)
    tokens, targets = _data(case, device)

    def step(microbatches: int) -> float:
        total = torch.zeros((), device=device)
        for i in range(microbatches):
            with loss_parallel():
                loss = stage(tokens[i : i + 1], targets[i : i + 1]) / microbatches
                loss.backward()
            total += loss.detach().full_tensor()  # the same on every rank
        return float(total) / dist.get_world_size()

    optimizer = torch.optim.AdamW(stage.parameters(), LR) if case.with_update else None
    return Reference([stage], lambda microbatches: partial(step, microbatches), optimizer)


_MLP: Final = ("mlp.linear_fc1", "mlp.linear_fc2")


def _pytorch_1f1b(case: BenchmarkCase, device: torch.device) -> Reference:
    """Train by PyTorch's 1F1B, with one stage on every rank."""

    def make(stages: list[PipelineStage], microbatches: int) -> Schedule1F1B:
        return Schedule1F1B(stages[0], microbatches, loss_fn=_its_output)

    return _pipelined(case, device, [dist.get_rank()], make)


def _pytorch_zbv(case: BenchmarkCase, device: torch.device) -> Reference:
    """Train by PyTorch's ZB-V, with two stages on every rank: down the ranks, then up again."""
    rank = dist.get_rank()

    def make(stages: list[PipelineStage], microbatches: int) -> ScheduleZBVZeroBubble:
        return ScheduleZBVZeroBubble(list(stages), microbatches, loss_fn=_its_output)

    return _pipelined(case, device, [rank, 2 * case.ranks - 1 - rank], make)


def _pipelined(
    case: BenchmarkCase, device: torch.device, own: list[int], make_schedule: Callable[..., Any]
) -> Reference:
    """Train by a schedule of PyTorch; ``own`` are the stages of this rank."""
    count = len(own) * case.ranks
    modules = [make_stage(case, index, count, device) for index in own]
    tokens, targets = _data(case, device)

    def prepare(microbatches: int) -> Callable[[], float]:
        stages = [
            PipelineStage(module, index, count, device)
            for module, index in zip(modules, own, strict=True)
        ]
        schedule = make_schedule(stages, microbatches)
        inputs = [tokens[:microbatches]] if 0 in own else []
        options = {"targets_bs": targets[:microbatches], "target": targets[:microbatches]}

        def step() -> float:
            losses: list[Tensor] = []
            schedule.step(*inputs, **options, losses=losses, return_outputs=False)
            return float(sum(losses)) / microbatches

        return step

    return Reference(modules, prepare)


def _its_output(loss: Tensor, targets_bs: Tensor) -> Tensor:
    """Return the last stage's output, which is the loss."""
    return loss


def _data(case: BenchmarkCase, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens and targets of all microbatches, [m, s] each."""
    batch = case.batch()
    tokens, targets = torch.cat([b.tokens for b in batch]), torch.cat([b.labels for b in batch])
    return tokens.to(device), targets.to(device)


MAKE: Final[Mapping[str, Callable[[BenchmarkCase, torch.device], Reference]]] = {
    "single": _single,
    "pytorch-1f1b": _pytorch_1f1b,
    "pytorch-zbv": _pytorch_zbv,
    "pytorch-ddp": _pytorch_ddp,
    "pytorch-tp": _pytorch_tp,
}
"""The references by name; every rank of the job makes its own part."""


def run_reference(case: BenchmarkCase, result: Path) -> None:
    """Run ``case`` on this rank of a torchrun job; rank 0 writes the measurements to ``result``."""
    device = torch.device(case.device)
    if case.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    reference = MAKE[case.schedule](case, device)
    short = min(case.microbatches, WARM_UP_MICROBATCHES)
    own: dict[str, Any] = {}
    for _ in range(WARM_UP_ITERATIONS):
        loss = reference.prepare(short)()
        own.setdefault("loss", loss)
        _update(reference)
    step = reference.prepare(case.microbatches)
    own["schedule"] = _seconds(step, device)
    if case.with_update and case.schedule in UPDATING:
        own["update"] = _seconds(partial(_update, reference), device)
    own["memory"] = peak_memory(device).held
    dist.barrier()
    own["rates"] = matrix_rates(case, device)
    ranks: list[Any] = [None] * case.processes
    dist.all_gather_object(ranks, own)
    if dist.get_rank() == 0:
        result.write_text(json.dumps(document(case, ranks)))
    dist.barrier()
    dist.destroy_process_group()


def _update(reference: Reference) -> None:
    if reference.optimizer is not None:
        torch.set_num_threads(reference.threads)
        reference.optimizer.step()
        reference.optimizer.zero_grad(set_to_none=False)
        torch.set_num_threads(1)


def _seconds(step: Callable[[], object], device: torch.device) -> float:
    dist.barrier()
    return timed(step, device.type)[1].seconds
