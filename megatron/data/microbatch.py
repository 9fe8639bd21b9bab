"""Samples become microbatches, in an order that only the count of consumed samples decides."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron.data.samples import SampleDataset


@dataclass(frozen=True, eq=False)
class Microbatch:
    """The unit that travels through the pipeline; CPU tensors of shape [b, s].

    Attributes:
        tokens: input ids, int64.
        labels: the token after each input, int64.
        loss_mask: 1 where the prediction counts, 0 where it does not, float32.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor


class MicrobatchLoader:
    """Reads global batches of ``num_microbatches`` microbatches.

    The order is Megatron-LM's: each microbatch takes the next ``micro_batch_size`` samples.

    Args:
        dataset: the samples; every rank of a pipeline reads the same.
        micro_batch_size: samples per microbatch b.
        num_microbatches: microbatches per global batch.
        consumed_samples: samples that earlier iterations have used.

    Attributes:
        consumed_samples: advanced by every `next_batch`; a checkpoint must save it.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        micro_batch_size: int,
        num_microbatches: int,
        consumed_samples: int = 0,
    ) -> None:
        assert micro_batch_size > 0
        assert num_microbatches > 0
        assert consumed_samples >= 0
        self.consumed_samples = consumed_samples
        self._dataset = dataset
        self._micro_batch_size = micro_batch_size
        self._num_microbatches = num_microbatches

    def next_batch(self) -> list[Microbatch]:
        """Reads the microbatches of the next global batch.

        Returns:
            ``num_microbatches`` microbatches.

        Raises:
            ValueError: the dataset ends before the batch does, or holds foreign token ids.
        """
        end = self.consumed_samples + self._micro_batch_size * self._num_microbatches
        if end > len(self._dataset):
            raise ValueError(
                f"the data ends at sample {len(self._dataset)}, within the global batch of samples "
                f"{self.consumed_samples} to {end}; ask for fewer iterations (--train-iters, "
                "--train-samples, --eval-iters)"
            )
        starts = range(self.consumed_samples, end, self._micro_batch_size)
        batch = [self._read(start) for start in starts]
        self.consumed_samples = end
        return batch

    def _read(self, first: int) -> Microbatch:
        samples = np.empty((self._micro_batch_size, self._dataset.seq_length + 1), np.int64)
        for row, out in enumerate(samples):
            self._dataset.read(first + row, out)
        both = torch.from_numpy(samples)
        tokens, labels = both[:, :-1].contiguous(), both[:, 1:].contiguous()
        if self._dataset.masked_token is None:
            loss_mask = torch.ones(tokens.shape, dtype=torch.float32)
        else:
            loss_mask = (tokens != self._dataset.masked_token).to(torch.float32)
        return Microbatch(tokens, labels, loss_mask)
