"""Infinity and NaN end the run on every rank, with the iteration and the rank that saw it first."""

import math
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from correctness.rank_runs import CPU, Batches, ListLoader, load, make_pipeline_groups
from correctness.short_runs import Job, Layout
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions, random_parameters

from megatron.layers.main_grad import main_grad_of
from megatron.parallel.groups import make_groups, single_rank
from megatron.run.run_config import RunConfig
from megatron.training.iteration import run_iteration
from megatron.training.post_validated_step import make_train_step
from megatron.training.setup import build_train_state
from megatron.training.step import Finished

JOB = Job(
    GPTOptions(num_layers=2, vocab_size=8, tie_embeddings=False), microbatches=3, iterations=3
)


def train_with_a_flaw(
    rank: int,
    world_size: int,
    *,
    config: RunConfig,
    batches: Batches,
    flaw: str,
    where: int,
    when: int = 1,
) -> tuple[int, str]:
    """Spoil a parameter of rank ``where`` after ``when`` iterations and train on.

    Returns:
        Iterations that were trained, and the error's message.
    """
    state = build_train_state(config, make_pipeline_groups())
    load(state, random_parameters(JOB.options))
    step, loader = make_train_step(config.optimizer, state), ListLoader(batches)
    try:
        for iteration in range(len(batches)):
            if iteration == when and rank == where:
                spoil(
                    {own.name: own.parameter for own in state.pipeline.model.owned_parameters()},
                    flaw,
                )
            run_iteration(step, config.optimizer, loader, state.groups, iteration)
    except FloatingPointError as error:
        return iteration, str(error)
    finally:
        state.pipeline.close()
    return len(batches), ""


def spoil(parameters: dict[str, torch.nn.Parameter], flaw: str) -> None:
    name, _, value = flaw.partition("=")
    if value == "gradient":
        main_grad_of(parameters[name]).fill_(torch.inf)
    else:
        parameters[name].detach().fill_(float(value))


@pytest.mark.parametrize(
    ("vocabulary", "flaw", "where", "found"),
    [
        ("none", "decoder.layers.0.mlp.linear_fc2.bias=nan", 0, "rank 0 .* the output of stage 0"),
        ("vocab-2", "decoder.layers.1.mlp.linear_fc2.bias=inf", 1, "rank 1 .* of stage 1"),
        ("none", "output_layer.weight=nan", 1, "rank 1 .* the output layer"),
        ("vocab-1", "output_layer.weight=nan", 0, "rank 0 .* the output layer"),
        ("vocab-2", "output_layer.weight=nan", 1, "rank 1 .* the output layer"),
        ("vocab-1", "embedding.word_embeddings.weight=nan", 1, "rank [01] "),
        ("vocab-2", "decoder.final_layernorm.weight=gradient", 1, "gradient is not, on rank 1"),
        ("none", "decoder.final_layernorm.weight=gradient", 1, "gradient is not, on rank 1"),
    ],
)
def test_error_names_iteration_and_rank_everywhere(
    vocabulary: str, flaw: str, where: int, found: str, ranks: RankPool
) -> None:
    results = ranks.run(
        train_with_a_flaw,
        2,
        config=JOB.config(Layout(2, vocabulary)),
        batches=JOB.batches(),
        flaw=flaw,
        where=where,
    )
    assert results[0] == results[1]
    iterations, message = results[0]
    assert iterations == 1
    pattern = rf"^iteration 2: lm loss is [\w.+-]+: .*{found}"
    with pytest.raises(FloatingPointError, match=pattern):
        raise FloatingPointError(message)


def test_a_single_rank_finds_it_too() -> None:
    config = JOB.config(Layout(1, "none"))
    state = build_train_state(config, single_rank(CPU))
    step, loader = make_train_step(config.optimizer, state), ListLoader(JOB.batches())
    run_iteration(step, config.optimizer, loader, state.groups, 0)
    spoil(
        {own.name: own.parameter for own in state.pipeline.model.owned_parameters()},
        "output_layer.weight=nan",
    )
    with pytest.raises(FloatingPointError, match="iteration 2: lm loss is nan: rank 0 saw it"):
        run_iteration(step, config.optimizer, loader, state.groups, 1)


def test_before_the_first_step_no_other_rate_is_advised(ranks: RankPool) -> None:
    config, flaw = JOB.config(Layout(2, "vocab-2")), "output_layer.weight=nan"
    advised = {}
    for when in (0, 1):
        [(_, message), _] = ranks.run(
            train_with_a_flaw,
            2,
            config=config,
            batches=JOB.batches(),
            flaw=flaw,
            where=0,
            when=when,
        )
        advised[when] = "lower --lr" in message
        assert f"--iterations-to-skip {when + 1} passes over them" in message
    assert advised == {0: False, 1: True}


REPLICAS = Job(
    GPTOptions(num_layers=2, vocab_size=8, tie_embeddings=False),
    micro_batch_size=2,
    microbatches=6,
    iterations=2,
)


def train_on_a_bad_token(
    rank: int, world_size: int, *, config: RunConfig, batches: Batches, bad: int
) -> tuple[str, list[range]]:
    """Train replicas of one rank; in the second iteration microbatch ``bad`` has a token of NaN.

    Returns:
        The error's message, and the samples of the iterations that were trained.
    """
    groups = make_groups(config.parallel.grid, CPU, timedelta(seconds=60))
    state = build_train_state(config, groups)
    loader = ListLoader(batches, (groups.data.rank, groups.data.size))
    step, trained = make_train_step(config.optimizer, state), list[range]()
    for batch in batches:
        for microbatch in batch:
            microbatch.tokens.clamp_(max=6)
    batches[1][bad].tokens[1, 2] = 7
    message = ""
    try:
        for number in range(len(batches)):
            finished = run_iteration(step, config.optimizer, loader, state.groups, number)
            assert finished is not None
            trained.append(finished.samples)
            for own in state.pipeline.model.owned_parameters():
                if own.name == "embedding.word_embeddings.weight":
                    own.parameter.detach()[7] = torch.nan
    except FloatingPointError as error:
        message = str(error)
    state.pipeline.close()
    return message, trained


@pytest.mark.parametrize("bad", [0, 3])
def test_samples_are_numbered_over_all_replicas(bad: int, ranks: RankPool) -> None:
    """Microbatch i of replica r is microbatch 2 i + r of the global batch."""
    results = ranks.run(
        train_on_a_bad_token,
        2,
        config=REPLICAS.config(Layout(1, "none", replicas=2)),
        batches=REPLICAS.batches(),
        bad=bad,
    )
    first = REPLICAS.micro_batch_size * (REPLICAS.microbatches + bad)
    expected = f"microbatch {bad} of the global batch, samples {first}-{first + 1}:"
    for message, trained in results:
        assert expected in message
        assert f"rank {bad % 2} saw it first" in message
        assert trained == [range(12)]


def train_on_a_bad_mask(
    rank: int, world_size: int, *, config: RunConfig, batches: Batches
) -> tuple[list[Finished], bool]:
    """Train on although the loss of the second iteration is NaN.

    Returns:
        All iterations, and whether the weights are finite at the end.
    """
    state = build_train_state(config, make_pipeline_groups())
    step = make_train_step(config.optimizer, state, ends_if_not_finite=False)
    batches[1][0].loss_mask.fill_(torch.nan)
    loader, done = ListLoader(batches), list[Finished | None]()
    for number in range(len(batches)):
        done.append(run_iteration(step, config.optimizer, loader, state.groups, number))
    done.append(step.settle())
    state.pipeline.close()
    finite = all(bool(own.parameter.isfinite().all()) for own in state.parameters)
    return [iteration for iteration in done if iteration is not None], finite


@pytest.mark.parametrize("post_validation", [False, True])
def test_an_iteration_without_a_step_leaves_the_weights_as_they_are(
    post_validation: bool, ranks: RankPool
) -> None:
    config = JOB.config(Layout(2, "vocab-2"))
    optimizer = replace(config.optimizer, post_validation=post_validation)
    results = ranks.run(
        train_on_a_bad_mask,
        2,
        config=replace(config, optimizer=optimizer),
        batches=JOB.batches(),
    )
    for done, finite in results:
        assert [iteration.is_skipped for iteration in done] == [False, True, False]
        assert [math.isfinite(iteration.loss) for iteration in done] == [True, False, True]
        counted = [iteration.samples_without_step for iteration in done]
        assert counted == [0, 3, 3], "rates do not count the samples of the second iteration"
        assert finite
