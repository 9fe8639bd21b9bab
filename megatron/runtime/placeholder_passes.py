"""Passes without arithmetic: they only leave the tensors that the other ranks wait for.

``PlaceholderPasses`` bring an abandoned iteration to its end. They take from the store the tensors
that real passes left, and leave tensors of the same shapes and dtypes under the same names. Every
communication therefore still matches on both sides, whether the other rank computes or not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.layers.vocabulary.output_s import (
    HasStatistics,
    Merged,
    merge_statistics,
    statistics_dtype,
)
from megatron.runtime.store import ActivationStore
from megatron.runtime.units import UnitTensors
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan


@dataclass
class PlaceholderState(HasStatistics):
    """The state that S and E leave for the barriers and for T.

    Attributes:
        value: result of the pass.
        statistics_4n: statistics as in ``ShardState``.
        raw_gradient_nh: this shard's part of the input gradient, if S begins it.
    """

    value: float
    statistics_4n: Tensor
    raw_gradient_nh: Tensor | None = None

    def drop_gradient(self) -> None:
        """Let go of the part of the input gradient."""
        self.raw_gradient_nh = None


class PlaceholderPasses:
    """The passes of one rank in training, without their work.

    Every token predicts ``depths`` further tokens besides the next one.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        store: ActivationStore,
        tensors: UnitTensors,
        device: torch.device,
        depths: int = 0,
    ) -> None:
        self.plan = plan
        self.depths = depths
        self.rank = rank
        self.store = store
        self.table: Mapping[PassKind, Callable[[Pass], None]] = {
            "F": self.forward,
            "R": self.recompute,
            "B": self.backward,
            "W": self.weight_gradients,
            "S": self.output_s,
            "E": self.output_e,
            "T": self.output_t,
            "IF": self.input_forward,
            "IB": self.input_backward,
        }
        self._tensors = tensors
        self._device = device
        self._last_stage = len(plan.stages) - 1

    def result(self, item: Pass, *taken: Any) -> float:
        """Return the result of ``item``: a number that fills the pass's tensors, here always 0.

        ``taken`` are the inputs of the pass: received tensors, and results of earlier passes.
        """
        return 0.0

    def merge(self, i: int, state: Any, statistics_p4n: Tensor) -> tuple[Merged, Tensor | None]:
        """As in ``Passes``."""
        merged = merge_statistics(statistics_p4n)
        return merged, None if state.raw_gradient_nh is None else self._output(i, 0.0)

    def forward(self, item: Pass) -> None:
        """F: the output of a stage, for the next stage or for the output layer."""
        i, stage = self.plan.unit(item), self.plan.stage_of[self.rank, item.chunk]
        if self.plan.slices > 1 and item.slice == 0:
            self.store.put("keys", item.microbatch, None, item.chunk)
        sharded, is_last = self.plan.treatment.is_sharded, stage == self._last_stage
        inputs = [self.store.take("input", i, stage)] if stage > 0 or sharded else []
        if stage == self.plan.ahead_stage and sharded and self.depths:
            inputs.append(self.store.take("ahead", i))
        value = self.result(item, *inputs)
        self.store.put("graph", i, value, item.chunk)
        if self.plan.recomputes:
            self.store.put("left_out", i, value, item.chunk)
        if not is_last:
            same_rank = self.plan.stages[stage + 1][0] == self.rank
            name = "input" if same_rank else "output"
            self.store.put(name, i, self._between_stages(i, stage, value), stage + same_rank)
        elif sharded:
            self.store.put("x", i, self._output(i, value))
        else:
            self._put_whole_output(i, value)

    def _put_whole_output(self, i: int, value: float) -> None:
        """Leave the output layer's results in F, for a rank that holds the whole layer."""
        self.store.put("state", i, None)
        self.store.put("merged", i, None)
        gradient = self._filled(self._tensors.output(i, self.depths), value)
        self.store.put("output_gradient", i, gradient, self._last_stage)

    def recompute(self, item: Pass) -> None:
        """R: takes the value that F left for R."""
        self.result(item, self.store.take("left_out", self.plan.unit(item), item.chunk))

    def backward(self, item: Pass) -> None:
        """B: the input gradient of a stage, for the previous stage or for the input layer."""
        i, stage = self.plan.unit(item), self.plan.stage_of[self.rank, item.chunk]
        if self.plan.slices > 1 and item.slice == 0:
            self.store.take("keys", item.microbatch, item.chunk)
        gradient = self.store.take("output_gradient", i, stage)
        value = self.result(item, self.store.take("graph", i, item.chunk), gradient)
        if self.plan.split_backward:
            self.store.put("weights", i, value, item.chunk)
        sharded = self.plan.treatment.is_sharded
        if stage == self._last_stage and not sharded:
            self.store.take("state", i)
            self.store.take("merged", i)
        if stage == self.plan.ahead_stage and sharded and self.depths:
            self.store.put("ahead_gradient", i, self._ahead(i, value))
        if stage > 0:
            same_rank = self.plan.stages[stage - 1][0] == self.rank
            name = "output_gradient" if same_rank else "input_gradient"
            gradient = self._between_stages(i, stage - 1, value)
            self.store.put(name, i, gradient, stage - same_rank)
        elif sharded:
            self.store.put("input_gradient", i, self._all_tokens(i, value))

    def weight_gradients(self, item: Pass) -> None:
        """W: takes the values that B left."""
        self.result(item, self.store.take("weights", self.plan.unit(item), item.chunk))

    def input_forward(self, item: Pass) -> None:
        """IF: this rank's part of the embeddings."""
        i, value = self.plan.unit(item), self.result(item)
        self.store.put("partial_embedding", i, self._all_tokens(i, value))
        if self.depths:
            self.store.put("partial_ahead", i, self._ahead(i, value))

    def input_backward(self, item: Pass) -> None:
        """IB: takes the gradient of the embeddings."""
        names = ("input_gradient", "ahead_gradient") if self.depths else ("input_gradient",)
        self.result(item, *(self.store.take(name, self.plan.unit(item)) for name in names))

    def output_s(self, item: Pass) -> None:
        """S: the state that the barriers combine."""
        i = self.plan.unit(item)
        value = self.result(item, self.store.take("x", i))
        state = PlaceholderState(value, self._statistics(i, value))
        if self.plan.treatment.gradient_pass == "S":
            state.raw_gradient_nh = self._output(i, value)
        self.store.put("state", i, state)

    def output_e(self, item: Pass) -> None:
        """E: the sums that C2 adds up; replaces the state that a real S left."""
        i = self.plan.unit(item)
        value = self.result(item, self.store.take("state", i), self.store.get("maximum", i))
        self.store.put("state", i, PlaceholderState(value, self._statistics(i, value)))

    def output_t(self, item: Pass) -> None:
        """T: takes the barriers' results; leaves the part of the gradient that S did not form."""
        i = self.plan.unit(item)
        merged = ("maximum", "sums") if self.plan.treatment.maximum_first else ("merged",)
        value = self.result(item, *(self.store.take(name, i) for name in ("state", *merged)))
        if self.plan.treatment.gradient_pass == "T":
            self.store.put("partial_gradient", i, self._output(i, value))

    def _between_stages(self, i: int, before: int, value: float) -> Tensor:
        """Return the message between stage ``before`` and the next one, filled with ``value``."""
        has_depths = self.plan.hands_on_predictions(before)
        shape, dtype = self._tensors.message(i, self.depths, has_depths=has_depths)
        return self._filled(shape, value, dtype)

    def _all_tokens(self, i: int, value: float) -> Tensor:
        return self._filled(self._tensors.of_all(self._tensors.stage(i)), value)

    def _ahead(self, i: int, value: float) -> Tensor:
        return self._filled(self._tensors.of_all(self._tensors.ahead(i, self.depths)), value)

    def _output(self, i: int, value: float) -> Tensor:
        return self._filled(self._tensors.of_all(self._tensors.output(i, self.depths)), value)

    def _filled(
        self, shape: tuple[int, ...], value: float, dtype: torch.dtype | None = None
    ) -> Tensor:
        return torch.full(shape, value, dtype=dtype or self._tensors.dtype, device=self._device)

    def _statistics(self, i: int, value: float) -> Tensor:
        """Return [4, n] filled with ``value``; if C1 merges statistics, their maximum is 0."""
        n, _ = self._tensors.of_all(self._tensors.output(i, self.depths))
        statistics_4n = self._filled((4, n), value, statistics_dtype(self._tensors.dtype))
        if not self.plan.treatment.maximum_first:
            statistics_4n[0] = 0  # the same on every rank, so that no sum is rescaled
        return statistics_4n
