"""Samples become microbatches; their order depends only on the number of consumed samples."""

import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from megatron.data.samples import SampleDataset
from megatron.data.settings import DocumentSettings

T = TypeVar("T")


class Further(NamedTuple):
    """Tokens after a rank's own, for multi-token prediction; D depths, u tokens of a sample.

    Depth k = 1 ... D of a token reads the token k positions later, and predicts the token after
    that. After the end of a sample the ids are 0, and nothing is predicted.

    Attributes:
        ids_bdu: the tokens that depths read, int64.
        targets_bdu: the tokens that depths predict, int64.
        mask_bdu: the mask of these predictions, float32, for every depth times the number of
            predictions that count in the whole microbatch, by the number that count at this depth.
    """

    ids_bdu: Tensor
    targets_bdu: Tensor
    mask_bdu: Tensor


@dataclass(frozen=True, eq=False)
class Microbatch:
    """The unit that travels through the pipeline; CPU tensors of shape [b, s].

    Ranks that share sequences (context parallelism) hold a part of the tokens each (``part``). So
    do slices of a microbatch.

    Attributes:
        tokens: input ids, int64.
        labels: the token after each input, int64.
        loss_mask: 1 where the prediction counts, 0 where it does not, float32.
        document_starts: first position of each token's document, int64, for whole samples also
            after ``part``; ``None``: a token attends to all earlier tokens of its sample.
        positions: position of every token in its sample (in its document where the configuration
            says so), int64, [b, s] or [1, s] for all samples; ``None``: 0, 1, 2, ...
        valid_share: number of predictions that count in the whole samples, divided by the number
            of ranks that share the samples; ``None``: the rank holds whole samples.
        further: the tokens that follow, if these tokens are parts of samples and further tokens are
            predicted.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    document_starts: Tensor | None = None
    positions: Tensor | None = None
    valid_share: float | None = None
    further: Further | None = None

    def part(self, kept_u: Tensor | None, depths: int = 0) -> "Microbatch":
        """Return the microbatch with some of its tokens.

        ``document_starts`` stays whole, because attention needs whole documents.

        Args:
            kept_u: positions of the kept tokens in every sample, int64 [u]; ``None``: all.
            depths: further tokens that every token predicts, D.
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
            further=self._further(kept_u, depths) if depths else None,
        )

    def _further(self, kept_u: Tensor, depths: int) -> Further:
        """Return the tokens that follow the kept tokens; other ranks may hold them."""
        later_du = kept_u + torch.arange(1, depths + 1)[:, None]
        ids_bdu, targets_bdu, mask_bdu = (
            functional.pad(of_all, (0, depths))[:, later_du]
            for of_all in (self.tokens, self.labels, self.loss_mask)
        )
        counted = [self.loss_mask[:, k:].sum(dtype=torch.float64) for k in range(depths + 1)]
        share_d = torch.stack([counted[0] / own if own else own for own in counted[1:]])
        return Further(ids_bdu, targets_bdu, mask_bdu * share_d.to(torch.float32)[:, None])


class MicrobatchLoader:
    """Reads a replica's microbatches of every global batch.

    The order is Megatron-LM's: the first microbatches of all replicas take ``micro_batch_size``
    samples each, then the second microbatches of all replicas, and so on.

    Args:
        dataset: the samples; every rank reads the same ones.
        micro_batch_size: samples per microbatch b.
        num_microbatches: microbatches of this replica per global batch.
        consumed_samples: samples that earlier iterations have used.
        replica: number of this replica, and number of replicas.
        documents: how the documents within a sample are kept apart; ``None``: they are not.
        kept: positions within a sample of the tokens that this rank trains on, int64; ``None``:
            all.
        depths: further tokens that every token predicts.

    Attributes:
        consumed_samples: samples used so far; every `next_batch` advances the number, and a
            checkpoint must save it.
        num_microbatches: microbatches of this replica per global batch; the caller may change the
            number between two batches.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        micro_batch_size: int,
        num_microbatches: int,
        consumed_samples: int = 0,
        replica: tuple[int, int] = (0, 1),
        documents: DocumentSettings | None = None,
        kept: Tensor | None = None,
        depths: int = 0,
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
        self._kept, self._depths = kept, depths

    def next_batch(self) -> list[Microbatch]:
        """Reads this replica's microbatches of the next global batch.

        Returns:
            ``num_microbatches`` microbatches, with the tokens that this rank keeps.

        Raises:
            ValueError: the dataset ends before the batch does, or holds foreign token ids.
        """
        return self.next_prepared(list)

    def next_prepared(self, prepare: Callable[[list[Microbatch]], T]) -> T:
        """Read the next global batch, and return the result of ``prepare`` for it.

        Args:
            prepare: function of a batch; it may run in another thread, on one batch at a time.

        Raises:
            ValueError: as ``next_batch``.
        """
        starts = self._starts(self.consumed_samples, self._replica, self._replicas)
        batch = self._prepared(starts, prepare)
        self.consumed_samples += self.batch_size
        return batch

    def read_ahead(self, prepare: Callable[[list[Microbatch]], object]) -> None:
        """Do nothing; a subclass may start to read the batch that ``next_prepared`` returns."""

    def global_batch(
        self, first: int, begin: int = 0, step: int = 1, size: int | None = None
    ) -> list[Microbatch]:
        """Reads microbatches, with all their tokens, of the global batch from sample ``first``.

        Of the global batch's microbatches it reads number ``begin`` and then every ``step``-th.
        The batch has ``size`` samples; ``None``: ``batch_size``.

        Raises:
            ValueError: as ``next_batch``.
        """
        return [self._read(start) for start in self._starts(first, begin, step, size)]

    def _starts(self, first: int, begin: int, step: int, size: int | None = None) -> range:
        """Return the first sample of each microbatch of ``global_batch``; raises its errors."""
        end = first + (size or self.batch_size)
        if end > len(self._dataset):
            raise ValueError(
                f"the data ends at sample {len(self._dataset)}, within the global batch of samples "
                f"{first} to {end}; ask for fewer iterations (--train-iters, --train-samples, "
                "--eval-iters)"
            )
        return range(first, end, self._micro_batch_size)[begin::step]

    def digest(self, sample: int) -> str:
        """Return 16 hex digits of a hash of a sample's tokens; empty: there is no such sample."""
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
        return [self._read(start).part(self._kept, self._depths) for start in starts]

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
        """Return a microbatch's ``document_starts`` and ``positions``; ``None``: not configured."""
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
        prepare: function that is applied to the batch.
        outcome: result of ``prepare``.
    """

    starts: range
    prepare: Callable[[list[Microbatch]], Any]
    outcome: Future[Any]


class PrefetchingLoader(MicrobatchLoader):
    """Reads and prepares the next global batch in a thread, while the model trains on this batch.

    The run may ask for another batch instead, because it continues at another sample or because
    batches have grown. That batch is read when it is asked for.
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
        """Start to read and prepare the batch that ``next_prepared`` will return."""
        if self.consumed_samples + self.batch_size <= len(self._dataset):
            after = self._starts(self.consumed_samples, self._replica, self._replicas)
            outcome = self._reader.submit(lambda: prepare(self._read_all(after)))
            self._ahead = _Ahead(after, prepare, outcome)


def document_starts(tokens: Tensor, eod_token: int) -> Tensor:
    """Return for every token the first position of its document in the sample, int64 [b, s].

    As in Megatron-LM, the token ``eod_token`` belongs to the document that it ends.
    """
    begins = torch.zeros_like(tokens)
    ended = tokens[:, :-1] == eod_token
    begins[:, 1:] = torch.where(ended, torch.arange(1, tokens.shape[1]), 0)
    return begins.cummax(1).values
