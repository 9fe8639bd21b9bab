"""``--cp-comm-type auto`` takes the exchange with which the run is the fastest by prediction."""

from dataclasses import replace

import pytest
import torch
from command_lines import with_flags
from harness.precisions import precision
from harness.still_watch import still_watch

from megatron.planning.dry_run import dry_run
from megatron.planning.forecast_run import forecast_run
from megatron.planning.known import NEAR
from megatron.planning.run_plan import make_run_plan
from megatron.planning.settled import settled
from megatron.run.command_line import parse
from megatron.run.run_config import RunConfig
from megatron.simulator.costs.gpus import gpu

BASE = (
    "--pipeline-model-parallel-size 2 --context-parallel-size 4 --num-layers 4 --hidden-size 1024 "
    "--num-attention-heads 8 --seq-length 8192 --micro-batch-size 1 --global-batch-size 4 "
    "--train-iters 10 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 999 --mock-data --bf16 "
    "--attention-dropout 0 --hidden-dropout 0 --cp-comm-type auto --dry-run"
)


def run(flags: str = "") -> RunConfig:
    return parse(with_flags(BASE.split(), flags.split()), 8)


@pytest.mark.parametrize(
    ("flags", "exchanges"),
    [
        ("", ["all_gather", "p2p", "a2a"]),
        ("--hierarchical-context-parallel-sizes 2 2", ["all_gather", "p2p", "a2a", "a2a+p2p"]),
        ("--attention-dropout 0.1", ["all_gather", "a2a"]),
        ("--group-query-attention --num-query-groups 2", ["all_gather", "p2p"]),
        ("--num-seq-splits 2", ["all_gather", "a2a"]),
        ("--context-parallel-size 1", []),
        ("--cp-comm-type p2p", []),
    ],
)
def test_only_exchanges_that_the_model_can_take_are_compared(
    flags: str, exchanges: list[str]
) -> None:
    found = run(flags)
    assert [own.parallel.context.exchange for own in found.alternatives] == exchanges
    heads = [own.parallel.context.heads_size for own in found.alternatives]
    assert heads == [2 if exchange == "a2a+p2p" else 1 for exchange in exchanges]


def test_sizes_that_do_not_make_all_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sizes 2 3 with --cp-comm-type auto and"):
        run("--hierarchical-context-parallel-sizes 2 3")


def test_the_fastest_by_whole_dry_runs_is_taken() -> None:
    asked = run().on(gpu("H100"))
    seconds = {}
    for own in asked.alternatives:
        named = run(f"--cp-comm-type {own.parallel.context.exchange}").on(gpu("H100"))
        assert named.parallel == own.parallel
        forecast = forecast_run(named, make_run_plan(named), gpu("H100"))
        seconds[own.parallel.context.exchange] = forecast.outcome.seconds
    found = settled(asked, make_run_plan(asked))
    assert found.alternatives == ()
    assert seconds[found.parallel.context.exchange] * (1 - NEAR) <= min(seconds.values())
    assert found.notes[-1] == f"auto takes --cp-comm-type {found.parallel.context.exchange}"


def test_without_times_all_gather_is_taken_with_the_reason() -> None:
    asked = run()
    single = replace(asked, train=replace(asked.train, precision=precision(torch.float32)))
    for config in (asked.on(None), single.on(gpu("H100"))):
        found = settled(config, make_run_plan(config))
        assert found.parallel.context.exchange == "all_gather"
        assert "needs a known GPU and 16 bits" in found.notes[-1]


def test_a_dry_run_tells_what_it_takes() -> None:
    told = "\n".join(dry_run(run(), gpu("H100"), still_watch()))
    assert "schedule 1f1b takes 1f1b with --cp-comm-type " in told
    assert all(f"--cp-comm-type {own}" in told for own in ("all_gather", "p2p", "a2a"))
