"""The passes of a rank: each kind moves data between the model's parts and the activation store.

Names in the store:
``input`` and ``output`` of a stage, and their gradients;
``graph``: the autograd graph from the input to the output, and to the losses of layers;
``left_out``: the activations of the graph that R computes again;
``weights``: the work that B leaves to W;
``x``: the input of the output layer;
``ahead``: embeddings of the following tokens, which one stage reads for multi-token prediction
(``Plan.ahead_stage``), and their gradient ``ahead_gradient``;
``state``: the result of S;
``merged``: the result of C1 (``maximum`` and ``sums``, if C1 and C2 share the work);
``partial_...``: this rank's part of a sum that a collective forms;
``keys``: keys and values of a microbatch's slices, from its first F to its last B.

All but ``keys`` are kept by unit: a microbatch, or a slice of one (``runtime.units``).

Between stages a tensor-parallel rank has its own tokens, [b, u, h], or [(1 + D) b, u, h] behind the
stage that predicts D further tokens. The vocabulary layers work on
all tokens, [n, h], in the order of the ranks' parts. The pass that makes a tensor for a vocabulary
layer therefore gathers it from the tensor-parallel ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megatron.layers.dropout import DropoutSeeds
from megatron.layers.forward_pass import ForwardPass
from megatron.layers.recompute import Again
from megatron.layers.slices import SeenChoices, SeenKeys, SequenceSlice, SlicedPass
from megatron.layers.vocabulary.output_s import Merged, ShardState
from megatron.layers.weight_gradients import defer_weight_gradients, parts_of
from megatron.parallel.turns import Turns
from megatron.runtime.batch import DeviceMicrobatch
from megatron.runtime.entry import Entry
from megatron.runtime.layer_losses import JoinedLosses, Source, Sums
from megatron.runtime.not_finite import NonFiniteDetector, Sighting
from megatron.runtime.offload import TakesActivations
from megatron.runtime.pass_graphs import StageGraphs
from megatron.runtime.pass_slots import Slot, StageInput
from megatron.runtime.stage_model import StageModel
from megatron.runtime.store import ActivationStore
from megatron.runtime.units import units_of
from megatron.runtime.vocabulary_passes import VocabularyPasses
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan


class StagePasses:
    """The passes of one rank.

    Args:
        model: this rank's part of the model.
        plan: the training plan. It tells which rank has which stage, how the vocabulary is treated,
            and whether weight gradients are separate passes.
        rank: pipeline rank.
        store: holds the values that passes leave for others.
        seed: of the run, for dropout.
        replica: number of this replica, and number of replicas. The replicas' microbatches
            alternate in the global batch, and a microbatch's dropout depends on its place there.
        slices: the slices of every microbatch; empty: microbatches are whole.
        graphs: of passes in training; ``None``: every pass launches its kernels without a graph.
            With graphs, the layers' inputs are those of ``StageInput``: there is no dropout,
            there are no documents and no slices.
        host: takes the activations that wait on the host; ``None``: all stay on the device.
        turns: of the passes of a pair; ``None``: passes run one after the other.
    """

    def __init__(
        self,
        model: StageModel,
        plan: Plan,
        rank: int,
        store: ActivationStore,
        seed: int,
        replica: tuple[int, int] = (0, 1),
        graphs: StageGraphs | None = None,
        slices: Sequence[SequenceSlice] = (),
        host: TakesActivations | None = None,
        turns: Turns | None = None,
    ) -> None:
        assert plan.slices == (len(slices) or 1), "every pass of the plan has its slice"
        self.model = model
        self.plan = plan
        self.rank = rank
        self.store = store
        self._non_finite = NonFiniteDetector()
        self._vocabulary = VocabularyPasses(
            model,
            plan,
            rank,
            store,
            self._non_finite,
            None if graphs is None else graphs.vocabulary,
        )
        self._layer_losses = JoinedLosses(model.tensor)
        self.table: Mapping[PassKind, Callable[[Pass], None]] = {
            "F": self.forward,
            "R": self.recompute,
            "B": self.backward,
            "W": self.weight_gradients,
            **self._vocabulary.table,
        }
        self._seed = seed
        self._replica, self._replicas = replica
        self._batch: Sequence[DeviceMicrobatch] = ()
        self._iteration = 0
        self._training = True
        self._is_apart = False
        self._last_stage = len(plan.stages) - 1
        self._deferred: list[Callable[[], None]] = []
        self._graphs = graphs
        self._slices = slices
        self._host = host
        self._turns = turns

    @property
    def depths(self) -> int:
        """As in ``Passes``."""
        return self._vocabulary.depths

    @property
    def losses(self) -> dict[int, Tensor]:
        """As in ``VocabularyPasses``."""
        return self._vocabulary.losses

    @property
    def marked_bh(self) -> Tensor | None:
        """As in ``VocabularyPasses``."""
        return self._vocabulary.marked_bh

    def forget_losses(self) -> None:
        """Forget the losses of units and of layers, and the loads, of this iteration."""
        self.losses.clear()
        self._layer_losses.begin(self._batch)

    def lasting(self) -> list[Tensor]:
        """Return the tensors that are made once, and last as the iteration does."""
        return self._layer_losses.lasting()

    def begin(
        self,
        batch: Sequence[DeviceMicrobatch],
        iteration: int,
        *,
        training: bool,
        predicts_ahead: bool,
        marks_b: Tensor | None = None,
    ) -> None:
        """Start an iteration over ``batch``.

        From now on the model's layers leave their weight gradients to these passes. (The passes of
        another plan may have run the previous iteration.)

        Args:
            batch: its microbatches.
            iteration: of the run, for dropout.
            training: whether gradients are formed.
            predicts_ahead: whether a model with multi-token prediction also predicts tokens after
                the next one.
            marks_b: as in ``VocabularyPasses``. With marks every token is computed as if the tokens
                after it, and the other samples, were not there.
        """
        assert not len(self.store), "the store must be empty between iterations"
        defer_weight_gradients(self.model, self._defer if self.plan.split_backward else None)
        self._batch = units = units_of(batch, self._slices)
        self._iteration = iteration
        self._training, self._is_apart = training, marks_b is not None
        self.model.begin(training=training)
        self._vocabulary.begin(units, training, predicts_ahead, marks_b)
        self._layer_losses.begin(units)
        if self._graphs is not None:
            self._graphs.begin()
        if self._host is not None:
            self._host.begin(units)

    def watching(self) -> AbstractContextManager[list[Sighting]]:
        """Return a context that lists the results of F and S with infinity or NaN."""
        return self._non_finite.keeping()

    def loss(self, device: torch.device) -> Tensor:
        """Return this rank's part of the iteration's loss and of the depths' losses, [1 + D]."""
        return self._vocabulary.loss(device)

    def of_layers(self) -> Sums:
        """Return the losses of this rank's layers in the iteration, and the loads of experts."""
        return self._layer_losses.sums()

    def merge(
        self, i: int, state: ShardState, statistics_p4n: Tensor
    ) -> tuple[Merged, Tensor | None]:
        """As in ``Passes``."""
        return self._vocabulary.merge(i, state, statistics_p4n)

    def forward(self, item: Pass) -> None:
        """F: one stage's layers; without vocabulary parallelism also the vocabulary layers."""
        if self._graphs is not None and self._training and self._graphs.are_ready:
            self._forward_by_graph(item, self._graphs)
            return
        i, stage = self.plan.unit(item), self.plan.stage_of[self.rank, item.chunk]
        left_out, wants_losses = list[Again](), self._training or self._non_finite.is_keeping
        losses = self._layer_losses.collector() if wants_losses else None
        x_buh, ahead_bwh = self._input(i, stage), self._embeddings_ahead(i, stage)
        x_entry, ahead_entry = Entry(), None if ahead_bwh is None else Entry()
        with torch.set_grad_enabled(self._training):
            if self._training:
                x_buh = x_entry.connect(x_buh)
            if self._training and ahead_entry is not None and ahead_bwh is not None:
                ahead_bwh = ahead_entry.connect(ahead_bwh)
            forward_pass = replace(
                self._forward_pass(item), ahead_bwh=ahead_bwh, left_out=left_out, losses=losses
            )
            with self._handed_over(item, forward_pass.sliced):
                y_buh = self.model(item.chunk, x_buh, forward_pass)
        left, loads = ([], []) if losses is None else losses.close()
        if self._training:
            further = self._layer_losses.join(i, item.chunk, left, loads)
            # The edge keeps the graph alive, but neither the stage's input nor its output.
            graph = x_entry, ahead_entry, get_gradient_edge(y_buh), further, x_buh.shape[1:]
            self.store.put("graph", i, graph, item.chunk)
            if self.plan.recomputes:
                self.store.put("left_out", i, left_out, item.chunk)
        values = [own.loss for own in left]
        self._non_finite.check(i, stage, f"a loss of a layer of stage {stage}", *values)
        self._non_finite.check(i, stage, f"the output of stage {stage}", y_buh)
        self._hand_on(i, stage, y_buh.detach())

    def _handed_over(self, item: Pass, sliced: SlicedPass | None) -> AbstractContextManager[object]:
        """Return the context of an F, whose activations may wait on the host."""
        if self._host is None or not self._training:
            return nullcontext()
        return self._host.around(item, None if sliced is None else sliced.seen)

    def _forward_by_graph(self, item: Pass, graphs: StageGraphs) -> None:
        """F as a replayed graph; the graph's slot keeps the tensors that B needs."""
        i, stage = self.plan.unit(item), self.plan.stage_of[self.rank, item.chunk]
        take_deferred = self._take_deferred if self.plan.split_backward else None
        given = StageInput(
            self._input(i, stage), self._embeddings_ahead(i, stage), self._batch[i].positions_bs
        )
        slot, left = graphs.forward(item.chunk, given, take_deferred)
        self._layer_losses.add(i, item.chunk, left.losses, left.loads)
        self.store.put("graph", i, slot, item.chunk)
        self._hand_on(i, stage, left.y_buh)

    def _input(self, i: int, stage: int) -> Tensor:
        """Return the input of a stage."""
        if stage == 0 and not self.plan.treatment.is_sharded:
            return self._vocabulary.embed_whole(i)
        x_buh: Tensor = self.store.take("input", i, stage)
        return x_buh

    def _forward_pass(self, item: Pass) -> ForwardPass:
        """Return the dropout seeds, documents, positions and earlier keys of an F.

        Dropout is seeded by the microbatch's number within the global batch.
        """
        seeds, own, sliced = None, self._batch[self.plan.unit(item)], self._sliced(item)
        if self._training:
            number = item.microbatch * self._replicas + self._replica
            part = None if sliced is None else sliced.part
            seeds = DropoutSeeds(self._seed, self._iteration, number, part=part)
        return ForwardPass(
            seeds,
            documents=own.documents,
            positions_bs=own.positions_bs,
            sliced=sliced,
            is_apart=self._is_apart,
        )

    def _sliced(self, item: Pass) -> SlicedPass | None:
        """Return the slice of an F with the keys of earlier slices; ``None``: there are no slices.

        In training the graphs of the slices also hold the keys, and B of the first slice, the last
        to run, lets go of them.
        """
        if not self._slices:
            return None
        key, is_last = ("keys", item.microbatch), item.slice + 1 == len(self._slices)
        if item.slice == 0:
            self.store.put(*key, (SeenKeys(), SeenChoices()), item.chunk)
        ends = is_last and not self._training
        seen, choices = (self.store.take if ends else self.store.get)(*key, item.chunk)
        return SlicedPass(self._slices[item.slice], seen, choices)

    def _embeddings_ahead(self, i: int, stage: int) -> Tensor | None:
        """Return the embeddings of the following tokens, if this stage predicts further tokens."""
        if stage != self.plan.ahead_stage or not self.depths:
            return None
        if not self.plan.treatment.is_sharded:
            return self._vocabulary.embed_ahead_whole(i)
        ahead_bwh: Tensor = self.store.take("ahead", i)
        return ahead_bwh

    def _hand_on(self, i: int, stage: int, y_buh: Tensor) -> None:
        if stage < self._last_stage:
            same_rank = self.plan.stages[stage + 1][0] == self.rank
            self.store.put("input" if same_rank else "output", i, y_buh, stage + same_rank)
            return
        self.store.put("x", i, self.model.tensor.gather_parts(y_buh))
        if not self.plan.treatment.is_sharded:
            self._vocabulary.output_whole(i)

    def recompute(self, item: Pass) -> None:
        """R: compute again the activations that the forward of one stage has dropped."""
        left_out = self.store.take("left_out", self.plan.unit(item), item.chunk)
        while left_out:  # popped, so that only the graph keeps them, and B can free each
            left_out.pop(0).compute()

    def backward(self, item: Pass) -> None:
        """B: gradients of one stage's input and parameters; W may form weight gradients instead."""
        i, stage = self.plan.unit(item), self.plan.stage_of[self.rank, item.chunk]
        gradient = self.store.take("output_gradient", i, stage)
        graph = self.store.take("graph", i, item.chunk)
        if isinstance(graph, Slot):
            found = graph.backward(gradient, self._layer_losses.weight(i))
            if found.ahead_bwh is not None:
                self._hand_back_ahead(i, found.ahead_bwh)
            self._hand_back(i, stage, found.x_buh)
            if self.plan.split_backward:
                self._defer(graph.weight_gradients)
            self._leave_weights(item, stage)
            return
        x_entry, ahead_entry, edge, further, shape = graph
        # The output layer leaves the gradient flat. The first size is free, because further depths
        # of prediction add samples.
        sources = Source(edge, gradient.view(-1, *shape)), *further
        # One call for the output and the layers' losses: they share a graph, which a backward
        # frees.
        torch.autograd.backward([s.edge for s in sources], [s.gradient for s in sources])
        if ahead_entry is not None:
            self._hand_back_ahead(i, ahead_entry.take_gradient())
        self._hand_back(i, stage, x_entry.take_gradient())
        if self._slices and item.slice == 0:
            self.store.take("keys", item.microbatch, item.chunk)
        del graph, edge, further, sources, gradient  # which weight gradients do not need
        self._leave_weights(item, stage)

    def _leave_weights(self, item: Pass, stage: int) -> None:
        """Leave the deferred weight gradients to W, or form them now if there is no W."""
        i = self.plan.unit(item)
        if stage == self._last_stage and not self.plan.treatment.is_sharded:
            # No other rank waits for the output layer's weight gradient either, so it may wait for
            # W.
            self._defer(lambda: self._vocabulary.finish_output(i))
        deferred = self._take_deferred()
        if self.plan.split_backward:
            self.store.put("weights", i, deferred, item.chunk)
        else:
            self._run_all(deferred)

    def _hand_back(self, i: int, stage: int, gradient_buh: Tensor) -> None:
        if stage > 0:
            same_rank = self.plan.stages[stage - 1][0] == self.rank
            name = "output_gradient" if same_rank else "input_gradient"
            self.store.put(name, i, gradient_buh, stage - same_rank)
            return
        gradient_nh = self.model.tensor.gather_parts(gradient_buh)
        if self.plan.treatment.is_sharded:
            self.store.put("input_gradient", i, gradient_nh)
        else:
            self._vocabulary.add_embedding_gradient(i, gradient_nh)

    def _hand_back_ahead(self, i: int, gradient_bwh: Tensor) -> None:
        gradient_nh = self.model.tensor.gather_parts(gradient_bwh)
        if self.plan.treatment.is_sharded:
            self.store.put("ahead_gradient", i, gradient_nh)
        else:
            self._vocabulary.add_gradient_ahead(i, gradient_nh)

    def weight_gradients(self, item: Pass) -> None:
        """W: run the products for one stage's weight gradients that B has left."""
        self._run_all(self.store.take("weights", self.plan.unit(item), item.chunk))

    def _defer(self, work: Callable[[], None]) -> None:
        self._deferred.append(work)

    def _take_deferred(self) -> list[Callable[[], None]]:
        deferred, self._deferred = self._deferred, []
        return deferred

    @torch.no_grad()
    def _run_all(self, deferred: list[Callable[[], None]]) -> None:
        if self._turns is not None and self.model.tensor.takes_turns:
            self._turns.divided(parts_of(deferred))
        for part in parts_of(deferred):
            part()
            del part  # before the next one gathers more
