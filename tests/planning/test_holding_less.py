"""Changes that hold less are what their flags say, and hold less."""

from dataclasses import replace

import pytest
from command_lines import with_flags

from megatron.config.command_line import parse
from megatron.config.precision import NARROW_SUMS
from megatron.config.run_config import RunConfig
from megatron.planning.candidate import Candidate
from megatron.planning.holding_less import CHANGES, holding_less
from megatron.planning.run_plan import asked
from megatron.planning.what_would_fit import what_would_fit
from megatron.schedules.search.watch import Watch
from megatron.simulator.costs.gpus import USABLE, gpu

RUN = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 512 --vocab-size 999 "
    "--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --train-iters 1 --bf16 --dry-run "
    "--dry-run-gpu H100 --pipeline-model-parallel-size 2 --swiglu"
)
MIXTURE = "--num-experts 4 --moe-router-topk 2"
NORMS = "--recompute-activations --recompute-modules layernorm"


CONTEXT = "--context-parallel-size 2"


def run_of(*flags: str) -> RunConfig:
    run = parse(with_flags(RUN.split(), " ".join(flags).split()), 1, speak=False)
    return replace(run, parallel=replace(run.parallel, gpu=gpu("H100")))


@pytest.mark.parametrize(
    ("own", "named"),
    [
        ("", ["--vocab-recompute", NARROW_SUMS, NORMS, f"{NORMS} mlp_act"]),
        ("--recompute-activations", [f"{NORMS.replace('layernorm', 'core_attn layernorm')}"]),
        (f"{MIXTURE} --moe-layer-freq 2", [f"{NORMS} mlp_act moe_act"]),
        (MIXTURE, [f"{NORMS} moe_act"]),
        (f"{CONTEXT} --attention-dropout 0", ["--cp-comm-type p2p"]),
    ],
)
def test_a_change_is_the_run_with_its_flags(own: str, named: list[str]) -> None:
    found = dict(holding_less(run_of(own)))
    assert set(named) <= set(found)
    for flags, changed in found.items():
        asked_for = run_of("" if own and own in flags else own, flags)
        assert changed.train == asked_for.train, flags
        assert changed.parallel == asked_for.parallel, flags


@pytest.mark.parametrize(
    ("own", "left_out"),
    [
        ("--recompute-granularity full --recompute-method uniform", "--recompute"),
        ("--optimizer sgd", NARROW_SUMS),
        (NARROW_SUMS, NARROW_SUMS),
        ("--vocab-recompute", "--vocab-recompute"),
        (CONTEXT, "--cp-comm-type"),
        (f"{CONTEXT} --attention-dropout 0 --num-seq-splits 2", "--cp-comm-type"),
        ("--squared-relu", "mlp_act"),
        (f"{NORMS} mlp_act", "layernorm"),
    ],
)
def test_a_change_that_changes_nothing_or_cannot_be_is_left_out(own: str, left_out: str) -> None:
    flags = own.replace("--squared-relu", "")
    run = run_of(flags)
    if own != flags:
        run = replace(run, model=run.model.replaced(activation="squared_relu"))
    found = dict(holding_less(run))
    assert 0 < len(found) < len(CHANGES)
    assert not any(left_out in words for words in found)


def candidate_of(run: RunConfig) -> Candidate:
    [found] = asked(run)
    return found


def test_every_change_holds_less() -> None:
    run = run_of(f"{CONTEXT} --attention-dropout 0")
    own = candidate_of(run).least_memory.peak
    for flags, changed in holding_less(run):
        if flags != "--vocab-recompute":  # of few words, of which one rank has all
            assert candidate_of(changed).least_memory.peak < own, flags


def test_the_advice_names_sums_in_bf16_and_their_price() -> None:
    """On a GPU that lacks room for a quarter of the gradients."""
    run = run_of("--pipeline-model-parallel-size 1")
    whole = candidate_of(run).forecast
    assert whole is not None
    gradients = 4 * whole.memories[0].count.parameters.all
    held = whole.fullest.peak + whole.fullest.outside
    less = replace(gpu("H100"), memory=(held - gradients / 4) / USABLE)
    told = what_would_fit(run, less, whole.fullest, Watch(20.0))
    assert f"\n  {NARROW_SUMS}: " in told
    assert "rounds every sum of gradients" in told
