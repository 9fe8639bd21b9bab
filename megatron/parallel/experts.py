"""Expert parallelism: which ranks have the experts of a layer, and how tokens travel to them.

Usually the experts of a mixture are with their layer: every rank of a stage has all of them, or,
with t tensor-parallel ranks, 1 / t of each (``ExpertParallel``). They can also be *spread*: e ranks
have E / e experts each, and etp ranks share each of these. The e x etp ranks of such a block have
different tokens. A token travels from its rank to the ranks of its experts, and the results
travel back. There are two ways here, and a third one in ``deep_ep.py``:

* *gathering*: every rank of the block gets all tokens of the block, and takes the tokens for its
  own experts. Afterwards the ranks' results are summed, each for its own tokens. No rank asks
  another how many tokens come.
* *exchange*: a rank sends each token only to the ranks of its experts. First the ranks tell each
  other how many tokens will come, and the host waits for these numbers.

No method is differentiable. ``gather`` and ``reduce`` are each other's adjoint, and so are
``send_to_experts`` and ``send_home``.

Shapes: b batch, u tokens of a sequence that a rank has outside of the layer, E experts of a layer,
z rows that a rank sends, y rows that arrive at its experts from the same place of the axis
``expert_tensor``, r rows that arrive from all places.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor

from megatron.parallel import collectives
from megatron.parallel.groups import ConnectedAxis
from megatron.parallel.settings import Dispatcher
from megatron.parallel.tensor import TensorParallel


class ExpertParallel:
    """The experts are with their layer: tensor-parallel ranks share each of them.

    Args:
        tensor: the ranks that share every layer.

    Attributes:
        rank: which of the experts this rank has, 0 to ``size`` - 1.
        size: ranks e over which experts are spread.
        tensor_rank: which part of each of its experts this rank has, 0 to ``tensor_size`` - 1.
        tensor_size: ranks etp that share an expert.
        gradients: the ranks over which gradients of experts are summed; ``None``: the
            same ranks as for all other gradients.
        keeps_arrived: whether W keeps the rows that have arrived; otherwise it keeps a rank's own
            tokens, and lets them travel again.
    """

    rank = 0
    size = 1
    gradients: ConnectedAxis | None = None
    keeps_arrived = False

    def __init__(self, tensor: TensorParallel) -> None:
        self.tensor_rank, self.tensor_size = tensor.rank, tensor.size
        self._tensor = tensor

    def own_experts(self, experts: int) -> range:
        """Return which of the ``experts`` of a layer this rank has."""
        own = experts // self.size
        return range(self.rank * own, (self.rank + 1) * own)

    def gather(self, x_buh: Tensor) -> Tensor:
        """Return the tokens of all ranks that share the experts: as batch x sequence x ..."""
        return self._tensor.gather(x_buh)

    def reduce(self, partial: Tensor) -> Tensor:
        """Return the sum of the ranks' summands, of the shape of ``gather``, for own tokens."""
        return self._tensor.reduce(partial)


class GatheringExperts(ExpertParallel):
    """Experts are spread, and every rank of a block gets all its tokens.

    Args:
        experts: the ranks that have different experts.
        tensor: the ranks that share every expert.
        gradients: the ranks that have the same parts of the same experts.
    """

    keeps_arrived = True

    def __init__(
        self, experts: ConnectedAxis, tensor: ConnectedAxis, gradients: ConnectedAxis
    ) -> None:
        self.rank, self.size = experts.rank, experts.size
        self.tensor_rank, self.tensor_size = tensor.rank, tensor.size
        self.gradients = gradients
        self._experts, self._of_expert = experts, tensor

    def gather(self, x_buh: Tensor) -> Tensor:
        """As in ``ExpertParallel``; the ranks' tokens follow each other in the batch.

        They come over the axis of experts first, which may be far away, and then over the near one.
        """
        x = collectives.all_gather(x_buh.contiguous(), self._experts).flatten(0, 1)
        return collectives.all_gather(x, self._of_expert).flatten(0, 1)

    def reduce(self, partial: Tensor) -> Tensor:
        """As in ``ExpertParallel``."""
        sums = partial.contiguous()
        # The reverse of ``gather``: after the near ranks' sum, less has to travel far.
        for axis in (self._of_expert, self._experts):
            collectives.reduce_scatter(sums.view(-1), axis)
            sums = sums.chunk(axis.size)[axis.rank]
        return sums.clone()  # not a view, which would keep all summands alive

    def own_slots(self, own_last: Tensor, slots: int) -> int:
        """Return where the slots of this rank's experts end; the host waits for the device.

        Args:
            own_last: where they end, a number on the device.
            slots: number of slots of all experts.
        """
        [own] = self.read_rows(own_last.view(1), slots)
        return own

    def read_rows(self, rows: Tensor, most: int) -> list[int]:
        """Return numbers of rows; the host waits for the device here and nowhere else.

        Args:
            rows: the numbers, on the device, one after the other.
            most: rows of which the numbers are parts. Where tensors have no values, the numbers
                are assumed from it.
        """
        found: list[int] = rows.tolist()
        return found


@dataclass(frozen=True)
class Journey:
    """How many rows travel in an exchange; the host knows the numbers.

    Attributes:
        sent: z in parts, one for every place of the axis of experts.
        received: y in parts, one for every place of the axis of experts.
        of_places: y of every place of the axis ``expert_tensor``; r is their sum.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    of_places: tuple[int, ...]

    @property
    def arrived(self) -> int:
        """Rows r that arrive."""
        return sum(self.of_places)


class ExchangingExperts(GatheringExperts):
    """Experts are spread, and tokens go to the ranks of their experts only.

    Arguments are as in ``GatheringExperts``.
    """

    def tell(self, times_e: Tensor) -> Tensor:
        """Return how many rows arrive at this rank's experts, int64 [etp, e, E / e].

        Args:
            times_e: int64 [E], how many rows this rank sends to every expert.

        Returns:
            By the place on the axis ``expert_tensor`` and on the axis of experts from which the
            rows come, and by expert.
        """
        received = collectives.all_to_all(times_e.view(self.size, -1), self._experts)
        return collectives.all_gather(received, self._of_expert)

    def journey(self, times_e: Tensor, arriving: Tensor, leaving: int) -> Journey:
        """Return the numbers of rows that travel; the host waits for the device, once.

        Args:
            times_e: as for ``tell``.
            arriving: the result of ``tell`` for ``times_e``.
            leaving: rows z that this rank sends at most; fewer if choices are dropped.
        """
        by_expert = torch.cat((times_e.view(1, self.size, -1), arriving))
        numbers = self.read_rows(by_expert.sum(2).flatten(), leaving)
        assert sum(numbers[: self.size]) <= leaving, "no row goes to two places"
        return self._journey(numbers[: self.size], numbers[self.size :])

    def _journey(self, sent: Sequence[int], arriving: Sequence[int]) -> Journey:
        by_place = [arriving[at : at + self.size] for at in range(0, len(arriving), self.size)]
        received = by_place[self.tensor_rank]
        return Journey(tuple(sent), tuple(received), tuple(map(sum, by_place)))

    def send_to_experts(self, rows: Tensor, journey: Journey) -> Tensor:
        """Return the rows [r, ...] for this rank's experts, by the places that they come from.

        Args:
            rows: [z, ...], by the expert that they go to.
            journey: of the rows.
        """
        # Each row travels far once; then the near ranks that share an expert pass it on.
        own = collectives.all_to_all(rows, self._experts, journey.sent, journey.received)
        if self.tensor_size == 1:
            return own
        arrived = own.new_empty((journey.arrived, *own.shape[1:]))
        arrived[self._own_rows(journey)] = own
        collectives.gather_parts(arrived.view(-1), self._of_expert, _elements(journey, own))
        return arrived

    def send_home(self, rows: Tensor, journey: Journey) -> Tensor:
        """Sum the rows [r, ...] over the ranks of an expert; return the sums where they belong.

        Args:
            rows: a summand for every row of ``send_to_experts``; it may be changed.
            journey: of the rows.
        """
        if self.tensor_size > 1:
            rows = rows.contiguous()
            # Near ranks first: one sum travels home in place of a summand from each of them.
            collectives.reduce_scatter(rows.view(-1), self._of_expert, _elements(journey, rows))
            rows = rows[self._own_rows(journey)]
        return collectives.all_to_all(rows, self._experts, journey.received, journey.sent)

    def _own_rows(self, journey: Journey) -> slice:
        bounds = list(pairwise(accumulate(journey.of_places, initial=0)))
        return slice(*bounds[self.tensor_rank])


def _elements(journey: Journey, rows: Tensor) -> list[int]:
    """Return the elements that come from every place of the axis ``expert_tensor``."""
    return [count * prod(rows.shape[1:]) for count in journey.of_places]


def spread_experts(
    experts: ConnectedAxis,
    tensor: ConnectedAxis,
    gradients: ConnectedAxis,
    dispatcher: Dispatcher,
) -> ExpertParallel:
    """Return the strategy of a rank whose experts are spread, for a dispatcher other than ``flex``.

    With e = 1 nothing is exchanged, whichever the dispatcher.
    """
    kind = ExchangingExperts if dispatcher == "alltoall" and experts.size > 1 else GatheringExperts
    return kind(experts, tensor, gradients)
