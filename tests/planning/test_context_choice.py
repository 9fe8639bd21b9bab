"""``--cp-comm-type auto`` takes the exchange that a dry run predicts to be the fastest."""

from dataclasses import replace

import pytest
import torch
from command_lines import with_flags
from harness.still_watch import still_watch

from megatron.config.command_line import parse
from megatron.config.parallelism import ContextChoice
from megatron.config.run_config import RunConfig
from megatron.planning.context_choice import with_context_exchange
from megatron.planning.dry_run import dry_run
from megatron.planning.forecast_run import forecast_run
from megatron.planning.run_plan import make_run_plan
from megatron.simulator.costs.gpus import gpu

BASE = (
    "--pipeline-model-parallel-size 2 --context-parallel-size 4 --num-layers 4 --hidden-size 1024 "
    "--num-attention-heads 8 --seq-length 8192 --micro-batch-size 1 --global-batch-size 4 "
    "--train-iters 10 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 999 --mock-data --bf16 "
    "--attention-dropout 0 --hidden-dropout 0 --cp-comm-type auto --dry-run"
)
GATHERS, RING, HEADS = ContextChoice("all_gather"), ContextChoice("p2p"), ContextChoice("a2a")
LEVELS = ContextChoice("a2a+p2p", 2)


def run(flags: str = "") -> RunConfig:
    return parse(with_flags(BASE.split(), flags.split()), 8)


def on_gpus(config: RunConfig) -> RunConfig:
    return replace(config, parallel=replace(config.parallel, gpu=gpu("H100")))


@pytest.mark.parametrize(
    ("flags", "choices"),
    [
        ("", (GATHERS, RING, HEADS)),
        ("--hierarchical-context-parallel-sizes 2 2", (GATHERS, RING, HEADS, LEVELS)),
        ("--attention-dropout 0.1", (GATHERS, HEADS)),
        ("--group-query-attention --num-query-groups 2", (GATHERS, RING)),
        ("--num-seq-splits 2", (GATHERS, HEADS)),
        ("--context-parallel-size 1", ()),
        ("--cp-comm-type p2p", ()),
    ],
)
def test_only_exchanges_that_the_model_can_take_are_compared(
    flags: str, choices: tuple[ContextChoice, ...]
) -> None:
    assert run(flags).context_choices == choices


def test_sizes_that_do_not_make_all_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sizes 2 3 with --cp-comm-type auto and"):
        run("--hierarchical-context-parallel-sizes 2 3")


def test_the_fastest_by_whole_dry_runs_is_taken() -> None:
    asked = on_gpus(run())
    seconds = {}
    for choice in asked.context_choices:
        parallel = replace(asked.parallel, context_exchange=choice.exchange)
        named = replace(asked, parallel=parallel, context_choices=())
        seconds[choice.exchange] = forecast_run(
            named, make_run_plan(named), gpu("H100")
        ).outcome.seconds
    found = with_context_exchange(asked)
    assert found.parallel.context_exchange == min(seconds, key=seconds.__getitem__)
    assert found.context_choices == ()
    assert all(choice.exchange in found.notes[-1] for choice in asked.context_choices)


def test_without_times_all_gather_is_taken_with_the_reason() -> None:
    asked = run()
    unknown = replace(asked, parallel=replace(asked.parallel, gpu=None))
    single = replace(asked, train=replace(asked.train, dtype=torch.float32))
    for config in (unknown, on_gpus(single)):
        found = with_context_exchange(config)
        assert found.parallel.context_exchange == "all_gather"
        assert "need a known GPU and 16 bits" in found.notes[-1]


def test_a_dry_run_tells_what_it_takes() -> None:
    first = next(iter(dry_run(run(), gpu("H100"), still_watch())))
    assert first.startswith("--cp-comm-type auto takes ")
