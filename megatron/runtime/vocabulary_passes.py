"""The passes of the vocabulary layers, S, E, T, IF and IB, over the activation store.

The plan's treatment decides the work of S and of T (arXiv 2411.05288, section 4). Either S or T
forms the input gradient. If the barriers combine the maximum first, a pass E between S and T forms
the exponentials. If the vocabulary is not split over the pipeline, the first and the last stage
each hold the whole vocabulary on their tensor-parallel ranks, and their F and B call S and T.

With multi-token prediction IF also looks up the following tokens, whose embeddings the last stage
reads, and IB also adds the gradient of these embeddings. The output layer treats the depths'
predictions as further tokens.

Shapes: n tokens of a unit, a microbatch or a slice of one, in the order of ``DeviceMicrobatch``.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from megatron.layers.vocabulary.input_layer import InputLayer
from megatron.layers.vocabulary.output_layer import OutputLayer
from megatron.layers.vocabulary.output_s import (
    Merged,
    ShardState,
    token_losses,
)
from megatron.runtime.batch import DeviceMicrobatch
from megatron.runtime.not_finite import NonFiniteDetector
from megatron.runtime.stage_model import StageModel
from megatron.runtime.store import ActivationStore
from megatron.runtime.vocabulary_slots import VocabularyGraphs
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan


class VocabularyPasses:
    """The vocabulary passes of one rank.

    Args:
        model: this rank's part of the model.
        plan: tells how the vocabulary is treated and where the last stage is.
        rank: pipeline rank.
        store: holds the values that passes leave for others.
        non_finite: looks for infinity and NaN when asked to.
        graphs: of S, T, IF and IB in training; ``None``: they launch their kernels without a graph.

    Attributes:
        losses: for every unit of this iteration, its weighted loss and the loss of every
            depth, [1 + D]; only on one rank of the last stage.
        depths: D, the number of further tokens that every token predicts in this iteration.
        marked_bh: input of the output layer at the marked tokens of this iteration; ``None``: no
            token is marked, or the rank has no part of the output layer.
    """

    def __init__(
        self,
        model: StageModel,
        plan: Plan,
        rank: int,
        store: ActivationStore,
        non_finite: NonFiniteDetector,
        graphs: VocabularyGraphs | None = None,
    ) -> None:
        self.losses: dict[int, Tensor] = {}
        self.depths = 0
        self.marked_bh: Tensor | None = None
        self.table: Mapping[PassKind, Callable[[Pass], None]] = {
            "S": self.output_s,
            "E": self.output_e,
            "T": self.output_t,
            "IF": self.input_forward,
            "IB": self.input_backward,
        }
        self._model = model
        self._store = store
        self._non_finite = non_finite
        self._unit, self._slices = plan.unit, plan.slices
        self._treatment = plan.treatment
        self._stages = len(plan.stages)
        self._tells_losses = plan.stages[-1][0] == rank and model.tensor.rank == 0
        self._batch: Sequence[DeviceMicrobatch] = ()
        self._training = True
        self._marks_b: Tensor | None = None
        self._graphs = graphs

    @property
    def _captured(self) -> VocabularyGraphs | None:
        """The graphs, if the passes of this iteration have any."""
        return self._graphs if self._training else None

    @property
    def _input_layer(self) -> InputLayer:
        assert self._model.input_layer is not None
        return self._model.input_layer

    @property
    def _output_layer(self) -> OutputLayer:
        assert self._model.output_layer is not None
        return self._model.output_layer

    @property
    def _ahead_layer(self) -> InputLayer:
        assert self._model.ahead_layer is not None
        return self._model.ahead_layer

    def begin(
        self,
        batch: Sequence[DeviceMicrobatch],
        training: bool,
        predicts_ahead: bool,
        marks_b: Tensor | None = None,
    ) -> None:
        """Start an iteration over ``batch``.

        Args:
            batch: its units.
            training: whether gradients are formed.
            predicts_ahead: whether a model with multi-token prediction predicts further tokens.
            marks_b: different targets, whose tokens are marked (``marked_bh``). ``None``: none is.
        """
        model, parts = self._model, self._model.tensor.sequence_parts
        self.depths = depths = model.mtp_num_layers if predicts_ahead else 0
        factor = model.mtp_loss_scaling_factor
        if depths and self._slices > 1:
            assert all(own.further for own in batch), "what follows a slice is in the next one"
        self._batch = [
            own.with_depths(depths, factor, parts) if depths else own.part_by_part(parts)
            for own in batch
        ]
        self._training = training
        self.losses = {}
        self._marks_b, self.marked_bh = marks_b, None

    def embed_whole(self, i: int) -> Tensor:
        """Return the embeddings [b, u, h] of this rank's tokens if the vocabulary is not split."""
        return self._whole(i, self._lookup(self._input_layer, self._batch[i].tokens_n))

    def embed_ahead_whole(self, i: int) -> Tensor:
        """Return embeddings [b, w, h] of the following tokens if the vocabulary is not split."""
        return self._whole(i, self._lookup(self._ahead_layer, self._ids_ahead(i)))

    def _lookup(self, layer: InputLayer, ids_n: Tensor) -> Tensor:
        if self._captured is not None:
            return self._captured.lookup(layer, ids_n)
        return layer.lookup(ids_n)

    def _whole(self, i: int, partial_nh: Tensor) -> Tensor:
        own = self._model.tensor.reduce_parts(partial_nh)
        return own.view(self._batch[i].samples, -1, partial_nh.shape[1])

    def _ids_ahead(self, i: int) -> Tensor:
        ids_n = self._batch[i].ahead_n
        assert ids_n is not None, "no further token is predicted"
        return ids_n

    def add_embedding_gradient(self, i: int, gradient_nh: Tensor) -> None:
        """Add the gradient of the embeddings of unit ``i`` that this rank holds."""
        self._add_gradient(self._input_layer, self._batch[i].tokens_n, gradient_nh)

    def add_gradient_ahead(self, i: int, gradient_nh: Tensor) -> None:
        """Add the gradient of the following tokens' embeddings."""
        self._add_gradient(self._ahead_layer, self._ids_ahead(i), gradient_nh)

    def _add_gradient(self, layer: InputLayer, ids_n: Tensor, gradient_nh: Tensor) -> None:
        if self._captured is not None:
            self._captured.add_gradient(layer, ids_n, gradient_nh)
        else:
            layer.add_gradient(ids_n, gradient_nh)

    def input_forward(self, item: Pass) -> None:
        """IF: the embeddings of the tokens of this rank's shard."""
        i, layer = self._unit(item), self._input_layer
        self._store.put("partial_embedding", i, self._lookup(layer, self._batch[i].tokens_n))
        if self.depths:
            self._store.put("partial_ahead", i, self._lookup(layer, self._ids_ahead(i)))

    def input_backward(self, item: Pass) -> None:
        """IB: the gradient of this rank's shard of the embedding."""
        i = self._unit(item)
        self.add_embedding_gradient(i, self._store.take("input_gradient", i))
        if self.depths:
            self.add_gradient_ahead(i, self._store.take("ahead_gradient", i))

    def output_s(self, item: Pass) -> None:
        """S: the work that a shard can do alone; the treatment decides how far it goes."""
        self._begin_output(self._unit(item))

    def _begin_output(self, i: int) -> None:
        layer = self._output_layer
        x_nh = self._store.take("x", i)
        targets_n = self._batch[i].targets_n
        if self._marks_b is not None:
            self._keep_marked(x_nh, targets_n, self._marks_b)
        if self._treatment.maximum_first:
            self._store.put("state", i, layer.naive_s(x_nh, targets_n))
            return
        if self._captured is not None:
            self._begin_in_slot(i, x_nh, self._captured)
            return
        if self._training:
            form_gradient = self._treatment.gradient_pass == "S"
            state = layer.s(x_nh, targets_n, form_gradient)
        else:
            state = layer.evaluate(x_nh, targets_n)
        # Row 0, the maximum, is left out: it is -inf on a shard of padding only.
        self._non_finite.check(i, self._stages, "the output layer", *state.statistics_4n[1:])
        self._store.put("state", i, state)

    def _begin_in_slot(self, i: int, x_nh: Tensor, graphs: VocabularyGraphs) -> None:
        """S as a replayed graph; its slot keeps the tensors that T needs."""
        losses = self._losses_of if self._tells_losses else None
        slot = graphs.output(self._output_layer, self._treatment.gradient_pass == "S", losses)
        self._store.put("state", i, slot.s(x_nh, self._batch[i].targets_n))
        self._store.put("output_slot", i, slot)

    def _keep_marked(self, x_nh: Tensor, targets_n: Tensor, marks_b: Tensor) -> None:
        """Add the rows of marked tokens to ``marked_bh``; a token of another unit has zeros."""
        is_marked_bn = marks_b[:, None] == targets_n
        is_here_b1 = is_marked_bn.any(1, keepdim=True)
        rows_bh = torch.where(is_here_b1, x_nh[is_marked_bn.int().argmax(1)], x_nh.new_zeros(()))
        self.marked_bh = rows_bh if self.marked_bh is None else self.marked_bh + rows_bh

    def output_e(self, item: Pass) -> None:
        """E: exponentials and their sums, once the maximum over all ranks is known."""
        i = self._unit(item)
        state = self._store.get("state", i)
        self._output_layer.naive_e(state, self._store.get("maximum", i))
        self._non_finite.check(i, self._stages, "the output layer", state.sums_kn)

    def output_whole(self, i: int) -> None:
        """Run S, and in an evaluation also T, in the F of ranks that hold the whole vocabulary.

        In training S and the merge form the input gradient, and T runs in B.
        """
        self._begin_output(i)
        state, tensor = self._store.get("state", i), self._model.tensor
        merged, gradient_nh = self.merge(i, state, tensor.all_gather(state.statistics_4n))
        self._store.put("merged", i, merged)
        if not self._training:
            self.finish_output(i)
            return
        assert gradient_nh is not None, "S has begun it"
        # T runs as late as B or W and reads no A: without this, A [n, h] in fp32 would wait for T.
        state.drop_gradient()
        own = tensor.reduce_parts(gradient_nh)
        self._store.put("output_gradient", i, own, self._stages - 1)

    def merge(
        self, i: int, state: ShardState, statistics_p4n: Tensor
    ) -> tuple[Merged, Tensor | None]:
        """As in ``Passes``; called by C1, or by F if the last stage holds the whole vocabulary."""
        return self._output_layer.merge(statistics_p4n, state, self._batch[i].weight_n)

    def output_t(self, item: Pass) -> None:
        """T: the loss, the input gradient if S has not begun it, then the weight gradient."""
        self.finish_output(self._unit(item))

    def finish_output(self, i: int) -> None:
        """Do the work of T, also in the B of ranks that hold the whole vocabulary."""
        state, merged = self._store.take("state", i), self._merged(i)
        weight_n = self._batch[i].weight_n
        if self._captured is not None and not self._treatment.maximum_first:
            losses, gradient_nh = self._store.take("output_slot", i).t(merged, weight_n)
        else:
            losses = self._losses_of(merged, weight_n) if self._tells_losses else None
            gradient_nh = self._output_gradient(state, merged, weight_n)
        if losses is not None:
            self._tell(i, losses)
        if gradient_nh is not None:
            self._store.put("partial_gradient", i, gradient_nh)

    def _output_gradient(
        self, state: ShardState, merged: Merged, weight_n: Tensor
    ) -> Tensor | None:
        """Run T; return this rank's part of the input gradient, if T forms it."""
        if not self._training:
            return None
        form_gradient = self._treatment.gradient_pass == "T"
        return self._output_layer.t(state, merged, weight_n, form_gradient=form_gradient)

    def _losses_of(self, merged: Merged, weight_n: Tensor) -> Tensor:
        """Return the weighted loss of a unit and those of the depths, [1 + D]."""
        losses_n = token_losses(merged, self._output_layer.options) * weight_n
        by_depth = losses_n.view(self._model.tensor.sequence_parts, 1 + self.depths, -1)
        return torch.stack([own.sum() for own in by_depth.unbind(1)])

    def _tell(self, i: int, losses: Tensor) -> None:
        factor = self._batch[i].loss_factor
        if factor is not None:
            # The reported loss is a mean over tokens, however the gradients are weighted.
            losses[0] *= factor
        self.losses[i] = losses

    def _merged(self, i: int) -> Merged:
        """Take the statistics over the whole vocabulary, which the barriers have left."""
        if not self._treatment.maximum_first:
            merged: Merged = self._store.take("merged", i)
            return merged
        return self._output_layer.merged_from(
            self._store.take("maximum", i), self._store.take("sums", i)
        )

    def loss(self, device: torch.device) -> Tensor:
        """Return the sums of this rank's losses, [1 + D]: of the next token, then of the depths.

        The depths' losses come without the factor that weights them in the total loss.
        """
        losses = [self.losses[i] for i in sorted(self.losses)]
        if not losses:
            return torch.zeros(1 + self.depths, device=device)
        sums = torch.stack([torch.stack(own).sum() for own in zip(*losses, strict=True)])
        if self.depths:
            sums[1:] *= self.depths / self._model.mtp_loss_scaling_factor
        return sums
