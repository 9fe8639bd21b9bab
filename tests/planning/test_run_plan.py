"""What is planned before any rank starts: the same everywhere, balanced, and within its limits."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness.precisions import precision

from megatron.data.settings import DataSettings
from megatron.data.shares import Split
from megatron.layers.patterns import LayerPattern
from megatron.model.distribution import LayerDistribution
from megatron.model.settings import ModelSettings
from megatron.optimizer.settings import OptimizerSettings
from megatron.parallel.settings import DeviceSettings, PipelineRankSettings
from megatron.planning.planned_run import RunPlan
from megatron.planning.run_costs import stage_costs
from megatron.planning.run_plan import make_run_plan
from megatron.run.log import LogSettings
from megatron.run.parallel_config import ParallelConfig
from megatron.run.run_config import RunConfig
from megatron.run.train import TrainSettings
from megatron.schedules.check import check
from megatron.schedules.costs import Costs
from megatron.schedules.make_plan import make_plan
from megatron.schedules.passes import Pass
from megatron.schedules.plan import Plan, plan_of_one
from megatron.schedules.settings import PlanSettings, ScheduleSettings
from megatron.schedules.treatment_settings import TreatmentSettings
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.cost_file import save_costs

ROOT = Path(__file__).resolve().parents[2]


def config(
    schedule: str = "1f1b",
    treatment: str = "none",
    ranks: int = 2,
    layers: int = 8,
    vocab_size: int = 5000,
    microbatches: int = 4,
    distribution: LayerDistribution | None = None,
    chunks: int | None = None,
    **parallel: Any,
) -> RunConfig:
    planning = {name: parallel.pop(name) for name in vars(PlanSettings()) if name in parallel}
    redis = LayerDistribution("redis" if treatment == "redis" else "even")
    return RunConfig(
        model=ModelSettings.of(
            num_layers=layers,
            hidden_size=512,
            ffn_hidden_size=2048,
            num_attention_heads=8,
            num_query_groups=8,
            kv_channels=64,
            seq_length=128,
            max_position_embeddings=128,
            vocab_size=vocab_size,
        ),
        parallel=ParallelConfig(
            pipeline=PipelineRankSettings(ranks),
            treatment=TreatmentSettings(treatment),
            schedule=ScheduleSettings(schedule, num_virtual_stages_per_pipeline_rank=chunks),
            padded_vocab_size=-(-vocab_size // ranks) * ranks,
            devices=DeviceSettings("cpu", "gloo", 1),
            layers=redis if distribution is None else distribution,
            planning=PlanSettings(**planning),
            **parallel,
        ),
        train=TrainSettings(
            micro_batch_size=1,
            global_batch_size=microbatches,
            train_iters=1,
            exit_interval=None,
            seed=1,
            precision=precision(torch.float32),
            eval_interval=None,
            eval_iters=0,
        ),
        optimizer=OptimizerSettings(lr=1.0),
        data=DataSettings(split=Split(1, 0, 0), seq_length=128, seed=0),
        log=LogSettings(log_interval=1),
    )


def rank_times(found: RunPlan) -> list[float]:
    """Work of every rank in one microbatch."""
    plan, costs = replace(found.plan, microbatches=1), found.costs
    return [
        sum(costs.of_pass(plan, rank, item) for item in row if item.microbatch == 0)
        for rank, row in enumerate(plan.rows)
    ]


@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-1p", "v-half"])
def test_plan_layers_and_costs_go_together(schedule: str, treatment: str) -> None:
    found = make_run_plan(config(schedule, treatment))
    assert found.plan.treatment.name == ("none" if treatment == "redis" else treatment)
    assert (found.plan.ranks, found.plan.microbatches) == (2, 4)
    assert len(found.layers) == len(found.plan.stages)
    assert sum(found.layers) == 8
    assert all(time > 0 for time in rank_times(found))


def test_chunks_of_a_rank() -> None:
    found = make_run_plan(config("interleaved", layers=12, chunks=3))
    assert found.plan.chunks == 3
    assert found.layers == (2,) * 6


def test_layers_that_do_not_divide_are_refused_with_the_stages_of_the_schedule() -> None:
    assert make_run_plan(config("1f1b", layers=6)).layers == (3, 3)
    with pytest.raises(ValueError, match=r"--num-layers 6 .* 4 stages .* 4 or 8"):
        make_run_plan(config("zb-v", layers=6))


@pytest.mark.parametrize("vocab_size", [1000, 30_000, 60_000])
@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 3), ("v-half", 2), ("interleaved", 2)])
def test_redis_has_the_fastest_slowest_rank_of_all_distributions(
    schedule: str, ranks: int, vocab_size: int
) -> None:
    run = config(schedule, "redis", ranks, 7, vocab_size)
    found = make_run_plan(run)
    assumed = stage_costs(run, plan_of_one(found.plan), found.layers)

    def slowest(counts: tuple[int, ...]) -> float:
        return max(rank_times(replace(found, costs=assumed.costs(counts))))

    every = [c for c in product(range(8), repeat=len(found.plan.stages)) if sum(c) == 7]
    assert slowest(found.layers) == pytest.approx(min(map(slowest, every)))
    # A B without products counts its bytes where W is apart, as costs of stages have it.
    assert max(rank_times(found)) == pytest.approx(slowest(found.layers), rel=0.01)


def test_a_large_vocabulary_leaves_the_last_stage_without_layers() -> None:
    assert make_run_plan(config("1f1b", "redis", 4, vocab_size=100_000)).layers[-1] == 0


def test_the_last_stage_may_be_decided() -> None:
    decided = LayerDistribution("redis", last=2)
    found = make_run_plan(config("1f1b", "redis", 3, vocab_size=5000, distribution=decided))
    assert found.layers == (3, 3, 2)
    in_a_v = config("zb-v", "redis", 2, vocab_size=100_000, distribution=decided)
    assert make_run_plan(in_a_v).layers == (0, 3, 3, 2), "rank 0 has the vocabulary too"


def mixture(layers: str, distribution: LayerDistribution) -> RunConfig:
    """Return a run of a mixture whose dense layers (0) are four times as wide as an expert."""
    run = config("1f1b", "vocab-2", layers=len(layers), distribution=distribution)
    return replace(
        run,
        model=run.model.replaced(
            num_experts=8,
            moe_layer_freq=LayerPattern(listed=tuple(map(int, layers))),
            moe_ffn_hidden_size=512,
            moe_router_topk=1,
        ),
    )


@pytest.mark.parametrize(
    ("layers", "expected"),
    [("00111111", (3, 5)), ("1111111", (3, 4)), ("01010101", (4, 4)), ("11111100", (5, 3))],
)
def test_a_mixture_is_spread_by_the_cost_of_its_layers(
    layers: str, expected: tuple[int, int]
) -> None:
    by_cost = mixture(layers, LayerDistribution("cost"))
    found = make_run_plan(by_cost)
    assert found.layers == expected
    even = make_run_plan(mixture(layers, LayerDistribution("remainder")))
    assert max(rank_times(found)) <= max(rank_times(even)) * 1.001


EMPTY_RANKS = [
    (
        {"ranks": 3, "layers": 2, "distribution": LayerDistribution("explicit", counts=(1, 0, 1))},
        "1",
    ),
    ({"ranks": 4, "layers": 2, "distribution": LayerDistribution("remainder")}, "2"),
    ({"ranks": 3, "layers": 2, "distribution": LayerDistribution(first=1, last=1)}, "1"),
    ({"ranks": 4, "layers": 1, "treatment": "redis"}, "1"),
    ({"ranks": 5, "layers": 2, "distribution": LayerDistribution("remainder")}, "2, 3"),
]


@pytest.mark.parametrize(("changes", "empty"), EMPTY_RANKS)
def test_a_rank_without_parameters_is_refused(changes: dict[str, Any], empty: str) -> None:
    with pytest.raises(
        ValueError, match=r"--num-layers \d with --.* leaves rank .*: give"
    ) as caught:
        make_run_plan(config(**changes))
    assert f" leaves rank {empty} without a layer" in str(caught.value)


@pytest.mark.parametrize("changes", [changes for changes, _ in EMPTY_RANKS[:3]])
def test_a_shard_of_the_vocabulary_is_enough_for_a_rank(changes: dict[str, Any]) -> None:
    assert sum(make_run_plan(config(treatment="vocab-2", **changes)).layers) == 2


@pytest.mark.parametrize("treatment", ["redis", "vocab-2"])
def test_measured_costs_leave_every_layer_where_it_is(treatment: str) -> None:
    auto = config("auto", treatment, 2)
    first = make_run_plan(auto)
    others = {kind: time for kind, time in first.costs.passes.items() if kind not in "FBW"}
    chunks = range(first.plan.chunks)
    table = [[1.0 + 3 * rank + chunk for chunk in chunks] for rank in range(2)]
    measured = Costs({"F": table, "B": table, "W": table, **others})
    again = make_run_plan(auto, measured)
    assert again.plan.stages == first.plan.stages
    assert again.layers == first.layers
    assert again.costs == measured


def test_measured_costs_without_w_do_not_split_the_backward() -> None:
    fused = config("1f1b", "none", 2)
    costs = Costs({"F": 1.0, "B": 2.0})
    assert not make_run_plan(fused, costs).plan.split_backward


def test_costs_of_a_file_balance_the_layers(tmp_path: Path) -> None:
    """A last rank that is twice as slow gets fewer layers; the file's layers do not matter."""
    file = tmp_path / "costs.json"
    table = [[4.0], [4.0], [16.0]]
    save_costs(file, Costs({"F": table, "B": table, "W": table}), [[4], [4], [4]])
    redis = config("zb-h1", "redis", 3, layers=12, measured_costs=file)
    found = make_run_plan(redis)
    assert found.layers == (6, 6, 0)
    assert rank_times(found) == [18.0, 18.0, 36.0]
    even = config("zb-h1", "none", 3, layers=12, measured_costs=file)
    assert rank_times(make_run_plan(even)) == [12.0, 12.0, 48.0]


def test_a_file_of_costs_that_is_no_good_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--measured-costs .*nowhere.json"):
        make_run_plan(config(measured_costs=tmp_path / "nowhere.json"))
    save_costs(tmp_path / "costs.json", Costs({"F": [[1.0]], "B": [[1.0]]}), [[8]])
    with pytest.raises(ValueError, match=r"--measured-costs .*costs.json: .* 2 ranks"):
        make_run_plan(config(measured_costs=tmp_path / "costs.json"))


def test_costs_without_w_are_refused_where_the_backward_is_split(tmp_path: Path) -> None:
    save_costs(tmp_path / "costs.json", Costs({"F": [[1.0]] * 2, "B": [[2.0]] * 2}), [[4], [4]])
    make_run_plan(config("1f1b", measured_costs=tmp_path / "costs.json"))
    with pytest.raises(
        ValueError, match=r"--measured-costs .*costs.json: no W passes, which zb-1p runs"
    ):
        make_run_plan(config("zb-1p", measured_costs=tmp_path / "costs.json"))


def test_a_plan_from_the_simulate_command_trains(tmp_path: Path) -> None:
    file = tmp_path / "plan.txt"
    command = [sys.executable, str(ROOT / "tools" / "simulate.py"), "--schedule", "v-half"]
    command += ["--vocab", "vocab-2", "-p", "2", "-m", "4", "--save-plan", str(file)]
    subprocess.run(command, check=True, capture_output=True)
    found = make_run_plan(config("file", "vocab-2", schedule_file=file))
    assert found.plan == Plan.from_text(file.read_text())
    assert found.layers == (2, 2, 2, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"treatment": "none"}, "vocab-2, not none: ask for vocab-2"),
        ({"ranks": 4}, "2 ranks, not 4 ranks"),
        ({"microbatches": 5}, "4 microbatches, not 5 microbatches"),
        ({"layers": 7}, "--num-layers 7"),
    ],
)
def test_a_plan_of_another_run_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "plan.txt"
    file.write_text(make_plan("v-half", "vocab-2", 2, 4).to_text())
    wanted: dict[str, Any] = {"schedule": "file", "treatment": "vocab-2", "schedule_file": file}
    with pytest.raises(ValueError, match=message):
        make_run_plan(config(**(wanted | changes)))


def test_a_plan_file_is_parsed_and_checked_once(tmp_path: Path) -> None:
    """Though its stages are asked for before its costs, and its costs before its plan."""
    file = tmp_path / "plan.txt"
    file.write_text(make_plan("v-half", "vocab-2", 2, 4).to_text())
    with (
        patch.object(Plan, "from_text", side_effect=Plan.from_text) as parsed,
        patch("megatron.schedules.plan_file.check", side_effect=check) as checked,
    ):
        make_run_plan(config("file", "vocab-2", schedule_file=file))
    assert (parsed.call_count, checked.call_count) == (1, 1)


def test_a_plan_file_that_changed_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "plan.txt"
    for schedule in ("1f1b", "gpipe"):
        plan = make_plan(schedule, "none", 2, 4)
        file.write_text(plan.to_text())
        assert make_run_plan(config("file", schedule_file=file)).plan == plan


def test_a_file_that_skips_a_pass_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "plan.txt"
    plan = make_plan("1f1b", "none", 2, 4)
    row = tuple(item for item in plan.rows[0] if item != Pass("B", 2))
    file.write_text(Plan((row, plan.rows[1]), plan.stages, 4).to_text())
    with pytest.raises(ValueError, match="B2"):
        make_run_plan(config("file", schedule_file=file))


def test_every_process_makes_the_same_plan() -> None:
    """Ranks plan alone: nothing may depend on the order of a hash table."""
    program = (
        "from planning.test_run_plan import config, make_run_plan\n"
        "for case in (('auto', 'vocab-2'), ('zb-1p', 'interlaced', 3, 6)):\n"
        "    found = make_run_plan(config(*case))\n"
        "    print(found.plan.to_text(), found.layers, found.costs)\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            check=True,
            capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        ).stdout
        for seed in ("0", "1")
    }
    assert len(printed) == 1
    assert len(printed.pop()) > 1000


def test_layers_that_fit_no_stages_are_refused_before_any_stage_is_laid_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block of 65,536 ranks takes seconds, and every schedule has its own."""
    monkeypatch.delattr("megatron.planning.run_request.stages_of")
    with pytest.raises(ValueError, match="--num-layers 8 is not divisible by the 65536 stages"):
        make_run_plan(config("auto", ranks=65536))
