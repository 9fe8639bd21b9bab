"""What one rank of a test does with the real framework, and what it brings home.

The functions run in the rank pool; they return what this rank holds by global parameter names, and
`assemble` puts the whole model together from that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha1
from typing import Any

import torch
import torch.distributed as dist
from harness.patience import collective_seconds
from reference.plain_gpt import Parameters
from reference.plain_loss import Microbatch

from megatron.data import microbatch
from megatron.parallel.box import Box, Shape, check_tiling
from megatron.parallel.grid import Grid
from megatron.parallel.groups import Groups, make_groups
from megatron.planning.planned_run import RunPlan
from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig
from megatron.runtime.batch import DeviceMicrobatch, to_device, token_counts
from megatron.runtime.embedding_copies import ranks_with_copies
from megatron.training.checkpointing import Checkpoints
from megatron.training.iteration import evaluate, run_iteration
from megatron.training.open_checkpoints import writer_hosts
from megatron.training.own_tokens import kept_tokens
from megatron.training.post_validated_step import make_train_step
from megatron.training.setup import TrainState, build_train_state
from megatron.training.step import Finished

CPU = torch.device("cpu")

Batches = Sequence[Sequence[Microbatch]]
Fingerprints = dict[tuple[str, Box], str]
Pieces = dict[str, tuple[Shape, list[tuple[Box, torch.Tensor]]]]
"""By global name: the first row that this rank holds, and what it holds."""


class ListLoader(microbatch.MicrobatchLoader):
    """Hands out a replica's share of given batches as the loader of a data set would.

    Args:
        batches: global batches.
        replica: number of the replica, and number of replicas, which take microbatches in turn.
        kept: positions of a sample that the rank keeps; all by default.
        depths: further tokens that every token predicts.
    """

    def __init__(
        self,
        batches: Batches,
        replica: tuple[int, int] = (0, 1),
        kept: torch.Tensor | None = None,
        depths: int = 0,
    ) -> None:
        self._batches = iter(batches)
        self._replica, self._replicas = replica
        self._kept, self._depths = kept, depths
        self.consumed_samples = 0

    def next_batch(self) -> list[microbatch.Microbatch]:
        """The microbatches of the next iteration."""
        batch = next(self._batches)
        self.consumed_samples += sum(len(m.tokens) for m in batch)
        return [
            microbatch.Microbatch(
                m.tokens, m.labels, m.loss_mask, m.document_starts, m.positions
            ).part(self._kept, self._depths)
            for m in batch[self._replica :: self._replicas]
        ]


@dataclass
class RankRun:
    """What a training run left on one rank.

    Attributes:
        losses: of every iteration.
        gradient_norms: of every iteration, before clipping.
        num_zeros: of the gradient of every iteration, if they are counted.
        params_norms: of the weights after every iteration, if they are asked for.
        initial: parameters before training.
        first_gradients: gradients of the first iteration, before clipping.
        after_steps: fingerprints of the parameters after every iteration, by name and box.
        final: parameters after training.
        evaluations: loss of every evaluation asked for.
        peak_in_flight: microbatches between F and B that the store has seen.
        left_in_store: values in the store at the end.
        depth_losses: of every iteration, those of the depths of multi-token prediction.
        layer_losses: of every iteration, those of routers by name.
        imbalances: of every iteration, the largest imbalance of experts.
        expert_loads: of every iteration and layer with experts, the load of each expert.
        buffers: tensors of the model without gradients after training, by name.
    """

    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    num_zeros: list[int | None] = field(default_factory=list)
    params_norms: list[float | None] = field(default_factory=list)
    initial: Pieces = field(default_factory=dict)
    first_gradients: Pieces = field(default_factory=dict)
    after_steps: list[Fingerprints] = field(default_factory=list)
    final: Pieces = field(default_factory=dict)
    evaluations: list[float] = field(default_factory=list)
    peak_in_flight: int = 0
    left_in_store: int = 0
    depth_losses: list[tuple[float, ...]] = field(default_factory=list)
    layer_losses: list[dict[str, float]] = field(default_factory=list)
    imbalances: list[float] = field(default_factory=list)
    expert_loads: list[list[tuple[int, ...]]] = field(default_factory=list)
    buffers: Parameters = field(default_factory=dict)

    def note(self, finished: Finished | None) -> None:
        """Note what is known of an iteration once it is final."""
        if finished is not None:
            self.losses.append(finished.loss)
            self.depth_losses.append(finished.depth_losses)
            self.layer_losses.append(finished.layers.mean_losses)
            if largest := finished.layers.largest:
                self.imbalances.append(largest.ratio)
            self.expert_loads.append([own.loads for own in finished.layers.imbalances])
            self.gradient_norms.append(finished.grad_norm)
            self.num_zeros.append(finished.num_zeros)
            self.params_norms.append(finished.params_norm)


def make_pipeline_groups() -> Groups:
    """This rank's groups in the pool's process group, all of which is one pipeline."""
    timeout = timedelta(seconds=collective_seconds())
    return make_groups(Grid(pipeline_size=dist.get_world_size()), CPU, timeout)


def connected(config: RunConfig, run_plan: RunPlan | None = None) -> Groups:
    """This rank's groups in the pool's process group, which has the ranks of a run."""
    plan = (run_plan or make_run_plan(config)).plan
    ends = ranks_with_copies(plan, tied=config.model.vocabulary.tie_embeddings)
    timeout = timedelta(seconds=collective_seconds())
    return make_groups(config.parallel.grid, CPU, timeout, ends)


def train_on_rank(
    rank: int,
    world_size: int,
    *,
    config: RunConfig,
    batches: Batches,
    evaluation_batches: Batches = (),
    evaluate_after: Sequence[int] = (),
    run_plan: RunPlan | None = None,
) -> RankRun:
    """Train on every batch; look at the gradients of the first one before they are used.

    Args:
        rank: given by the pool.
        world_size: given by the pool.
        config: of the run; it begins with the checkpoint that it loads, if any.
        batches: one per iteration.
        evaluation_batches: for all evaluations together.
        evaluate_after: iterations that are followed by an evaluation.
        run_plan: of the run, if the test has made it: every rank would count the layers anew.
    """
    state = build_train_state(config, connected(config, run_plan), run_plan)
    groups = state.groups
    if config.checkpoint.load is not None:
        hosts = writer_hosts(groups, config.checkpoint)
        assert Checkpoints(config, state, hosts, lambda text: None).load() is not None
    run = RankRun(initial=pieces(state, parameter_values))
    replica, kept = groups.replica, kept_tokens(config, groups.context.rank)
    by_microbatch = not config.data.weighs_tokens_alike
    train, first = state.pipeline.train, to_device(batches[0], CPU, by_microbatch=by_microbatch)

    def watched(batch: Any, iteration: int, *args: Any, **kwargs: Any) -> Any:
        loss = train(batch, iteration, *args, **kwargs)
        if iteration == 0:
            run.first_gradients = gradient_pieces(state, first)
        return loss

    vars(state.pipeline)["train"] = watched
    loader, evaluation_loader = (
        ListLoader(batches, replica, kept, config.model.further.mtp_num_layers),
        ListLoader(evaluation_batches, replica, kept, config.model.further.mtp_num_layers),
    )
    step = make_train_step(config.optimizer, state, config.log)
    for iteration in range(len(batches)):
        finished = run_iteration(
            step,
            config.optimizer,
            loader,
            state.groups,
            iteration,
            by_microbatch=by_microbatch,
        )
        run.note(finished)
        run.after_steps.append(fingerprints(state))
        if iteration in evaluate_after:
            run.note(step.settle())
            run.evaluations.append(evaluate(state, evaluation_loader, config.train.eval_iters))
    run.note(step.settle())
    run.final = pieces(state, parameter_values)
    model = state.pipeline.model
    run.buffers = {own.name: own.buffer.clone() for own in model.owned_buffers()}
    run.peak_in_flight = state.pipeline.store.peak_in_flight
    run.left_in_store = len(state.pipeline.store)
    state.close()
    return run


def gradients_on_rank(
    rank: int,
    world_size: int,
    *,
    config: RunConfig,
    parameters: Parameters,
    batch: Sequence[Microbatch],
    loss_scale: float = 1.0,
) -> tuple[float, Pieces]:
    """Loss and gradients of one batch for given parameters, in the precision of ``config``.

    Both hold the loss scale.
    """
    state = build_train_state(config, make_pipeline_groups())
    load(state, parameters)
    statistics = torch.promote_types(config.train.dtype, torch.float32)
    on_device = to_device(batch, CPU, statistics, loss_scale=loss_scale)
    loss = state.pipeline.train(on_device, 0)
    assert loss is not None
    loss = loss.double() * factor(on_device)
    state.groups.pipeline.all_reduce(loss)
    state.close()
    return float(loss), gradient_pieces(state, on_device)


def load(state: TrainState, parameters: Parameters) -> None:
    """Put whole parameters into what this rank holds; padding becomes zero."""
    with torch.no_grad():
        for own in state.pipeline.model.owned_parameters():
            own.parameter.zero_()
            for box, part in own.parts(own.parameter):
                part.copy_(parameters[own.name][box.slices])


def fingerprints(state: TrainState) -> Fingerprints:
    """A digest of every part of the model that this rank holds, to compare it with its copies."""
    return {
        (own.name, box): sha1(part.detach().contiguous().view(torch.uint8).numpy().data).hexdigest()
        for own in state.pipeline.model.owned_parameters()
        for box, part in own.parts(own.parameter)
    }


def check_agreement(runs: Sequence[RankRun]) -> None:
    """Check that every rank reports the same, and that nothing is left in a store."""
    for own in runs:
        assert own.losses == runs[0].losses
        assert own.depth_losses == runs[0].depth_losses
        assert own.gradient_norms == runs[0].gradient_norms
        assert own.layer_losses == runs[0].layer_losses
        assert own.imbalances == runs[0].imbalances
        assert own.expert_loads == runs[0].expert_loads
        assert own.evaluations == runs[0].evaluations
        assert own.left_in_store == 0


def check_copies(runs: Sequence[RankRun]) -> None:
    """Check that copies were equal to the last bit after every step."""
    first: dict[tuple[int, str, Box], str] = {}
    for run in runs:
        for step, own in enumerate(run.after_steps):
            for (name, box), digest in own.items():
                known = first.setdefault((step, name, box), digest)
                assert known == digest, f"after step {step} the copies of {name} differ"


def parameter_values(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().clone()


def factor(batch: Sequence[DeviceMicrobatch]) -> float:
    """All tokens by those that count, which the passes do not know."""
    if batch[0].loss_factor is not None:
        return 1.0
    tokens, valid = token_counts(batch)
    return tokens / valid if valid else 1.0


def gradient_pieces(state: TrainState, batch: Sequence[DeviceMicrobatch]) -> Pieces:
    """Gradients of the mean over the tokens of ``batch`` that count, as far as this rank has them.

    Of several replicas each has its own shards; padding must be zero.
    """
    held: Pieces = {}
    for part in state.counted:
        values = part.gradient * factor(batch)
        boxes = [(piece.box, values[piece.local.slices].clone()) for piece in part.pieces]
        held[part.name] = part.global_shape, boxes
        for piece in part.pieces:
            values[piece.local.slices] = 0
        assert not values.any(), f"the padding of {part.name} has gradients"
    return held


def pieces(state: TrainState, read: Callable[[torch.Tensor], torch.Tensor]) -> Pieces:
    """What this rank holds of something that every parameter has; its padding must be zero."""
    held: Pieces = {}
    for own in state.pipeline.model.owned_parameters():
        values = read(own.parameter)
        held[own.name] = own.global_shape, list(own.parts(values))
        padding = values.clone()
        for _, part in own.parts(padding):
            part.zero_()
        assert not padding.any(), f"the padding of {own.name} is not zero"
    return held


def assemble(by_rank: Sequence[Pieces]) -> Parameters:
    """Put the whole model together from what every rank holds.

    Copies must agree to the last bit, and every element must be there.
    """
    shapes = {name: shape for own in by_rank for name, (shape, _) in own.items()}
    found: dict[str, dict[Box, torch.Tensor]] = {name: {} for name in shapes}
    for own in by_rank:
        for name, (shape, parts) in own.items():
            assert shape == shapes[name], f"the ranks disagree on the shape of {name}"
            for box, value in parts:
                copy = found[name].setdefault(box, value)
                assert torch.equal(copy, value), f"the copies of {name} differ"
    whole: Parameters = {}
    for name, boxes in found.items():
        check_tiling(shapes[name], list(boxes))
        whole[name] = torch.empty(shapes[name], dtype=next(iter(boxes.values())).dtype)
        for box, value in boxes.items():
            whole[name][box.slices] = value
    return whole
