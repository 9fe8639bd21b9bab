"""Samples become microbatches, in an order that only the count of consumed samples decides."""

import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron.data.config import DocumentsConfig
from megatron.data.samples import SampleDataset

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Microbatch:
    """The unit that travels through the pipeline; CPU tensors of shape [b, s].

    Ranks that share sequences have some of its tokens each (``part``).

    Attributes:
        tokens: input ids, int64.
        labels: the token after each input, int64.
        loss_mask: 1 where the prediction counts, 0 where it does not, float32.
        document_starts: for every token of whole samples the first position of its document, int64;
            ``None``: a token sees all earlier ones of its sample.
        positions: of every token, in its document if asked for, int64, [b, s] or [1, s] for all
            samples; ``None``: 0, 1, 2, ... in its sample.
        valid_share: predictions of whole samples that count, divided by the ranks that share the
            samples; ``None``: nobody shares them.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    document_starts: Tensor | None = None
    positions: Tensor | None = None
    valid_share: float | None = None

    def part(self, kept_u: Tensor | None) -> "Microbatch":
        """Return the same with some of its tokens; attention still needs whole documents.

        Args:
            kept_u: their positions in every sample, int64; ``None``: all.
        """
        if kept_u is None:
            return self
        positions = kept_u[None] if self.positions is None else self.positions[:, kept_u]
        ranks = self.tokens.shape[1] / len(kept_u)
        return replace(
            self,
            tokens=self.tokens[:, kept_u],
            labels=self.labels[:, kept_u],
            loss_mask=self.loss_mask[:, kept_u],
            positions=positions,
            valid_share=float(self.loss_mask.sum(dtype=torch.float64)) / ranks,
        )


class MicrobatchLoader:
    """Reads a replica's microbatches of every global batch.

    The order is Megatron-LM's: the microbatches of all replicas take ``micro_batch_size`` samples
    in turn, the first of every replica, then the second, and so on.

    Args:
        dataset: the samples; every rank reads the same ones.
        micro_batch_size: samples per microbatch b.
        num_microbatches: microbatches of this replica per global batch.
        consumed_samples: samples that earlier iterations have used.
        replica: number of this replica, and number of replicas.
        documents: what becomes of the documents in a sample; ``None``: they are as one.
        kept: positions of a sample whose tokens this rank trains on, int64; ``None``: all.

    Attributes:
        consumed_samples: advanced by every `next_batch`; a checkpoint must save it.
        num_microbatches: of this replica per global batch; it may change between two batches.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        micro_batch_size: int,
        num_microbatches: int,
        consumed_samples: int = 0,
        replica: tuple[int, int] = (0, 1),
        documents: DocumentsConfig | None = None,
        kept: Tensor | None = None,
    ) -> None:
        assert micro_batch_size > 0
        assert num_microbatches > 0
        assert consumed_samples >= 0
        self.consumed_samples = consumed_samples
        self._dataset = dataset
        self._micro_batch_size = micro_batch_size
        self.num_microbatches = num_microbatches
        self._replica, self._replicas = replica
        self._documents = documents
        self._kept = kept

    def next_batch(self) -> list[Microbatch]:
        """Reads this replica's microbatches of the next global batch.

        Returns:
            ``num_microbatches`` microbatches, with the tokens that this rank keeps.

        Raises:
            ValueError: the dataset ends before the batch does, or holds foreign token ids.
        """
        return self.next_prepared(list)

    def next_prepared(self, prepare: Callable[[list[Microbatch]], T]) -> T:
        """Read the next global batch, and return what ``prepare`` makes of it.

        Args:
            prepare: may be called in another thread, for one batch at a time.

        Raises:
            ValueError: as ``next_batch``.
        """
        starts = self._starts(self.consumed_samples, self._replica, self._replicas)
        batch = self._prepared(starts, prepare)
        self.consumed_samples += self.batch_size
        return batch

    def read_ahead(self, prepare: Callable[[list[Microbatch]], object]) -> None:
        """Begin with the batch that ``next_prepared`` will be asked for; here nothing begins."""

    def global_batch(self, first: int, begin: int = 0, step: int = 1) -> list[Microbatch]:
        """Reads whole microbatches of the global batch that begins with sample ``first``.

        Those are every ``step``-th, from ``begin`` on.

        Raises:
            ValueError: as ``next_batch``.
        """
        return [self._read(start) for start in self._starts(first, begin, step)]

    def _starts(self, first: int, begin: int, step: int) -> range:
        """Return the first samples of the microbatches of ``global_batch``; errors as there."""
        end = first + self.batch_size
        if end > len(self._dataset):
            raise ValueError(
                f"the data ends at sample {len(self._dataset)}, within the global batch of samples "
                f"{first} to {end}; ask for fewer iterations (--train-iters, --train-samples, "
                "--eval-iters)"
            )
        return range(first, end, self._micro_batch_size)[begin::step]

    def digest(self, sample: int) -> str:
        """Return a word that tells the tokens of a sample from others; empty if there is none."""
        if not 0 <= sample < len(self._dataset):
            return ""
        tokens = np.empty(self._dataset.seq_length + 1, np.int64)
        self._dataset.read(sample, tokens)
        return hashlib.sha256(tokens.tobytes()).hexdigest()[:16]

    @property
    def batch_size(self) -> int:
        """Samples of a global batch."""
        return self._micro_batch_size * self.num_microbatches * self._replicas

    @property
    def samples(self) -> int:
        """Samples of the dataset."""
        return len(self._dataset)

    @property
    def whole_batches(self) -> int:
        """Global batches that the dataset fills."""
        return len(self._dataset) // self.batch_size

    def _prepared(self, starts: range, prepare: Callable[[list[Microbatch]], T]) -> T:
        return prepare(self._read_all(starts))

    def _read_all(self, starts: range) -> list[Microbatch]:
        return [self._read(start).part(self._kept) for start in starts]

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
        starts, positions = self._told_apart(tokens)
        return Microbatch(tokens, labels, loss_mask, starts, positions)

    def _told_apart(self, tokens: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return a microbatch's ``document_starts`` and ``positions``, where they are asked for."""
        asked = self._documents
        if asked is None:
            return None, None
        starts = document_starts(tokens, asked.eod_token)
        return (
            starts if asked.reset_attention_mask else None,
            torch.arange(tokens.shape[1]) - starts if asked.reset_position_ids else None,
        )


class _Ahead(NamedTuple):
    """A batch that is being read.

    Attributes:
        starts: first samples of its microbatches.
        prepare: what is done with it.
        outcome: of that.
    """

    starts: range
    prepare: Callable[[list[Microbatch]], Any]
    outcome: Future[Any]


class PrefetchingLoader(MicrobatchLoader):
    """Reads and prepares the next global batch in a thread, while this one is trained on.

    A batch that turns out to be another one, as the run goes on elsewhere or batches have grown, is
    read when it is needed.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._ahead: _Ahead | None = None

    def _prepared(self, starts: range, prepare: Callable[[list[Microbatch]], T]) -> T:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and (ahead.starts, ahead.prepare) == (starts, prepare):
            batch: T = ahead.outcome.result()
            return batch
        if ahead is not None:
            wait([ahead.outcome])  # batches are prepared one at a time
        return super()._prepared(starts, prepare)

    def read_ahead(self, prepare: Callable[[list[Microbatch]], object]) -> None:
        """As ``MicrobatchLoader.read_ahead``."""
        if self.consumed_samples + self.batch_size <= len(self._dataset):
            after = self._starts(self.consumed_samples, self._replica, self._replicas)
            outcome = self._reader.submit(lambda: prepare(self._read_all(after)))
            self._ahead = _Ahead(after, prepare, outcome)


def document_starts(tokens: Tensor, eod_token: int) -> Tensor:
    """Return for every token the first position of its document in the sample, int64 [b, s].

    As in Megatron-LM the token that ends a document, ``eod_token``, belongs to it.
    """
    begins = torch.zeros_like(tokens)
    ended = tokens[:, :-1] == eod_token
    begins[:, 1:] = torch.where(ended, torch.arange(1, tokens.shape[1]), 0)
    return begins.cummax(1).values
