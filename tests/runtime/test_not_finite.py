"""Infinity and NaN end the run on every rank, with the iteration and the rank that saw it first."""

import pytest
import torch
from correctness.rank_runs import CPU, Batches, ListLoader, load, make_pipeline_groups
from correctness.short_runs import Job, Layout
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions, random_parameters

from megatron.config.run_config import RunConfig
from megatron.layers.main_grad import main_grad_of
from megatron.parallel.groups import single_rank
from megatron.training.iteration import run_iteration
from megatron.training.setup import build_train_state
from megatron.training.step import make_train_step

JOB = Job(
    GPTOptions(num_layers=2, vocab_size=8, tie_embeddings=False), microbatches=3, iterations=3
)


def train_with_a_flaw(
    rank: int, world_size: int, *, config: RunConfig, batches: Batches, flaw: str, where: int
) -> tuple[int, str]:
    """Spoil a parameter of rank ``where`` after the first iteration and train on.

    Returns:
        Iterations that were trained, and the error's message.
    """
    state = build_train_state(config, make_pipeline_groups())
    load(state, random_parameters(JOB.options))
    step, loader = make_train_step(config.optimizer, state), ListLoader(batches)
    try:
        for iteration in range(len(batches)):
            if iteration == 1 and rank == where:
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
