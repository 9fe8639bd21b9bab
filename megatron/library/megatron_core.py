"""Megatron-Core's models under our plans: a replacement of its ``get_forward_backward_func()``.

Megatron-Core's schedules are functions that call the user's ``forward_step_func`` and send tensors
between stages. ``forward_backward_func`` makes a function with the same arguments and results. In
it a plan decides the order, and our executor runs the plan. A stage's forward and backward remain
Megatron-Core's own functions, so losses, scales and token counts do not change.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.layers.vocabulary.output_s import Merged
from megatron.library.plans import plan as make_plan
from megatron.library.runner import pipeline_groups
from megatron.parallel.groups import Groups
from megatron.parallel.lanes import InlineLane
from megatron.runtime.communicator import Communicator
from megatron.runtime.executor import Executor
from megatron.runtime.store import ActivationStore
from megatron.runtime.units import UnitTensors
from megatron.schedules.lower import lower
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan, evaluation_plan

REFUSED: Final[Mapping[str, str]] = {
    "no_sync_func": "replicas add gradients up at the end: leave overlap_grad_reduce out",
    "grad_sync_func": "replicas add gradients up at the end: leave overlap_grad_reduce out",
    "param_sync_func": "parameters are gathered at the beginning: leave overlap_param_gather out",
    "variable_seq_lengths": "all microbatches have one shape: pad them",
    "overlap_moe_expert_parallel_comm": "a forward and a backward do not run as one: leave it out",
    "hybrid_context_parallel": "its microbatches are not those of a plan: leave it out",
    "fine_grained_activation_offloading": "it counts on Megatron-Core's order: leave it out",
    "defer_embedding_wgrad_compute": "it counts on Megatron-Core's order: leave it out",
    "delay_wgrad_compute": "a layer's backward forms the gradient of its weight: leave it out",
    "num_microbatches_with_partial_activation_checkpoints": "every microbatch is recomputed alike: "
    "leave it out",
}
"""Fields of Megatron-Core's configuration whose effect would be missing here, with the way out."""


class ForwardBackward:
    """A replacement of the function that Megatron-Core's ``get_forward_backward_func()`` returns.

    The model is this rank's chunk, or the list of its chunks. The plan says which stages they are.
    With ``1f1b`` and ``interleaved``, these are the stages that Megatron-Core builds on the rank.
    With a V-shaped schedule, the caller builds the chunks for the stages that
    ``megatron.library.plans.own_stages`` lists.

    Args:
        schedule: name of a schedule, or a plan whose vocabulary is not split.
        options: further arguments of ``megatron.library.plans.plan``, behind ranks and
            microbatches.
    """

    def __init__(self, schedule: str | Plan = "1f1b", **options: Any) -> None:
        self._schedule, self._options = schedule, options
        self._plans: dict[int, Plan] = {}
        self._connected: dict[object, Groups] = {}

    def plan(self, ranks: int, microbatches: int, chunks: int) -> Plan:
        """Return the plan of an iteration.

        Raises:
            ValueError: if there is no such plan, or the given plan is for other numbers of ranks,
                microbatches or chunks.
        """
        made = self._schedule
        if isinstance(made, str):
            if microbatches not in self._plans:
                more = {"chunks": chunks} if chunks > 1 else {}
                self._plans[microbatches] = make_plan(
                    made, ranks, microbatches, **{**more, **self._options}
                )
            made = self._plans[microbatches]
        _check_plan(made, ranks, microbatches, chunks)
        return made

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """Run forward and backward of an iteration; the arguments are Megatron-Core's.

        Returns:
            On the rank of the last stage, the report of the loss function on every microbatch.

        Raises:
            ValueError: if the plan does not fit the model; or if an argument, or a field of the
                model's configuration, asks for an effect that would be missing.
        """
        core = import_module("megatron.core.pipeline_parallel.schedules")
        state = core.parallel_state
        chunks = list(model) if isinstance(model, list) else [model]
        config = core.get_model_config(chunks[0])
        check_arguments(config, decoder_seq_length, adjust_tensor_shapes_fn, p2p_communicator)
        group = (
            state.get_pipeline_model_parallel_group() if pg_collection is None else pg_collection.pp
        )
        ranks = dist.get_world_size(group)
        training = self.plan(ranks, num_microbatches, len(chunks))
        plan = evaluation_plan(training) if forward_only else training
        groups = self._groups(group, ranks, next(p.device for p in chunks[0].parameters()))
        steps = _CoreSteps(
            core,
            plan,
            chunks,
            config,
            forward_step_func,
            data_iterator if isinstance(data_iterator, list) else [data_iterator],
            collect_non_loss_data,
            lambda begins: core.check_first_val_step(first_val_step, forward_only, begins),
        )
        passes = CorePasses(plan, groups.pipeline.rank, steps.forward, steps.backward)
        passes.frees_outputs = bool(config.deallocate_pipeline_outputs)
        dtype = config.pipeline_dtype or next(p.dtype for p in chunks[0].parameters())
        tokens = seq_length // state.get_context_parallel_world_size()
        if config.sequence_parallel:
            tokens //= state.get_tensor_model_parallel_world_size()
        tensors = UnitTensors([(tokens, micro_batch_size, config.hidden_size)], dtype, dtype)
        communicator = Communicator(groups, plan, passes, InlineLane(), tensors)
        Executor(passes, communicator).run(lower(plan))
        if config.finalize_model_grads_func is not None and not forward_only:
            config.finalize_model_grads_func(
                chunks,
                passes.tokens if config.calculate_per_token_loss else None,
                pg_collection=pg_collection,
                force_all_reduce=force_all_reduce,
            )
        return steps.reported

    def _groups(self, group: Any, ranks: int, device: torch.device) -> Groups:
        """Return this rank's view of Megatron-Core's pipeline, which is made once."""
        key = (group, device)
        if key not in self._connected:
            self._connected[key] = pipeline_groups(group, ranks, device)
        return self._connected[key]


@dataclass(frozen=True)
class _CoreSteps:
    """Megatron-Core's functions for the forward and the backward of a stage, in one iteration.

    Attributes:
        core: Megatron-Core's module of schedules.
        plan: the plan that runs.
        chunks: of the model, on this rank.
        config: of the model.
        forward_step: the user's function.
        iterators: over data, for every chunk.
        collects_other_data: whether the last stage's forward collects data in place of losses.
        is_first: returns whether a pass belongs to the first microbatch, given whether it has the
            number 0.
        reported: the report of the loss function on every microbatch so far.
    """

    core: Any
    plan: Plan
    chunks: Sequence[Any]
    config: Any
    forward_step: Callable[..., Any]
    iterators: Sequence[Any]
    collects_other_data: bool
    is_first: Callable[[bool], Any]
    reported: list[Any] = field(default_factory=list)

    def forward(self, item: Pass, stage: int, x_sbh: Tensor | None) -> tuple[Any, Tensor]:
        """As ``CorePasses`` needs it."""
        found: tuple[Any, Tensor] = self.core.forward_step(
            self.forward_step,
            self.iterators[item.chunk],
            self.chunks[item.chunk],
            self.plan.microbatches,
            x_sbh,
            self.reported,
            self.config,
            self.core.parallel_state.get_context_parallel_world_size(),
            collect_non_loss_data=self.collects_other_data,
            is_first_microbatch=self.is_first(item.microbatch == 0),
            current_microbatch=item.microbatch,
            vp_stage=item.chunk if len(self.chunks) > 1 else None,
            is_last_stage=stage == len(self.plan.stages) - 1,
        )
        return found

    def backward(self, x_sbh: Tensor | None, output: Any, gradient: Tensor | None) -> Tensor | None:
        """As ``CorePasses`` needs it."""
        kind = self.core.get_model_type(self.chunks[0])
        found: Tensor | None = self.core.backward_step(x_sbh, output, gradient, kind, self.config)
        return found


forward_backward_func = ForwardBackward
"""The function to call in place of Megatron-Core's ``get_forward_backward_func``."""


class CorePasses:
    """The passes of a rank over Megatron-Core's forward and backward of a stage.

    Args:
        plan: the plan that runs.
        rank: pipeline rank.
        forward: runs a stage's forward, from a pass, its stage and the stage's input.
        backward: runs a stage's backward, from the stage's input and output and the output's
            gradient.

    Attributes:
        tokens: number of tokens that the loss function counted, on the rank of the last stage.
        frees_outputs: whether the memory of a stage's output is freed once the output is handed on.
    """

    depths = 0

    def __init__(
        self,
        plan: Plan,
        rank: int,
        forward: Callable[[Pass, int, Tensor | None], tuple[Any, Tensor]],
        backward: Callable[[Tensor | None, Any, Tensor | None], Tensor | None],
    ) -> None:
        self.plan, self.rank, self.store = plan, rank, ActivationStore()
        self.tokens = torch.zeros((), dtype=torch.int)
        self.frees_outputs = False
        self._forward, self._backward = forward, backward
        self.table: Mapping[PassKind, Callable[[Pass], None]] = {
            "F": self.forward,
            "B": self.backward,
            "W": self.weight_gradients,
        }

    def merge(self, i: int, state: Any, statistics_p4n: Tensor) -> tuple[Merged, Tensor | None]:
        """Never called: the vocabulary is not split."""
        raise AssertionError("a plan without barriers has nothing to merge")

    def forward(self, item: Pass) -> None:
        """F: one stage. The first stage has the embedding too, the last stage the loss."""
        i, stage = item.microbatch, self.plan.stage_of[self.rank, item.chunk]
        training = not self.plan.forward_only
        x_sbh = self.store.take("input", i, stage) if stage else None
        if x_sbh is not None and training:
            x_sbh.requires_grad_()
        output, tokens = self._forward(item, stage, x_sbh)
        self.tokens = self.tokens.to(tokens.device) + tokens
        if stage < len(self.plan.stages) - 1:
            self._hand(output.detach().contiguous(), i, stage, stage + 1)
        if not training:
            return
        self.store.put("graph", i, (x_sbh, output), item.chunk)
        if self.frees_outputs and stage < len(self.plan.stages) - 1:
            output.data = output.new_empty(1)  # B needs only the graph of the output

    def backward(self, item: Pass) -> None:
        """B: the gradients of a stage's input and weights."""
        i, stage = item.microbatch, self.plan.stage_of[self.rank, item.chunk]
        last = stage == len(self.plan.stages) - 1
        gradient = None if last else self.store.take("output_gradient", i, stage)
        x_sbh, output = self.store.take("graph", i, item.chunk)
        found = self._backward(x_sbh, output, gradient)
        if stage:
            assert found is not None, "a stage with an input has its gradient"
            self._hand(found, i, stage, stage - 1)

    def weight_gradients(self, item: Pass) -> None:
        """W: do nothing. Megatron-Core's layers form the gradients of their weights in B."""

    def _hand(self, tensor: Tensor, i: int, stage: int, other: int) -> None:
        """Store a tensor for a neighbouring stage of this rank, or for the link to another rank."""
        same_rank = self.plan.stages[other][0] == self.rank
        name = "output_gradient" if same_rank else "input_gradient"
        if other > stage:
            name = "input" if same_rank else "output"
        self.store.put(name, i, tensor, other if same_rank else stage)


def _check_plan(made: Plan, ranks: int, microbatches: int, chunks: int) -> None:
    asked, found = (ranks, microbatches, chunks), (made.ranks, made.microbatches, made.chunks)
    if asked != found:
        raise ValueError(
            f"the plan is for {found[0]} ranks, {found[1]} microbatches and {found[2]} chunks of "
            f"the model on each, the run has {asked[0]}, {asked[1]} and {asked[2]}: make a plan "
            "for these, or give the name of a schedule"
        )
    if made.treatment.is_sharded:
        raise ValueError(
            f"the plan splits the vocabulary ({made.treatment.name}), and Megatron-Core's model "
            "has it on the first and the last stage: make a plan with 'none'"
        )
    if made.recomputes:
        raise ValueError("the plan has passes R: recompute with Megatron-Core's own flags instead")
    for rank, row in enumerate(made.rows):
        for chunk, order in _forwards(row):
            if order != sorted(order):
                raise ValueError(
                    f"the plan takes the microbatches of chunk {chunk} on rank {rank} out of "
                    "order, and data_iterator has them in order: take another schedule"
                )


def _forwards(row: Sequence[Pass]) -> Iterator[tuple[int, list[int]]]:
    """Yield every chunk of a row with its microbatches in the order of their forwards."""
    for chunk in sorted({item.chunk for item in row}):
        yield chunk, [p.microbatch for p in row if p.kind == "F" and p.chunk == chunk]


def check_arguments(config: Any, *unused: object) -> None:
    """Refuse arguments and fields of the configuration that would have no effect.

    ``unused`` are ``decoder_seq_length``, ``adjust_tensor_shapes_fn`` and ``p2p_communicator``.

    Raises:
        ValueError: if one of them is given, or the configuration has a field of ``REFUSED``.
    """
    names = ("decoder_seq_length", "adjust_tensor_shapes_fn", "p2p_communicator")
    for name, value in zip(names, unused, strict=True):
        if value is not None:
            raise ValueError(
                f"{name}: stages of one shape are run over our own links: leave it out"
            )
    for name, way_out in REFUSED.items():
        if getattr(config, name, None):
            raise ValueError(f"the model's configuration has {name}: {way_out}")
    if getattr(config, "cuda_graph_impl", None) == "local":
        raise ValueError(
            "the model's configuration has cuda_graph_impl 'local': graphs are recorded by "
            "Megatron-Core's schedules alone: use 'none'"
        )
