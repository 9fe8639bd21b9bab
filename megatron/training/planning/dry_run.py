"""``--dry-run``: what a command line would run, and how fast and how full a named GPU would be.

Nothing is started and no GPU is needed. The plan is the one that training would take; its times and
bytes come from the cost model of ``megatron/simulator/costs`` with the GPU's data sheet.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from megatron.config.run_config import RunConfig
from megatron.kernels.reference.kernels import EXPONENTIALS_AT_ONCE, TILE_ROWS
from megatron.schedules.lower import lower
from megatron.simulator.costs.from_model import ModelTimes, model_costs
from megatron.simulator.costs.gpus import GIB, Gpu
from megatron.simulator.costs.model_bytes import FP32_GRADIENT_PARAMETER, LogitBytes, model_sizes
from megatron.simulator.costs.peak_bytes import Size, Sizes, peak_bytes
from megatron.simulator.costs.shape import ACTIVATION_BYTES, Shape, iteration_flops
from megatron.simulator.draw.text import draw_text
from megatron.simulator.simulate import Timeline, simulate
from megatron.training.planning.pass_costs import shape_of
from megatron.training.planning.run_plan import (
    NEAR,
    Candidate,
    RunPlan,
    candidates,
    fastest,
    make_run_plan,
    ranking,
)

FP32_BYTES: Final = 4

OPTIMIZER_BYTES: Final = 30
"""That AdamW moves per parameter: gradient, master weight and both moments read, the last three
and the bf16 parameter written."""

USABLE: Final = 0.95
"""Share of a GPU's memory that tensors can have; the rest is CUDA's, NCCL's and fragments."""

COLUMNS_OF_A_FORWARD: Final = 4
"""Width of the shortest forward in the drawing, so that its label fits; the rest is cut off."""

WIDTH: Final = 120
"""Characters of the drawing."""

ALTERNATIVES: Final = 5
"""How many settings that fit are named where the one asked for does not."""


@dataclass(frozen=True)
class Forecast:
    """What a run would do on a GPU.

    Attributes:
        config: the run.
        run_plan: its plan.
        timeline: of the schedule, in seconds.
        step: seconds of the optimizer's step on the slowest rank.
        mfu: model FLOPs as a share of the peak of all GPUs, the step included.
        peak: bytes that every rank holds at most.
        static: bytes of those that it holds all the time.
    """

    config: RunConfig
    run_plan: RunPlan
    timeline: Timeline
    step: float
    mfu: float
    peak: Sequence[float]
    static: Sequence[float]

    @property
    def seconds(self) -> float:
        """Time of an iteration."""
        return self.timeline.end + self.step

    @property
    def samples_per_second(self) -> float:
        """Speed, comparable between batch sizes."""
        return self.config.train.global_batch_size / self.seconds

    def fits(self, gpu: Gpu) -> bool:
        """Whether every rank has enough memory."""
        return max(self.peak) <= USABLE * gpu.memory


def dry_run(config: RunConfig, gpu: Gpu) -> Iterator[str]:
    """Yield the paragraphs of the report of a run that is not started.

    Args:
        config: the run.
        gpu: what every rank would be.

    Raises:
        ValueError: if no plan can be made, or the run is not in bf16, which the costs are counted
            for.
    """
    if config.train.dtype != torch.bfloat16:
        raise ValueError("--dry-run counts FLOPs and bytes of bf16: add --bf16")
    compared = candidates(config) if config.parallel.pipeline_schedule == "auto" else []
    run_plan = fastest(compared).run_plan if compared else make_run_plan(config)
    forecast = _forecast(config, run_plan, gpu)
    yield _head(forecast, gpu)
    yield _drawing(forecast.timeline)
    yield _figures(forecast, gpu)
    if compared:
        yield _ranking(config, ranking(compared), gpu)
    if not forecast.fits(gpu):
        yield _what_would_fit(forecast, gpu)


def _drawing(timeline: Timeline) -> str:
    """Return the beginning of the timeline, as much of it as can be read."""
    shortest = min(s.end - s.start for s in timeline.spans if s.kind == "F" and s.end > s.start)
    until = min(timeline.end, shortest * WIDTH / COLUMNS_OF_A_FORWARD)
    shown = "" if until == timeline.end else f"the first {until:.3f} s of {timeline.end:.3f}:\n"
    return shown + draw_text(timeline, WIDTH, until)


def _forecast(config: RunConfig, run_plan: RunPlan, gpu: Gpu) -> Forecast:
    plan, layers, vocabulary = run_plan.plan, run_plan.layers, config.parallel.vocab_parallel
    shape = shape_of(config.model, config.train.micro_batch_size)
    device = gpu.device()
    costs = model_costs(ModelTimes(shape, device), plan.stages, layers, vocabulary)
    timeline = simulate(lower(plan, run_plan.costs), costs)
    own = output_layer_bytes(shape, config.parallel.vocab_shards)
    sizes = _with_the_rest(_sizes(config, run_plan, shape, own), config, run_plan, shape, own)
    parameter_bytes = max(_of_ranks(_sizes(config, run_plan, shape, LogitBytes(0, 0)).static))
    step = device.traffic(OPTIMIZER_BYTES * parameter_bytes / FP32_GRADIENT_PARAMETER)
    flops = iteration_flops(shape, config.model.num_layers, config.train.num_microbatches)
    mfu = flops / (plan.ranks * device.peak_flops * (timeline.end + step))
    peak, static = peak_bytes(plan, sizes), _of_ranks(sizes.static)
    return Forecast(config, run_plan, timeline, step, mfu, peak, static)


def _of_ranks(size: Size) -> Sequence[float]:
    assert not isinstance(size, (int, float))
    return size


def output_layer_bytes(shape: Shape, shards: int) -> LogitBytes:
    """Return the bytes of our own output layer on GPUs: bf16 exponentials, the rest in fp32.

    Args:
        shape: the model and one microbatch.
        shards: ranks that the vocabulary is split over.
    """
    rows = min(TILE_ROWS, -(-shape.vocab_size // shards))
    exponentials = FP32_BYTES * min(rows * shape.tokens, EXPONENTIALS_AT_ONCE)
    gradient = ACTIVATION_BYTES * rows * shape.hidden_size  # the product that T adds
    # The targets' rows in bf16 and in fp32, and their product with X.
    targets = (ACTIVATION_BYTES + 2 * FP32_BYTES) * shape.elements
    return LogitBytes(
        held=ACTIVATION_BYTES,
        working=0.0,
        workspace=max(exponentials, gradient, targets),
        early_gradient=2 * FP32_BYTES,  # A and D
    )


def _sizes(config: RunConfig, run_plan: RunPlan, shape: Shape, logit: LogitBytes) -> Sizes:
    """Return what the run weighs on every rank, with an output layer of these bytes."""
    return model_sizes(
        shape,
        run_plan.plan.stages,
        run_plan.layers,
        config.parallel.vocab_parallel,
        per_parameter=FP32_GRADIENT_PARAMETER,
        logit=logit,
        tied=config.model.tie_embeddings,
    )


def _with_the_rest(
    sizes: Sizes, config: RunConfig, run_plan: RunPlan, shape: Shape, logit: LogitBytes
) -> Sizes:
    """Add what the paper's formulas leave out, a few percent: what B works with, and positions.

    Where B is fullest, there are within the MLP a gradient of the inner activation and the gradient
    of a matrix; or, where W is a pass of its own, the gradients on both sides of the activation.
    The output layer's workspace is not needed at the same time.
    """
    model, plan = config.model, run_plan.plan
    width = model.ffn_hidden_size * (2 if model.swiglu else 1)
    beside = shape.tokens if plan.split_backward else shape.hidden_size
    at_work = ACTIVATION_BYTES * width * (shape.tokens + beside)
    (first, first_chunk), (last, _) = plan.stages[0], plan.stages[-1]
    static = [
        held
        + max(
            0.0, at_work - (logit.workspace if plan.treatment.is_sharded or rank == last else 0.0)
        )
        for rank, held in enumerate(_of_ranks(sizes.static))
    ]
    assert not isinstance(sizes.activation, (int, float))
    activation = [list(_of_ranks(own)) for own in sizes.activation]
    if model.position_embedding_type == "learned_absolute":
        rows = model.max_position_embeddings
        static[first] += FP32_GRADIENT_PARAMETER * rows * shape.hidden_size
        # The words' embeddings, which wait for their gradient beside the sum of the two.
        activation[first][first_chunk] += ACTIVATION_BYTES * shape.elements
    return replace(sizes, static=static, activation=activation)


def _head(forecast: Forecast, gpu: Gpu) -> str:
    config, plan = forecast.config, forecast.run_plan.plan
    layers = " ".join(
        f"{rank}.{chunk}:{count}"
        for (rank, chunk), count in zip(plan.stages, forecast.run_plan.layers, strict=True)
    )
    return (
        f"dry run, nothing is started: {plan.ranks} x {gpu.name} ({gpu.peak_tflops:g} TFLOP/s, "
        f"{gpu.memory / GIB:.0f} GiB)\n"
        f"schedule {config.parallel.pipeline_schedule}, vocabulary "
        f"{config.parallel.vocab_parallel}, {plan.microbatches} microbatches of "
        f"{config.train.micro_batch_size}\n"
        f"layers by stage (rank.chunk:layers): {layers}"
    )


def _figures(forecast: Forecast, gpu: Gpu) -> str:
    timeline = forecast.timeline
    lines = [
        f"iteration {forecast.seconds:.3f} s: schedule {timeline.end:.3f}, of which ranks idle "
        f"{timeline.bubble_rate_makespan():.1%}; optimizer's step {forecast.step:.3f}; MFU "
        f"{forecast.mfu:.1%}",
        "rates: the shares of the data sheet that Megatron-LM attains on A100s, with its kernels",
    ]
    for rank, (peak, static) in enumerate(zip(forecast.peak, forecast.static, strict=True)):
        verdict = "" if peak <= USABLE * gpu.memory else "  does not fit"
        lines.append(
            f"rank {rank}: peak {peak / GIB:.1f} GiB (parameters, optimizer and workspace "
            f"{static / GIB:.1f}){verdict}"
        )
    return "\n".join(lines)


def _ranking(config: RunConfig, ranked: Sequence[Candidate], gpu: Gpu) -> str:
    """Return the table of what ``auto`` compares, in its own order: by FLOPs."""
    lines = [
        "auto compares by FLOPs, communication being free, and takes one that fits and is within "
        f"{NEAR:.0%} of the fastest; the other columns are what {gpu.name} makes of it",
        f"{'schedule':<12} {'by FLOPs':>8} {'seconds':>8} {'MFU':>6} {'idle':>7} {'GiB':>6} "
        f"{'in flight':>9}",
    ]
    least = ranked[0].time
    for candidate in ranked:
        forecast = _forecast(config, candidate.run_plan, gpu)
        note = "" if candidate.fits else "  exceeds --zero-bubble-max-pending-backward"
        note += "" if forecast.fits(gpu) else "  does not fit"
        lines.append(
            f"{candidate.schedule:<12} {candidate.time / least:>8.3f} {forecast.seconds:>8.3f} "
            f"{forecast.mfu:>6.1%} {forecast.timeline.bubble_rate_makespan():>7.1%} "
            f"{max(forecast.peak) / GIB:>6.1f} {candidate.in_flight:>9.1f}{note}"
        )
    return "\n".join(lines)


def _what_would_fit(forecast: Forecast, gpu: Gpu) -> str:
    """Return the fastest settings nearby that fit, or why none does."""
    fitting = [
        (named, other) for named, other in _neighbours(forecast.config, gpu) if other.fits(gpu)
    ]
    fitting.sort(key=lambda pair: -pair[1].samples_per_second)
    rank = max(range(len(forecast.peak)), key=forecast.peak.__getitem__)
    if not fitting:
        return (
            f"nothing nearby fits either: of the {forecast.peak[rank] / GIB:.1f} GiB of rank "
            f"{rank}, {forecast.static[rank] / GIB:.1f} are there all the time: more ranks "
            "(--pipeline-model-parallel-size), or a smaller model"
        )
    lines = ["what would fit, the fastest first:"]
    for named, other in fitting[:ALTERNATIVES]:
        lines.append(
            f"  {named}: {max(other.peak) / GIB:.1f} GiB, "
            f"{other.samples_per_second:.2f} samples/s, MFU {other.mfu:.1%}"
        )
    return "\n".join(lines)


def _neighbours(config: RunConfig, gpu: Gpu) -> Iterator[tuple[str, Forecast]]:
    """Yield every schedule, with and without vocabulary parallelism, and with half microbatches."""
    treatments = dict.fromkeys((config.parallel.vocab_parallel, "vocab-2"))
    batch = config.train.micro_batch_size
    for micro_batch_size in (batch, batch // 2) if batch % 2 == 0 else (batch,):
        train = replace(config.train, micro_batch_size=micro_batch_size)
        for treatment in treatments:
            parallel = replace(
                config.parallel,
                pipeline_schedule="auto",
                vocab_parallel=treatment,
                memory_limit=None,
                schedule_file=None,
            )
            other = replace(config, train=train, parallel=parallel)
            for candidate in candidates(other):
                named = f"--pipeline-schedule {candidate.schedule} --vocab-parallel {treatment}"
                if micro_batch_size != batch:
                    named += f" --micro-batch-size {micro_batch_size}"
                yield named, _forecast(other, candidate.run_plan, gpu)
