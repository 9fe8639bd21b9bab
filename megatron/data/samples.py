"""GPT samples: shuffled documents, concatenated over epochs, cut every s tokens, shuffled again.

Sample i reads s + 1 tokens from as many documents as necessary; its last token is the first token
of the next sample. All indices follow from (lengths, seed, s, epochs), in Megatron-LM's order for
the same seed.
"""

import hashlib
import json
import os
import shutil
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron.data.index_builder import IndexBuilder
from megatron.data.index_cache import IndexCache
from megatron.data.indexed import IndexedDataset

_SAMPLE_BYTES, _DOCUMENT_BYTES = 24, 4  # per sample and per document, in SampleIndices
_FORMAT = 1  # raise when the meaning of a cached array changes
_FINAL_EPOCH_THRESHOLD = 0.80  # if this share of the last epoch is needed, it is mixed in
_Integer = TypeVar("_Integer", bound=np.integer)


class SampleDataset(Protocol):
    """Numbered samples of s + 1 tokens, from one corpus or from a blend.

    Attributes:
        seq_length: s.
        masked_token: input token whose prediction is left out of the loss; ``None``: all count.
    """

    seq_length: int
    masked_token: int | None

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def read(self, index: int, out: NDArray[np.int64]) -> None:
        """Writes sample ``index`` into ``out`` [s + 1].

        Raises:
            ValueError: the sample holds an id outside the vocabulary.
        """
        ...


@dataclass(frozen=True)
class SampleIndices:
    """The three arrays that turn a sample's number into tokens.

    Attributes:
        documents: sequences in reading order over all epochs, int32 [d].
        samples: see `IndexBuilder.sample_index`, int64 [N + 1, 2].
        shuffle: for every sample number, the place of the sample in reading order, int64 [N].
    """

    documents: NDArray[np.int32]
    samples: NDArray[np.int64]
    shuffle: NDArray[np.int64]


@dataclass(frozen=True)
class Epochs:
    """How often a split is read to get the samples asked for.

    If only a small part of the last epoch is needed, that epoch is shuffled by itself and comes
    last. Mixed in, it would show some documents more often than others from the start.

    Attributes:
        count: epochs concatenated.
        separate_final: whether the last one is shuffled by itself.
    """

    count: int
    separate_final: bool

    @classmethod
    def needed(cls, tokens: int, seq_length: int, num_samples: int) -> "Epochs":
        """The fewest epochs of ``tokens`` tokens that hold ``num_samples`` samples."""
        count = -(-(num_samples * seq_length + 1) // tokens)
        if count == 1:
            return cls(1, separate_final=False)
        from_final = num_samples - _num_samples(count - 1, tokens, seq_length)
        per_epoch = _num_samples(1, tokens, seq_length)
        return cls(count, from_final < int(_FINAL_EPOCH_THRESHOLD * per_epoch))


class GPTDataset:
    """Samples of one range of one corpus; a `SampleDataset`.

    Every id that is read must be below ``vocab_size``; the indices are from `build_sample_indices`
    for the same corpus and s.
    """

    def __init__(
        self,
        source: IndexedDataset,
        indices: SampleIndices,
        seq_length: int,
        vocab_size: int,
        masked_token: int | None = None,
    ) -> None:
        self.seq_length = seq_length
        self.masked_token = masked_token
        self._source = source
        self._indices = indices
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return len(self._indices.shuffle)

    def read(self, index: int, out: NDArray[np.int64]) -> None:
        """Writes sample ``index`` into ``out``; see `SampleDataset.read`."""
        row = int(self._indices.shuffle[index])
        (first, offset), (last, last_offset) = self._indices.samples[row : row + 2].tolist()
        filled = 0
        for position in range(first, last + 1):
            sequence = int(self._indices.documents[position])
            start = offset if position == first else 0
            stop = last_offset + 1 if position == last else int(self._source.lengths[sequence])
            out[filled : filled + stop - start] = self._source.read(sequence, start, stop)
            filled += stop - start
        assert filled == len(out) == self.seq_length + 1
        # Read as unsigned numbers, negative ids are huge. So one comparison finds them too.
        if out.view(np.uint64).max() >= self._vocab_size:
            self._refuse_tokens(index, out)

    def _refuse_tokens(self, index: int, out: NDArray[np.int64]) -> None:
        raise ValueError(
            f"{self._source.named}: sample {index} holds token ids {out.min()}..{out.max()}, "
            f"outside the vocabulary of {self._vocab_size} entries; train with the tokenizer that "
            "made the data (--tokenizer-model) or a --vocab-size that holds its ids"
        )


def build_sample_indices(
    source: IndexedDataset,
    sequences: range,
    seq_length: int,
    num_samples: int | None,
    seed: int,
    cache: Path,
    builder: IndexBuilder,
    asked_by: str = "--train-iters or --train-samples",
) -> SampleIndices:
    """Builds the indices, or maps them when an earlier run or another rank has built them.

    The file names carry a hash of everything that the content depends on. A file of checksums
    reveals damaged content. Ranks that build at the same time write the same bytes.

    Args:
        source: the corpus.
        sequences: range of the corpus's sequences that belongs to the split.
        seq_length: tokens per sample s.
        num_samples: samples needed; the indices go on to the end of the last epoch. ``None``: the
            whole samples of one epoch.
        seed: seed of both shuffles.
        cache: folder of the arrays, made when missing.
        builder: from `load_index_builder`.
        asked_by: flags that say how many samples are needed, for messages.

    Raises:
        ValueError: the range is too short for one sample, or the cache cannot be written.
    """
    lengths = source.lengths[sequences.start : sequences.stop]
    tokens = int(lengths.sum(dtype=np.int64))
    if tokens <= seq_length:
        raise ValueError(
            f"{source.named}: a split of {len(sequences)} documents holds {tokens} tokens, too few "
            f"for one sample of --seq-length {seq_length} + 1; give it a larger share of --split, "
            "or more text"
        )
    epochs = Epochs(1, separate_final=False)
    if num_samples is not None:
        epochs = Epochs.needed(tokens, seq_length, num_samples)
    cached = IndexCache(cache, _name_of(source, sequences, seq_length, seed, epochs))
    try:
        if (found := cached.load()) is None:
            samples = _num_samples(epochs.count, tokens, seq_length)
            _check_room(cache, samples, epochs.count * len(sequences), asked_by)
            built = _build(source.lengths, sequences, tokens, seq_length, epochs, seed, builder)
            found = cached.save(vars(built))
        cached.name_bus_errors(found, builder)
        return SampleIndices(**found)
    except OSError as error:
        raise ValueError(
            f"--data-cache-path: cannot write sample indices to {cache} ({error}); give a writable "
            "folder with room for them"
        ) from error


def _name_of(
    source: IndexedDataset, sequences: range, seq_length: int, seed: int, epochs: Epochs
) -> str:
    """Return the name of the indices in the cache, with a hash of all that they depend on."""
    identity = json.dumps(
        [_FORMAT, sequences.start, sequences.stop, seq_length, seed, *astuple(epochs)]
    )
    digest = hashlib.sha256(identity.encode())
    digest.update(source.lengths.tobytes())
    return f"{source.prefix.name}-{digest.hexdigest()[:16]}"


def _num_samples(epochs: int, tokens: int, seq_length: int) -> int:
    """Return the number of whole samples in the epochs; their last token is only a label."""
    return (epochs * tokens - 1) // seq_length


def _build(
    lengths: NDArray[np.int32],
    sequences: range,
    tokens: int,
    seq_length: int,
    epochs: Epochs,
    seed: int,
    builder: IndexBuilder,
) -> SampleIndices:
    # NumPy's legacy generator, because its stream never changes and Megatron-LM uses it.
    random = np.random.RandomState(seed)
    one_epoch = np.arange(sequences.start, sequences.stop, dtype=np.int32)
    total = _num_samples(epochs.count, tokens, seq_length)
    groups, boundary = [epochs.count], total
    if epochs.separate_final:
        groups, boundary = [epochs.count - 1, 1], _num_samples(epochs.count - 1, tokens, seq_length)
    documents = np.concatenate([_shuffled(random, np.tile(one_epoch, n)) for n in groups])
    samples = builder.sample_index(np.ascontiguousarray(lengths), documents, seq_length, total)
    shuffle = [_shuffled(random, np.arange(boundary))]
    if boundary < total:
        shuffle.append(_shuffled(random, np.arange(boundary, total)))
    return SampleIndices(documents, samples, np.concatenate(shuffle))


def _shuffled(random: np.random.RandomState, array: NDArray[_Integer]) -> NDArray[_Integer]:
    random.shuffle(array)
    return array


def _check_room(cache: Path, samples: int, documents: int, asked_by: str) -> None:
    """Refuse indices that are too large for memory or disk, before minutes are spent on them.

    Raises:
        ValueError: memory or disk is too small; the message names the flags.
    """
    needed = _SAMPLE_BYTES * samples + _DOCUMENT_BYTES * documents
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    folder = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    for room, where in (
        (memory, "memory of this machine"),
        (shutil.disk_usage(folder).free, f"room left in {cache}, the folder of --data-cache-path"),
    ):
        if needed > room:
            raise ValueError(
                f"{asked_by}: the indices of {samples:,} samples take {needed / 1e9:.1f} GB, more "
                f"than the {room / 1e9:.1f} GB of {where}: ask for fewer"
            )
