"""What the explorer counts of a model on a GPU is what ``--dry-run`` counts of the same run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from megatron.commands.exploring import model_costs
from megatron.commands.exploring.case import Case
from megatron.commands.exploring.simulated import Simulations
from megatron.model.flops import iteration_flops
from megatron.planning.forecast_run import forecast_run
from megatron.planning.planned_run import RunPlan
from megatron.run.command_line import parse
from megatron.run.recompute import EVERY_LAYER
from megatron.simulator.costs.gpus import gpu
from tools.explorer_cases import SMALL_MODEL

GPT: Final = {**SMALL_MODEL, "kind": "gpt", "groups": 16, "ffn": 8192, "gpu": "H100"}
LLAMA_FLAGS: Final = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--group-query-attention --num-query-groups 4"
)


def flags(case: Mapping[str, Any], replicas: int = 1) -> list[str]:
    """Return the command line of a training run that is like a case."""
    model = case["model"]
    words = (
        f"--pipeline-model-parallel-size 4 --pipeline-schedule {case['schedule']} "
        f"--vocab-parallel {case['vocab']} --num-layers {model['layers']} "
        f"--hidden-size {model['hidden']} --num-attention-heads {model['heads']} "
        f"--ffn-hidden-size {model['ffn']} --seq-length {model['seq']} "
        f"--max-position-embeddings {model['seq']} --micro-batch-size {model['batch']} "
        f"--global-batch-size {6 * replicas * model['batch']} --train-iters 1 --lr 1e-3 --bf16 "
        "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --dry-run "
        f"--vocab-size {model['vocabulary']} --dry-run-gpu {model['gpu']} "
        f"--ranks-per-node {model.get('machine', 8)}"
    )
    words += f" --num-seq-splits {case['n']}" if "n" in case else ""
    words += f" {LLAMA_FLAGS}" if model["kind"] == "llama" else ""
    words += f" {EVERY_LAYER}" if model["recompute"] else ""
    return words.split()


@pytest.mark.parametrize(
    "case",
    [
        {"schedule": "1f1b", "vocab": "vocab-2", "model": GPT},
        {"schedule": "1f1b", "vocab": "none", "model": {**SMALL_MODEL, "batch": 2}},
        {"schedule": "v-half", "vocab": "vocab-1", "model": {**SMALL_MODEL, "machine": 2}},
        {"schedule": "1f1b", "vocab": "redis", "model": GPT},
        {"schedule": "zb-h1", "vocab": "vocab-2", "model": {**SMALL_MODEL, "recompute": True}},
        {"schedule": "zb-v", "vocab": "vocab-2", "model": {**SMALL_MODEL, "seq": 8192}, "n": 4},
    ],
    ids=lambda case: f"{case['schedule']}, {case['vocab']}, {case['model']['kind']}",
)
def test_time_and_memory_are_those_of_a_dry_run(case: Mapping[str, Any]) -> None:
    config = parse(flags(case), world_size=4, speak=False)
    found = Simulations().of(Case.of_json({**case, "p": 4, "m": 6}))
    job, costs, request = found.case.model, found.model, found.scenario.request
    assert job is not None
    assert costs is not None
    samples = config.train.global_batch_size
    assert job.flops(found.done.plan.microbatches) == iteration_flops(config.model, samples)
    plan = RunPlan(found.done.plan, costs.layers, request.costs, request.schedule)
    expected = forecast_run(config, plan, gpu(job.gpu)).outcome
    outcome = job.forecast(request, found.done.program, found.done.timeline, costs)
    # The dry run slows passes beside collectives; the page does not.
    assert outcome.seconds == pytest.approx(expected.seconds, rel=0.05)
    assert outcome.step == pytest.approx(expected.step, rel=0.01)
    assert found.held == pytest.approx(expected.peak, rel=0.01)
    assert list(outcome.peak) == found.held


REPLICA_FLAGS: Final = {
    "overlap_reduce": "--overlap-grad-reduce",
    "sharded": "--use-distributed-optimizer",
    "overlap_gather": "--overlap-param-gather",
}


@pytest.mark.parametrize(
    "replicas",
    [{}, {"overlap_reduce": True}, dict.fromkeys(REPLICA_FLAGS, True)],
    ids=["at the end", "beside passes", "sharded"],
)
def test_replicas_take_about_the_time_and_memory_of_a_dry_run(replicas: Mapping[str, bool]) -> None:
    """Not quite: the page has buckets of one size, no padding, and no passes slowed beside them."""
    case = {"schedule": "1f1b", "vocab": "vocab-2", "model": {**GPT, "machine": 4}}
    asked = {**case, "p": 4, "m": 6, "replicas": {"count": 4, **replicas}}
    found, alone = (
        Simulations().of(Case.of_json(own)) for own in (asked, {**case, "p": 4, "m": 6})
    )
    words = [flag for name, flag in REPLICA_FLAGS.items() if replicas.get(name)]
    words += ["--rank-order", "tp-pp-dp"]  # a replica in a machine, as on the page
    config = parse([*flags(case, replicas=4), *words], world_size=16, speak=False)
    job, costs, request = found.case.model, found.model, found.scenario.request
    assert job is not None
    assert costs is not None
    plan = RunPlan(found.done.plan, costs.layers, request.costs, request.schedule)
    expected = forecast_run(config, plan, gpu(job.gpu)).outcome
    timeline = found.done.timeline
    outcome = job.forecast(request, found.done.program, timeline, costs, found.case.replicas)
    assert outcome.seconds == pytest.approx(expected.seconds, rel=0.08)
    assert list(outcome.peak) == pytest.approx(expected.peak, rel=0.02)
    assert timeline.end > 1.05 * alone.done.timeline.end


def test_slices_that_do_not_divide_a_sequence_are_refused() -> None:
    with pytest.raises(ValueError, match="3 slices of equal length do not divide 2048 tokens"):
        Simulations().of(Case.of_json({"p": 2, "m": 2, "n": 3, "model": SMALL_MODEL}))


def test_models_are_counted_without_torch() -> None:
    """The page runs where there is none."""
    assert "torch" not in Path(model_costs.__file__).read_text(encoding="utf-8")
