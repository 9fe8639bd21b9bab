"""``PipelineRunner``: the project's executor runs any plan over the caller's own layers."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.kernels.choose import kernels_for
from megatron.layers.main_grad import give_main_grad
from megatron.layers.vocabulary.input_layer import InputLayer
from megatron.layers.vocabulary.output_layer import OutputLayer
from megatron.layers.vocabulary.output_s import statistics_dtype
from megatron.layers.vocabulary.shard import VocabularyShard
from megatron.library.own_stages import OwnPasses, OwnStages, WholeHead, WholeVocabulary
from megatron.library.vocabulary import IGNORED, VocabParallelEmbedding, VocabParallelHead
from megatron.parallel.grid import Grid, Tiling
from megatron.parallel.groups import CONTROL, STATE, Groups, connect_grid, single_rank
from megatron.parallel.lanes import make_lane
from megatron.runtime.batch import DeviceMicrobatch
from megatron.runtime.communicator import Communicator
from megatron.runtime.executor import Executor
from megatron.runtime.store import ActivationStore
from megatron.runtime.units import UnitTensors
from megatron.schedules.check import check
from megatron.schedules.costs import Time
from megatron.schedules.lower import Program, lower
from megatron.schedules.plan import Plan, evaluation_plan
from megatron.simulator.costs.cost_file import named_costs

Head = VocabParallelHead | nn.Module
"""A ``VocabParallelHead``, or any module (hidden states [b, s, h], labels [b, s]) -> mean loss.

Shapes: b samples of a microbatch, s tokens of a sample, h hidden size.
"""


class PipelineRunner:
    """One rank of a pipeline over the caller's own modules.

    ``step`` runs an iteration by the plan and leaves gradients in ``.grad``, as ``loss.backward()``
    of the unsplit model would. The caller's code runs optimizer, clipping and replicas. Every rank
    of the pipeline makes a runner. If ranks make several runners, all make them in the same order.
    A method is called on all ranks together.

    Args:
        plan: by ``megatron.library.plans.plan``, ``from_torch_csv`` or ``Plan.from_text``.
        stages: a module for every chunk of this rank, in the order of ``own_stages(plan, rank)``:
            hidden states [b, s, h] -> [b, s, h]. The module itself makes all other input that its
            layers need, such as positions and masks.
        hidden_size: h.
        embedding: token ids [b, s] -> [b, s, h]. If the plan's vocabulary treatment is ``none``:
            any module, needed on the rank of the first stage. Otherwise: a
            ``VocabParallelEmbedding`` over the pipeline's ranks.
        head: hidden states and labels -> loss. If the treatment is ``none``: any module that
            returns the mean loss of a microbatch, or a ``VocabParallelHead`` of this rank alone;
            needed on the rank of the last stage. Otherwise: a ``VocabParallelHead`` over the
            pipeline's ranks.
        group: process group of the pipeline; by default the group of all ranks.
        costs: as for ``plan``; they decide where in the order communication is issued.

    Attributes:
        plan: the plan.

    Raises:
        ValueError: if the plan cannot be run, or if modules are missing or do not fit the plan.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Sequence[nn.Module],
        *,
        hidden_size: int,
        embedding: nn.Module | None = None,
        head: Head | None = None,
        group: dist.ProcessGroup | None = None,
        costs: Mapping[str, Time] | None = None,
    ) -> None:
        check(plan)
        self.plan = plan
        parameter = next((p for stage in stages for p in stage.parameters()), None)
        if parameter is None:
            raise ValueError("the stages have no parameter: a rank needs something to train")
        self._device, self._dtype = parameter.device, parameter.dtype
        self._groups = pipeline_groups(group, plan.ranks, self._device)
        self._rank, self._hidden_size = self._groups.pipeline.rank, hidden_size
        self._head, self._embedding = head, embedding
        self._refuse_misfits(stages)
        self._model = OwnStages(stages, *self._shards(), split=plan.split_backward)
        self._store, self._valid = ActivationStore(), torch.ones(())
        whole = None if plan.treatment.is_sharded else self._whole()
        self._passes = OwnPasses(self._model, plan, self._rank, self._store, whole)
        self._lane = make_lane(self._device, plan.ranks, "vocabulary")
        known = named_costs(costs)
        self._training = lower(plan, known)
        self._evaluation = lower(evaluation_plan(plan), known)

    def step(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Run forward and backward of an iteration; gradients are added to ``.grad``.

        Args:
            tokens: ids [m b, s] of all m microbatches, the same on every rank.
            labels: ids [m b, s] of the tokens that follow. A label of -100 (the ``ignore_index`` of
                a ``VocabParallelHead``) has no loss.

        Returns:
            The loss, a scalar on every rank. With a ``VocabParallelHead`` it is the mean over all
            tokens of the batch that are not ignored, with any other head the mean over the
            microbatches.

        Raises:
            ValueError: if the batch does not split into m microbatches.
        """
        totals = {p: self._give_total(p) for p in self._model.gathering}
        loss = self._run(self._training, tokens, labels, training=True)
        for parameter, total in totals.items():
            _hand_over(parameter, total)
        return loss

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the same loss as ``step``, with modules in evaluation mode, without gradients."""
        return self._run(self._evaluation, tokens, labels, training=False)

    def close(self) -> None:
        """Leave the modules as they were before this runner, and end the runner's lane."""
        self._model.close()
        self._lane.close()

    def _run(self, program: Program, tokens: Tensor, labels: Tensor, *, training: bool) -> Tensor:
        batch = self._microbatches(tokens, labels)
        shape = (batch[0].samples, tokens.shape[1], self._hidden_size)
        tensors = UnitTensors([shape], self._dtype, self._dtype)
        communicator = Communicator(self._groups, self.plan, self._passes, self._lane, tensors)
        self._passes.begin(batch, 0, training=training, predicts_ahead=False)
        for part in (self._embedding, self._head):
            if part is not None:
                part.train(training)
        Executor(self._passes, communicator).run(program)
        loss: Tensor = self._passes.loss(self._device)[0].to(statistics_dtype(self._dtype))
        self._groups.pipeline.all_reduce(loss)
        return loss

    def _microbatches(self, tokens: Tensor, labels: Tensor) -> list[DeviceMicrobatch]:
        m = self.plan.microbatches
        if tokens.ndim != 2 or tokens.shape != labels.shape or len(tokens) % m or not len(tokens):
            raise ValueError(
                f"tokens {tuple(tokens.shape)} and labels {tuple(labels.shape)}: give both as "
                f"[samples, tokens], with a multiple of the plan's {m} microbatches as samples"
            )
        ignored = self._head.ignore_index if isinstance(self._head, VocabParallelHead) else IGNORED
        own, targets = tokens.to(self._device), labels.to(self._device)
        counts = (targets != ignored).to(statistics_dtype(self._dtype))
        valid = counts.sum().clamp_min(1)
        self._valid = valid
        parts = zip(own.chunk(m), targets.chunk(m), (counts / valid).chunk(m), strict=True)
        nobody_asks = float("nan")  # tokens that count; to know it, the host would wait for the GPU
        return [
            DeviceMicrobatch(t.flatten(), y.flatten(), g.flatten(), len(t), nobody_asks)
            for t, y, g in parts
        ]

    def _shards(self) -> tuple[InputLayer | None, OutputLayer | None]:
        """Return the layers that hold this rank's rows of a split vocabulary."""
        head, embedding = self._head, self._embedding
        if not self.plan.treatment.is_sharded:
            return None, None
        assert isinstance(head, VocabParallelHead)
        assert isinstance(embedding, VocabParallelEmbedding)
        kernels = kernels_for(self._device, self._dtype)
        looked_up = InputLayer(
            embedding.shard, self._hidden_size, kernels, self._dtype, torch.device("meta")
        )
        looked_up.weight = embedding.weight
        return looked_up, OutputLayer(
            head.shard, head.weight, head.options, kernels, head.recompute
        )

    def _whole(self) -> WholeVocabulary:
        return WholeVocabulary(
            self._model, self.plan, self._rank, self._store, self._embedding, self._part_of_loss()
        )

    def _part_of_loss(self) -> WholeHead | None:
        """Return the function from a microbatch to its part of the iteration's loss."""
        head = self._head
        if head is None:
            return None
        if isinstance(head, VocabParallelHead):
            return lambda x_bsh, labels_bs: head(x_bsh, labels_bs, "sum") / self._valid
        return lambda x_bsh, labels_bs: head(x_bsh, labels_bs) / self.plan.microbatches

    def _refuse_misfits(self, stages: Sequence[nn.Module]) -> None:
        plan, rank = self.plan, self._rank
        if len(stages) != plan.chunks:
            raise ValueError(f"{len(stages)} stages for {plan.chunks} chunks of rank {rank}")
        if plan.forward_only:
            raise ValueError(
                "the plan is 'forward only': step needs its backward; evaluate makes its own"
            )
        if plan.treatment.is_sharded:
            kinds = ((self._embedding, VocabParallelEmbedding), (self._head, VocabParallelHead))
            for part, kind in kinds:
                _refuse_shard(part, kind, plan, rank)
            return
        for part, place, name in ((self._embedding, 0, "embedding"), (self._head, -1, "head")):
            if part is None and plan.stages[place][0] == rank:
                raise ValueError(f"rank {rank} has the stage of the {name}: give it {name}=")

    def _give_total(self, parameter: Tensor) -> Tensor:
        """Return the buffer in which passes add up a gradient: ``.grad``, if its dtype is wide."""
        if parameter.grad is None and statistics_dtype(parameter.dtype) == parameter.dtype:
            parameter.grad = torch.zeros_like(parameter)
        total = parameter.grad
        if total is None or total.dtype != statistics_dtype(parameter.dtype):
            total = torch.zeros_like(parameter, dtype=statistics_dtype(parameter.dtype))
        give_main_grad(parameter, total)
        return total


def _hand_over(parameter: Tensor, total: Tensor) -> None:
    """Add ``total`` to ``.grad``, unless passes have added it up there."""
    parameter.__dict__.pop("main_grad")
    if total is parameter.grad:
        return
    narrow = total.to(parameter.dtype)
    parameter.grad = narrow if parameter.grad is None else parameter.grad.add_(narrow)


def _refuse_shard(part: object, kind: type[nn.Module], plan: Plan, rank: int) -> None:
    if not isinstance(part, (VocabParallelEmbedding, VocabParallelHead)) or type(part) is not kind:
        raise ValueError(
            f"the plan has the vocabulary treatment {plan.treatment.name}: give every rank a "
            f"{kind.__name__} over the pipeline's ranks, or make a plan with 'none'"
        )
    padded = -(-part.vocab_size // plan.ranks) * plan.ranks
    if part.shard != VocabularyShard.of(part.vocab_size, padded, rank, plan.ranks):
        raise ValueError(
            f"the {kind.__name__} has the rows from {part.shard.first_row} on, which is no shard "
            f"of rank {rank} of {plan.ranks}: build it with the pipeline's group"
        )


def pipeline_groups(group: dist.ProcessGroup | None, ranks: int, device: torch.device) -> Groups:
    """Return a pipeline's process groups. Only the ranks of the pipeline need to call this.

    Without ``group`` the pipeline has all ranks.

    Raises:
        ValueError: if the group does not have ``ranks`` ranks.
    """
    alone = group is None and not dist.is_initialized()
    size = 1 if alone else dist.get_world_size(group)
    if size != ranks:
        raise ValueError(f"the plan is for {ranks} ranks, the process group has {size}")
    if size == 1:
        return single_rank(device)
    own = dist.group.WORLD if group is None else group
    places = dist.get_process_group_ranks(own)
    _count_groups_alike(own, device)

    def connect(use: str, tiling: Tiling) -> dist.ProcessGroup | None:
        if use in (CONTROL, STATE):
            return own
        made: dist.ProcessGroup = dist.new_group(
            places, group_desc=use, use_local_synchronization=True
        )
        return made

    return connect_grid(Grid(pipeline_size=size), dist.get_rank(own), device, (0, 0), connect)


def _count_groups_alike(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Make every rank of a group a member of equally many process groups.

    A new group that only its own ranks make gets its name from PyTorch: the name holds the ranks,
    and the number of groups that the process is in. If this number differs between ranks, they wait
    for each other under different names, for ever. It differs under Megatron-Core, where only the
    first rank is in the group of the position embeddings. So a rank in fewer groups makes further
    groups, in which it is alone.
    """
    mine = len(dist.distributed_c10d._world.pg_names)  # PyTorch has no public name for this number
    most = torch.tensor(mine, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    for _ in range(int(most) - mine):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
