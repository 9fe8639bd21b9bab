"""One benchmark case: a model, a treatment of the vocabulary, and a run that measures it."""

import json
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron.data.config import DataConfig
from megatron.data.microbatch import Microbatch
from megatron.model.config import ModelConfig
from megatron.optimizer.config import OptimizerConfig
from megatron.optimizer.grad_norm import local_sum_of_squares
from megatron.runtime.batch import to_device
from megatron.runtime.timeline import Recorder
from megatron.schedules.costs import Costs
from megatron.schedules.lower import Program
from megatron.simulator.simulate import Timeline, simulate
from megatron.training.config import LogConfig, ParallelConfig, RunConfig, TrainConfig
from megatron.training.flops import iteration_flops
from megatron.training.memory import peak_memory
from megatron.training.peak import measure_tflops
from megatron.training.setup import (
    Trainer,
    build_trainer,
    connect,
    leave,
    make_pipeline,
    make_run_plan,
)

WARM_UP_ITERATIONS = 2
WARM_UP_MICROBATCHES = 8


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        vocab_size: V, also the padded size where the shards allow it.
        treatment: of the vocabulary: ``none``, ``vocab-1`` or ``vocab-2``.
        ranks: pipeline ranks p.
        microbatches: microbatches m of one sample each.
        hidden_size: h.
        layers: transformer layers.
        heads: attention heads.
        seq_length: tokens s of a sample.
        dtype: of parameters and activations.
        device: ``cpu`` or ``cuda``.
    """

    vocab_size: int
    treatment: str
    ranks: int
    microbatches: int
    hidden_size: int
    layers: int
    heads: int
    seq_length: int
    dtype: str
    device: str

    @property
    def name(self) -> str:
        """Short name of the case within a report."""
        return f"{self.vocab_size} {self.treatment}"

    def to_json(self) -> str:
        """Return the case as text for a worker's command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Case":
        """Read what ``to_json`` wrote."""
        return cls(**json.loads(text))

    def run_config(self) -> RunConfig:
        """Return the case as the configuration of a run: untied, no dropout, GPT-2's shape."""
        model = ModelConfig(
            num_layers=self.layers,
            hidden_size=self.hidden_size,
            ffn_hidden_size=4 * self.hidden_size,
            num_attention_heads=self.heads,
            num_query_groups=self.heads,
            kv_channels=self.hidden_size // self.heads,
            seq_length=self.seq_length,
            max_position_embeddings=self.seq_length,
            vocab_size=self.vocab_size,
            tie_embeddings=False,
            attention_dropout=0.0,
            hidden_dropout=0.0,
        )
        multiple = 128 * (1 if self.treatment == "none" else self.ranks)
        parallel = ParallelConfig(
            pipeline_size=self.ranks,
            vocab_parallel=self.treatment,
            pipeline_schedule="1f1b",
            padded_vocab_size=-(-self.vocab_size // multiple) * multiple,
            device=self.device,
            backend="nccl" if self.device == "cuda" else "gloo",
            timeout_minutes=10,
        )
        train = TrainConfig(
            micro_batch_size=1,
            global_batch_size=self.microbatches,
            train_iters=2,
            exit_interval=None,
            seed=1234,
            dtype=getattr(torch, self.dtype),
            eval_interval=None,
            eval_iters=1,
        )
        log = LogConfig(1, None, False, 1, 2, Path("profile"), None)
        data = DataConfig((), (1.0, 0.0, 0.0), self.seq_length, 1234, 0)
        return RunConfig(model, parallel, train, OptimizerConfig(lr=1e-4), data, log)


def run_rank(case: Case, result: Path) -> None:
    """Run ``case`` on this rank of a torchrun job; rank 0 writes the measurements to ``result``."""
    config = case.run_config()
    groups = connect(config.parallel, int(os.environ["LOCAL_RANK"]))
    trainer = build_trainer(config, groups)
    batch = [
        Microbatch(*_random_tokens(case, i), torch.ones(1, case.seq_length))
        for i in range(case.microbatches)
    ]
    own: dict[str, Any] = {}
    device_batch = to_device(batch, groups.device)
    _warm_up(case, config, trainer, device_batch)
    recorder = Recorder(groups.rank, groups.device)
    groups.barrier()
    recorder.begin()
    own |= _step(trainer, device_batch, 1, recorder)
    own["memory"] = peak_memory(groups.device).held
    groups.barrier()
    own["rates"] = matrix_rates(case, groups.device)
    own["in_flight"] = trainer.pipeline.store.peak_in_flight
    timeline = trainer.pipeline.timeline(recorder)
    ranks = groups.all_gather_object(own)
    if groups.rank == 0:
        document = _measurements(case, config, trainer.pipeline.train_program, timeline, ranks)
        result.write_text(json.dumps(document))
    trainer.pipeline.close()
    leave(groups)


def _warm_up(case: Case, config: RunConfig, trainer: Trainer, batch: list[Any]) -> None:
    """Run short iterations until the allocator has what the measured one needs.

    Buffers that the first iteration makes stay, so only the second leaves the heap as all others
    find it: 9,000 page faults in one pass were seen without.
    """
    microbatches = min(case.microbatches, WARM_UP_MICROBATCHES)
    short = replace(config, train=replace(config.train, global_batch_size=microbatches))
    pipeline = make_pipeline(short, trainer.groups, make_run_plan(short), trainer.pipeline.model)
    warming = replace(trainer, pipeline=pipeline)
    for iteration in range(WARM_UP_ITERATIONS):
        _step(warming, batch[:microbatches], iteration, None)
    pipeline.close()


def _random_tokens(case: Case, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    both = torch.randint(case.vocab_size, (1, case.seq_length + 1), generator=generator)
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def _step(
    trainer: Trainer, batch: list[Any], iteration: int, recorder: Recorder | None
) -> dict[str, float]:
    """Run an iteration and return the seconds of the schedule and of the update."""
    start = _now(trainer)
    loss = trainer.pipeline.train(batch, iteration, recorder)
    after_schedule = _now(trainer)
    totals = torch.stack([loss.double(), local_sum_of_squares(trainer.parameters)])
    trainer.groups.all_reduce(totals)
    trainer.optimizer.step(1e-4, float(totals[1]) ** 0.5)
    trainer.gradients.zero()
    end = _now(trainer)
    return {
        "schedule": after_schedule - start,
        "update": end - after_schedule,
        "loss": float(totals[0]),
    }


def _now(trainer: Trainer) -> float:
    if trainer.groups.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def matrix_rates(case: Case, device: torch.device) -> dict[str, float]:
    """Return TFLOP/s of this rank in two products, while the other ranks measure too.

    ``product`` is the output layer's own product in one piece, [n, h] x [h, 128000]; ``peak`` is a
    square product that stays in cache, the best that the device does.
    """
    dtype = getattr(torch, case.dtype)
    x_nh = torch.randn(case.seq_length, case.hidden_size, device=device).to(dtype)
    w_vh = torch.randn(128000, case.hidden_size, device=device).to(dtype)
    out_nv = torch.empty(case.seq_length, 128000, device=device, dtype=dtype)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(x_nh, w_vh.T, out=out_nv)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    flops = 2 * x_nh.numel() * len(w_vh)
    return {
        "product": flops / sorted(seconds)[len(seconds) // 2] / 1e12,
        "peak": measure_tflops(device, dtype),
    }


def _measurements(
    case: Case,
    config: RunConfig,
    program: Program,
    timeline: Timeline,
    ranks: list[dict[str, Any]],
) -> dict[str, Any]:
    """Collect what one run says."""
    kinds = sorted({span.kind for span in timeline.spans if span.lane == "compute"})
    means = {kind: [_mean(timeline, rank, kind) for rank in range(case.ranks)] for kind in kinds}
    work = [timeline.work(rank) for rank in range(case.ranks)]
    schedule = max(rank["schedule"] for rank in ranks)
    update = max(rank["update"] for rank in ranks)
    return {
        "schedule_s": schedule,
        "update_s": update,
        "ideal_s": sum(work) / case.ranks,
        "simulated_s": simulate(program, Costs(means)).end,
        "pass_ms": {kind: [1e3 * value for value in values] for kind, values in means.items()},
        "flops": iteration_flops(config.model, case.microbatches),
        "product_tflops": min(rank["rates"]["product"] for rank in ranks),
        "peak_tflops": min(rank["rates"]["peak"] for rank in ranks),
        "memory_bytes": [rank["memory"] for rank in ranks],
        "in_flight": [rank["in_flight"] for rank in ranks],
        "loss": ranks[0]["loss"],
    }


def _mean(timeline: Timeline, rank: int, kind: str) -> float:
    spans = [s.end - s.start for s in timeline.compute(rank) if s.kind == kind]
    return sum(spans) / len(spans)
