"""Slices of a microbatch: samples are cut along the sequence, and each slice has passes of its own.

The queries of a slice see the keys and values of earlier slices (arXiv 2406.03488). A stage keeps
these keys and values for every microbatch, in one buffer for each layer. The slices fill the buffer
one after the other. The backward runs in descending order. A slice's backward forms gradients of
all keys that its queries see. For its own keys it adds the summands that later slices have left,
and returns the sums. The other gradients it leaves to earlier slices. (``slice_attention.py``
computes attention with these keys and values.)

Shapes: b batch, s tokens of a sample, u tokens of the slice, z keys that the slice sees, g
key/value heads, d channels of a head, e experts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from torch import Tensor

from megatron.kernels.softmax import statistics_dtype


@dataclass(frozen=True)
class SequenceSlice:
    """The place of a slice in every sample of its microbatch.

    Attributes:
        first: position of the slice's first token.
        end: position after its last token.
        length: tokens of a sample.
    """

    first: int
    end: int
    length: int

    @classmethod
    def of_lengths(cls, lengths: Sequence[int]) -> "tuple[SequenceSlice, ...]":
        """Return slices of the given lengths, in the order of the sequence."""
        bounds = list(accumulate(lengths, initial=0))
        return tuple(cls(first, end, bounds[-1]) for first, end in pairwise(bounds))

    @property
    def is_last(self) -> bool:
        """Whether no slice follows."""
        return self.end == self.length

    @property
    def fraction(self) -> float:
        """The slice's part of all tokens."""
        return (self.end - self.first) / self.length

    def share(self, tokens: int) -> int:
        """Return how many of ``tokens`` are in the slice, if every slice has the same part there.

        A rank may have an equal part of every slice.
        """
        assert tokens * (self.end - self.first) % self.length == 0, (self, tokens)
        return tokens * (self.end - self.first) // self.length

    def among(self, tokens: int) -> slice:
        """Return the indices of the slice among a rank's ``tokens`` of every sample."""
        before = tokens * self.first // self.length
        return slice(before, before + self.share(tokens))


class SeenKeys:
    """Keys and values of the slices of one microbatch so far, in the layers of one stage.

    While the backward runs, it also holds the gradients that later slices have left for keys and
    values of earlier ones. Their sums are statistics, so that each is rounded once.
    """

    def __init__(self) -> None:
        self._both_2bsgd: dict[int, Tensor] = {}
        self._left_2bsgd: dict[int, Tensor] = {}

    def buffers(self) -> Iterable[Tensor]:
        """Return the buffers of keys and values, one for every layer that has made some."""
        return self._both_2bsgd.values()

    def extend(self, layer: int, part: SequenceSlice, k_bugd: Tensor, v_bugd: Tensor) -> Tensor:
        """Put a slice's keys and values behind earlier ones; return all so far, [2, b, z, g, d].

        A layer that is computed again for its backward puts the same values there again.

        ``.data`` has a version of its own, so autograd does not take a later slice's part for a
        change of the parts that it has kept. No slice writes to another one's part.
        """
        if layer not in self._both_2bsgd:
            b, _, g, d = k_bugd.shape
            self._both_2bsgd[layer] = k_bugd.new_empty(2, b, part.length, g, d)
        buffer_2bsgd = self._both_2bsgd[layer].data
        for own_bsgd, made_bugd in zip(buffer_2bsgd, (k_bugd, v_bugd), strict=True):
            own_bsgd[:, part.first : part.end] = made_bugd
        return buffer_2bsgd[:, :, : part.end]

    def settle(
        self, layer: int, part: SequenceSlice, grads: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, ...]:
        """Return the gradients of a slice's own keys and values; keep those of earlier slices.

        The first slice comes last in a backward, so it releases the layer's keys and values.

        Args:
            layer: index of the layer.
            part: the slice; all later slices have been here.
            grads: gradients of the last keys and of the last values that the slice sees, [b, z, g,
                d]; keys before them have none.
        """
        own, earlier = [], []
        for grad_bzgd in grads:
            seen = grad_bzgd.shape[1] - (part.end - part.first)
            own.append(grad_bzgd[:, seen:])
            earlier.append(grad_bzgd[:, :seen])
        left_2bsgd = self._left_2bsgd.pop(layer, None)
        if left_2bsgd is not None:
            of_slice = left_2bsgd[:, :, part.first : part.end]
            own = [(later + mine).to(mine.dtype) for mine, later in zip(own, of_slice, strict=True)]
        if part.first == 0:
            del self._both_2bsgd[layer]
            return tuple(own)
        if left_2bsgd is None:
            b, _, g, d = grads[0].shape
            wide = statistics_dtype(grads[0].dtype)
            left_2bsgd = grads[0].new_zeros(2, b, part.first, g, d, dtype=wide)
        for left_bsgd, grad_bsgd in zip(left_2bsgd, earlier, strict=True):
            # ``+=`` on an index would also copy the sum onto itself.
            left_bsgd[:, part.first - grad_bsgd.shape[1] : part.first].add_(grad_bsgd)
        self._left_2bsgd[layer] = left_2bsgd
        return tuple(own)


class SeenChoices:
    """Choices of experts in the slices of one microbatch so far, in the layers of one stage.

    They are kept for losses that balance the experts over a whole microbatch. Such a loss is named
    by its layer and its name. ``x`` stands for samples, or for 1 if a loss puts samples together.

    Only sums over slices are kept, so that a backward reads them without adding them up again.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[int, str], tuple[int, Tensor, Tensor]] = {}

    def put(
        self, loss: tuple[int, str], part: SequenceSlice, times_xe: Tensor, means_xe: Tensor
    ) -> None:
        """Add a slice; slices come in the order of the sequence.

        A layer that is computed again puts the same there again, which changes nothing.

        Args:
            loss: the layer's index in the whole model, and the loss's name.
            part: the slice.
            times_xe: how often its tokens have chosen every expert.
            means_xe: its mean scores of every expert, without a graph.
        """
        end, times_sum_xe, means_sum_xe = self._sums.get(loss, (0, None, None))
        if part.first < end:
            return
        means_xe = means_xe * part.fraction
        if times_sum_xe is not None and means_sum_xe is not None:
            times_xe, means_xe = times_sum_xe + times_xe, means_sum_xe + means_xe
        self._sums[loss] = part.end, times_xe, means_xe

    def times(self, loss: tuple[int, str]) -> Tensor:
        """Return how often tokens of all slices so far have chosen every expert, [x, e]."""
        return self._sums[loss][1]

    def means(self, loss: tuple[int, str]) -> Tensor:
        """Return the mean scores of the whole microbatch, [x, e]; all slices have been here."""
        return self._sums[loss][2]


@dataclass(frozen=True)
class SlicedPass:
    """The slice of a pass, and the data that the microbatch's other slices have left in the stage.

    Attributes:
        part: the slice.
        seen: keys and values of the same microbatch, in the layers of the same stage.
        choices: of experts, likewise.
    """

    part: SequenceSlice
    seen: SeenKeys
    choices: SeenChoices = field(default_factory=SeenChoices)
