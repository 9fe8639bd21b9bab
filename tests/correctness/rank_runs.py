"""What one rank of a test does with the real framework, and what it brings home.

The functions run in the rank pool; they return what this rank holds by global parameter names, and
`assemble` puts the whole model together from that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from reference.plain_gpt import Parameters
from reference.plain_loss import Microbatch

from megatron.config.run_config import RunConfig
from megatron.data import microbatch
from megatron.layers.main_grad import main_grad_of
from megatron.parallel.grid import Grid
from megatron.parallel.groups import Groups, make_groups
from megatron.runtime.batch import to_device
from megatron.training.loop import evaluate, run_iteration
from megatron.training.setup import TrainState, build_train_state
from megatron.training.step import Finished, make_train_step

CPU = torch.device("cpu")
VOCABULARY_MATRICES = ("embedding.word_embeddings.weight", "output_layer.weight")

Batches = Sequence[Sequence[Microbatch]]
Pieces = dict[str, tuple[int, torch.Tensor]]
"""By global name: the first row that this rank holds, and what it holds."""


class ListLoader(microbatch.MicrobatchLoader):
    """Hands out given batches as the loader of a data set would."""

    def __init__(self, batches: Batches, consumed_samples: int = 0) -> None:
        self._batches = iter(batches)
        self.consumed_samples = consumed_samples

    def next_batch(self) -> list[microbatch.Microbatch]:
        """The microbatches of the next iteration."""
        batch = [
            microbatch.Microbatch(m.tokens, m.labels, m.loss_mask) for m in next(self._batches)
        ]
        self.consumed_samples += sum(len(m.tokens) for m in batch)
        return batch


@dataclass
class RankRun:
    """What a training run left on one rank.

    Attributes:
        losses: of every iteration.
        gradient_norms: of every iteration, before clipping.
        initial: parameters before training.
        first_gradients: gradients of the first iteration, before clipping.
        final: parameters after training.
        evaluations: loss of every evaluation asked for.
        peak_in_flight: microbatches between F and B that the store has seen.
        left_in_store: values in the store at the end.
    """

    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    initial: Pieces = field(default_factory=dict)
    first_gradients: Pieces = field(default_factory=dict)
    final: Pieces = field(default_factory=dict)
    evaluations: list[float] = field(default_factory=list)
    peak_in_flight: int = 0
    left_in_store: int = 0

    def note(self, finished: Finished | None) -> None:
        """Note what is known of an iteration once it is final."""
        if finished is not None:
            self.losses.append(finished.loss)
            self.gradient_norms.append(finished.grad_norm)


def make_pipeline_groups() -> Groups:
    """This rank's groups in the pool's process group, all of which is one pipeline."""
    return make_groups(Grid(pipeline_size=dist.get_world_size()), CPU, timedelta(seconds=60))


def train_on_rank(
    rank: int,
    world_size: int,
    *,
    config: RunConfig,
    batches: Batches,
    evaluation_batches: Batches = (),
    evaluate_after: Sequence[int] = (),
) -> RankRun:
    """Train on every batch; look at the gradients of the first one beforehand.

    Args:
        rank: given by the pool.
        world_size: given by the pool.
        config: of the run.
        batches: one per iteration.
        evaluation_batches: for all evaluations together.
        evaluate_after: iterations that are followed by an evaluation.
    """
    state = build_train_state(config, make_pipeline_groups())
    run = RankRun(initial=pieces(state, parameter_values))
    state.pipeline.train(to_device(batches[0], CPU), 0)
    run.first_gradients = pieces(state, main_gradients)
    state.gradients.zero()
    loader, evaluation_loader = ListLoader(batches), ListLoader(evaluation_batches)
    step = make_train_step(config.optimizer, state)
    for iteration in range(len(batches)):
        run.note(run_iteration(step, config.optimizer, loader, CPU, iteration))
        if iteration in evaluate_after:
            run.note(step.settle())
            run.evaluations.append(evaluate(state, evaluation_loader, config.train.eval_iters))
    run.note(step.settle())
    run.final = pieces(state, parameter_values)
    run.peak_in_flight = state.pipeline.store.peak_in_flight
    run.left_in_store = len(state.pipeline.store)
    state.pipeline.close()
    return run


def gradients_on_rank(
    rank: int,
    world_size: int,
    *,
    config: RunConfig,
    parameters: Parameters,
    batch: Sequence[Microbatch],
) -> tuple[float, Pieces]:
    """Loss and gradients of one batch for given parameters, in the precision of ``config``."""
    state = build_train_state(config, make_pipeline_groups())
    load(state, parameters)
    statistics = torch.promote_types(config.train.dtype, torch.float32)
    loss = state.pipeline.train(to_device(batch, CPU, statistics), 0)
    assert loss is not None
    loss = loss.double()
    state.groups.pipeline.all_reduce(loss)
    state.pipeline.close()
    return float(loss), pieces(state, main_gradients)


def load(state: TrainState, parameters: Parameters) -> None:
    """Put whole parameters into what this rank holds; padding becomes zero."""
    for name, parameter in state.pipeline.model.global_parameters():
        whole = parameters[name]
        with torch.no_grad():
            if name in VOCABULARY_MATRICES:
                first = first_row(state, name)
                whole = whole[first : first + len(parameter)]
                parameter.zero_()
            parameter[: len(whole)].copy_(whole)


def first_row(state: TrainState, name: str) -> int:
    """The vocabulary id of the first row of this rank's part of a matrix."""
    if name not in VOCABULARY_MATRICES:
        return 0
    model = state.pipeline.model
    layer = model.input_layer if name == VOCABULARY_MATRICES[0] else model.output_layer
    layer = layer or model.output_layer  # the last rank's copy of a tied embedding
    assert layer is not None
    return layer.shard.first_row


def parameter_values(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().clone()


def main_gradients(parameter: torch.Tensor) -> torch.Tensor:
    return main_grad_of(parameter).clone()


def pieces(state: TrainState, read: Callable[[torch.Tensor], torch.Tensor]) -> Pieces:
    """What this rank holds of something that every parameter has."""
    return {
        name: (first_row(state, name), read(parameter))
        for name, parameter in state.pipeline.model.global_parameters()
    }


def assemble(by_rank: Sequence[Pieces], vocab_size: int) -> Parameters:
    """Put the whole model together from what every rank holds.

    Copies must agree to the last bit, and padding must be zero.
    """
    found: dict[str, dict[int, torch.Tensor]] = {}
    for own in by_rank:
        for name, (row, value) in own.items():
            copy = found.setdefault(name, {}).setdefault(row, value)
            assert torch.equal(copy, value), f"the copies of {name} differ"
    whole = {
        name: torch.cat([parts[row] for row in sorted(parts)]) for name, parts in found.items()
    }
    for name in VOCABULARY_MATRICES:
        if name in whole:
            assert not whole[name][vocab_size:].any(), f"the padding of {name} is not zero"
            whole[name] = whole[name][:vocab_size]
    return whole
