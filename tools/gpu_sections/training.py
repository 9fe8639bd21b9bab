"""One rank trains: its passes against their products, the optimizer's traffic, and the memory."""

from collections.abc import Mapping
from statistics import fmean
from typing import Final

import torch

from megatron.model.flops import iteration_flops
from megatron.parallel.groups import single_rank
from megatron.planning.count.run import count_ranks
from megatron.planning.forecast_run import forecast_run
from megatron.planning.host_share import host_shares
from megatron.planning.planned_run import RunPlan
from megatron.planning.run_memory import moved_by_step, run_memory
from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig
from megatron.runtime.batch import to_device
from megatron.schedules.passes import PassKind
from megatron.schedules.plan import plan_of_one
from megatron.simulator.costs.count import RankCount
from megatron.simulator.costs.gpus import GIB
from megatron.training.metrics.peak_memory import peak_memory
from megatron.training.metrics.peak_tflops import peak_of_rank
from megatron.training.setup import TrainState, build_train_state
from tools.benchmarking.case import BenchmarkCase
from tools.benchmarking.run import recorded_step
from tools.gpu_sections.timing import Scale, Section, seconds_of, table

WARM_UPS: Final = 2

_MEASURED: Final[tuple[PassKind, ...]] = ("F", "B", "W")


def case_of(scale: Scale, schedule: str = "zb-h1") -> BenchmarkCase:
    """Return the job of one GPU: four layers of 4096, V = 128k, 8 microbatches of 2048 tokens.

    It holds 1.9 G parameters, whose states take 34 GB.
    """
    h, layers, s, v = (64, 2, 32, 1280) if scale.small else (4096, 4, 2048, 128_000)
    return BenchmarkCase(
        vocab_size=v,
        schedule=schedule,
        treatment="none",
        ranks=1,
        microbatches=8,
        hidden_size=h,
        layers=layers,
        heads=h // 16 if scale.small else 32,
        seq_length=s,
        dtype="bfloat16",
        device="cuda" if scale.device.type == "cuda" else "cpu",
    )


def measure(scale: Scale) -> Section:
    """Train some iterations with split backwards, and compare every kind of pass."""
    case = case_of(scale)
    config = case.run_config()
    run_plan = make_run_plan(config)
    state = build_train_state(config, single_rank(scale.device), run_plan)
    batch = to_device(case.batch(), scale.device)
    for iteration in range(WARM_UPS + 1):
        taken, recorder = recorded_step(state, batch, iteration)
    passes = state.pipeline.timeline(recorder).compute(0)
    kinds = {span.kind for span in passes}
    own = {kind: fmean(s.end - s.start for s in passes if s.kind == kind) for kind in kinds}
    rate = product_rate(scale, case)
    lines, values = _passes(config, own, rate, run_plan)
    more, figures = _iteration(scale, config, state, taken)
    memory = _memory(scale, config, run_plan)
    return Section([*lines, "", *more, "", memory], {**values, **figures, "memory": memory})


def product_rate(scale: Scale, case: BenchmarkCase) -> float:
    """Return FLOP/s of a product of the MLP, [s, h] x [h, 4h]."""
    s, h = case.seq_length, case.hidden_size
    x = torch.randn(s, h, device=scale.device, dtype=case.torch_dtype)
    w = torch.randn(h, 4 * h, device=scale.device, dtype=case.torch_dtype)
    out = torch.empty(s, 4 * h, device=scale.device, dtype=case.torch_dtype)
    return 2 * s * h * 4 * h / seconds_of(scale, lambda: torch.mm(x, w, out=out))


def _passes(
    config: RunConfig, own: Mapping[str, float], rate: float, run_plan: RunPlan
) -> tuple[list[str], dict[str, object]]:
    """Return the times of F, B and W over the times of their products at the measured rate.

    The last stage's output layer is in them: two of its products in F, one in W.
    """
    [count] = _counts(config, run_plan)
    flops = {kind: count.passes[kind, 0].flops for kind in _MEASURED}
    rows = [
        (kind, 1e3 * own[kind], flops[kind] / 1e9, own[kind] * rate / flops[kind])
        for kind in _MEASURED
    ]
    head = ("pass", "ms", "GFLOP", "time / products")
    said = f"Products run at {rate / 1e12:.4g} TFLOP/s ([s, h] x [h, 4h], bf16)."
    ratios = {f"{kind} / products": ratio for kind, _, _, ratio in rows}
    return [said, "", *table(head, rows)], {"product_tflops": rate / 1e12, **ratios}


def _iteration(
    scale: Scale, config: RunConfig, state: TrainState, taken: Mapping[str, float]
) -> tuple[list[str], dict[str, object]]:
    """Return MFU, and the bytes that the optimizer's step moves in a second."""
    train = config.train
    flops = iteration_flops(config.model, train.num_microbatches * train.micro_batch_size)
    peak = peak_of_rank(scale.device, train.dtype, None)
    whole = taken["schedule"] + taken["update"]
    counts = _counts(config, state.run_plan)
    shares = host_shares(config, state.run_plan.plan, counts, ())
    [moved] = moved_by_step(config, counts, shares)
    speed = moved / taken["update"]
    mfu = flops / whole / 1e12 / peak.tflops
    known = scale.gpu
    share = "" if known is None else f", {speed / known.bandwidth:.1%} of the memory's bandwidth"
    return [
        f"* iteration {1e3 * whole:.4g} ms, of which the step {1e3 * taken['update']:.4g} ms; MFU "
        f"{mfu:.1%} of {peak.tflops:.4g} TFLOP/s ({peak.source})",
        f"* the optimizer's step moves {moved / 1e9:.4g} GB as counted, {speed / 1e9:.4g} GB/s"
        f"{share}",
    ], {"iteration_s": whole, "mfu": mfu, "optimizer_bytes_per_s": speed}


def _memory(scale: Scale, config: RunConfig, run_plan: RunPlan) -> str:
    """Return the peak of memory, measured and counted by a dry run."""
    held = peak_memory(scale.device).held
    known = scale.gpu
    if known is not None:
        [counted] = forecast_run(config, run_plan, known).outcome.peak
        off = f"{held / counted - 1:+.1%}"
        return (
            f"* memory: tensors {held / GIB:.3f} GiB, the dry run counts {counted / GIB:.3f}: {off}"
        )
    [memory] = run_memory(config, run_plan.plan, _counts(config, run_plan))
    return (
        f"* memory: this process {held / GIB:.3f} GiB with PyTorch itself; the dry run counts "
        f"{memory.always / GIB:.3f} GiB for parameters, gradients and optimizer"
    )


def _counts(config: RunConfig, run_plan: RunPlan) -> list[RankCount]:
    return count_ranks(config, plan_of_one(run_plan.plan), run_plan.layers)
