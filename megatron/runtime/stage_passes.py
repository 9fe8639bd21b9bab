"""What each kind of pass does on a rank, between the model's parts and the activation store.

Names in the store: ``input`` and ``output`` of a stage and their gradients; ``graph``, the
autograd graph between them; ``x``, the input of the output layer; ``state`` and ``merged``, what S
and C1 leave; ``partial_...``, this rank's part of something that a collective will sum.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megatron.layers.vocabulary import (
    Merged,
    ShardState,
    input_gradient_from_s,
    merge_statistics,
    token_losses,
)
from megatron.model.stage import RankModel
from megatron.runtime.batch import DeviceMicrobatch
from megatron.runtime.store import ActivationStore
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan

Sighting = tuple[int, int, int, str]
"""(microbatch, place in the data flow, rank, what) of an infinity or NaN."""


class StagePasses:
    """The passes of one rank.

    Args:
        model: what the rank owns.
        plan: the training plan; tells where the stages lie and how the vocabulary is treated.
        rank: pipeline rank.
        store: where passes leave what others need.
        seed: of the run, for dropout.

    Attributes:
        losses: weighted loss of every microbatch of this iteration, on the last stage's rank.
    """

    def __init__(
        self, model: RankModel, plan: Plan, rank: int, store: ActivationStore, seed: int
    ) -> None:
        self.model = model
        self.plan = plan
        self.rank = rank
        self.store = store
        self.losses: dict[int, Tensor] = {}
        self.batch: Sequence[DeviceMicrobatch] = ()
        self.table: Mapping[PassKind, Callable[[Pass], None]] = {
            "F": self.forward,
            "B": self.backward,
            "S": self.output_s,
            "T": self.output_t,
            "IF": self.input_forward,
            "IB": self.input_backward,
        }
        self._seed = seed
        self._iteration = 0
        self._training = True
        self._last_stage = len(plan.stages) - 1
        self._holds_last_stage = plan.stages[-1][0] == rank
        self._sightings: list[Sighting] | None = None

    def begin(self, batch: Sequence[DeviceMicrobatch], iteration: int, training: bool) -> None:
        """Start an iteration over ``batch``."""
        assert not len(self.store), "the store must be empty between iterations"
        self.batch = batch
        self.losses = {}
        self._iteration = iteration
        self._training = training
        self.model.train(training)
        if self.model.output_layer is not None:
            self.model.output_layer.begin(len(batch))

    @contextmanager
    def watching(self) -> Iterator[list[Sighting]]:
        """Look at every result of F and S, and list where infinity or NaN appears.

        Costs a synchronisation per pass: for finding out, not for training.
        """
        self._sightings = []
        try:
            yield self._sightings
        finally:
            self._sightings = None

    def _watch(self, i: int, place: int, what: str, *values: Tensor) -> None:
        if self._sightings is not None and not all(bool(v.isfinite().all()) for v in values):
            self._sightings.append((i, place, self.rank, what))

    def forward(self, item: Pass) -> None:
        """F: one stage's layers; without vocabulary parallelism the vocabulary layers too."""
        i, stage = item.microbatch, self.plan.stage_of[self.rank, item.chunk]
        if stage == 0 and self.plan.barriers is None:
            assert self.model.input_layer is not None
            self.store.put("input", i, self.model.input_layer.lookup(self.batch[i].tokens_bs))
        x_bsh = self.store.take("input", i, stage)
        with torch.set_grad_enabled(self._training):
            x_bsh.requires_grad_(self._training)
            y_bsh = self.model(item.chunk, x_bsh, self._seed, self._iteration, i)
        if self._training:
            # The edge keeps the graph but not the output's memory, which is sent away.
            self.store.put("graph", i, (x_bsh, get_gradient_edge(y_bsh)), item.chunk)
        self._watch(i, stage, f"the output of stage {stage}", y_bsh)
        self._hand_on(i, stage, y_bsh.detach())

    def _hand_on(self, i: int, stage: int, y_bsh: Tensor) -> None:
        if stage < self._last_stage:
            same_rank = self.plan.stages[stage + 1][0] == self.rank
            self.store.put("input" if same_rank else "output", i, y_bsh, stage + same_rank)
            return
        self.store.put("x", i, y_bsh)
        if self.plan.barriers is None:
            self.output_s(Pass("S", i))
            state = self.store.get("state", i)
            merged = merge_statistics(state.statistics_4n.unsqueeze(0))
            self.store.put("merged", i, merged)
            if self._training:
                gradient_nh = self.gradient_after_merge(i, state, merged)
                state.drop_gradient()
                self.store.put("output_gradient", i, gradient_nh, stage)
            else:
                self.output_t(Pass("T", i))

    def backward(self, item: Pass) -> None:
        """B: gradients of one stage's parameters and of its input."""
        i, stage = item.microbatch, self.plan.stage_of[self.rank, item.chunk]
        gradient = self.store.take("output_gradient", i, stage)
        x_bsh, edge = self.store.take("graph", i, item.chunk)
        torch.autograd.backward((edge,), (gradient.view_as(x_bsh),))
        assert x_bsh.grad is not None
        if stage > 0:
            same_rank = self.plan.stages[stage - 1][0] == self.rank
            name = "output_gradient" if same_rank else "input_gradient"
            self.store.put(name, i, x_bsh.grad, stage - same_rank)
        elif self.plan.barriers is None:
            assert self.model.input_layer is not None
            self.model.input_layer.add_gradient(self.batch[i].tokens_bs, x_bsh.grad)
        else:
            self.store.put("input_gradient", i, x_bsh.grad)
        if stage == self._last_stage and self.plan.barriers is None:
            self.output_t(Pass("T", i))

    def output_s(self, item: Pass) -> None:
        """S: the shard's exponentials and statistics; with one barrier also A and D."""
        i = item.microbatch
        layer = self.model.output_layer
        assert layer is not None
        x_nh = self.store.take("x", i).flatten(0, 1)
        targets_n = self.batch[i].targets_n
        if self._training:
            state = layer.s(x_nh, targets_n, form_gradient=self.plan.barriers != 2)
        else:
            state = layer.evaluate(x_nh, targets_n)
        # The maximum may be -inf, on a shard that is all padding; the sum then is 0.
        self._watch(i, self._last_stage + 1, "the output layer", *state.statistics_4n[1:])
        self.store.put("state", i, state)

    def gradient_after_merge(self, i: int, state: ShardState, merged: Merged) -> Tensor:
        """Return this shard's part of the output layer's input gradient.

        In C1 (Algorithm 2), or in F where one rank holds the whole vocabulary.
        """
        assert self.model.output_layer is not None
        return input_gradient_from_s(
            state, merged, self.batch[i].weight_n, self.model.output_layer.options
        )

    def output_t(self, item: Pass) -> None:
        """T: the loss, the weight gradient; with two barriers the input gradient before it."""
        i = item.microbatch
        layer = self.model.output_layer
        assert layer is not None
        state, merged = self.store.take("state", i), self.store.take("merged", i)
        weight_n = self.batch[i].weight_n
        if self._holds_last_stage:
            self.losses[i] = (token_losses(merged, layer.options) * weight_n).sum()
        if not self._training:
            return
        if self.plan.barriers == 2:
            self.store.put("partial_gradient", i, layer.input_gradient(state, merged, weight_n))
        layer.t(state, merged, weight_n)

    def input_forward(self, item: Pass) -> None:
        """IF: the embeddings of the tokens of this rank's shard."""
        i = item.microbatch
        assert self.model.input_layer is not None
        part_bsh = self.model.input_layer.lookup(self.batch[i].tokens_bs)
        self.store.put("partial_embedding", i, part_bsh)

    def input_backward(self, item: Pass) -> None:
        """IB: the gradient of this rank's shard of the embedding."""
        i = item.microbatch
        assert self.model.input_layer is not None
        gradient_bsh = self.store.take("input_gradient", i)
        self.model.input_layer.add_gradient(self.batch[i].tokens_bs, gradient_bsh)
