"""Microbatches: shapes, shift, mask, and an order that depends on consumed samples alone."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from megatron.data.microbatch import (
    Microbatch,
    MicrobatchLoader,
    PrefetchingLoader,
    document_starts,
)
from megatron.data.settings import DocumentSettings


class Numbered:
    """Sample i is 10 i, 10 i + 1, ..., so that every token tells its place."""

    def __init__(self, count: int, seq_length: int = 4, masked_token: int | None = None) -> None:
        self.seq_length = seq_length
        self.masked_token = masked_token
        self._count = count

    def __len__(self) -> int:
        return self._count

    def read(self, index: int, out: NDArray[np.int64]) -> None:
        out[:] = 10 * index + np.arange(self.seq_length + 1)


def sample_numbers(batch: list[Microbatch]) -> list[list[int]]:
    return [(microbatch.tokens[:, 0] // 10).tolist() for microbatch in batch]


def test_labels_are_the_tokens_shifted_by_one() -> None:
    (microbatch,) = MicrobatchLoader(Numbered(9), 3, 1, consumed_samples=2).next_batch()
    assert microbatch.tokens.tolist() == [[20, 21, 22, 23], [30, 31, 32, 33], [40, 41, 42, 43]]
    assert microbatch.labels.tolist() == [[21, 22, 23, 24], [31, 32, 33, 34], [41, 42, 43, 44]]
    assert microbatch.loss_mask.tolist() == [[1.0] * 4] * 3
    for tensor, dtype in (
        (microbatch.tokens, torch.int64),
        (microbatch.labels, torch.int64),
        (microbatch.loss_mask, torch.float32),
    ):
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()


def test_no_loss_where_the_input_is_the_masked_token() -> None:
    (microbatch,) = MicrobatchLoader(Numbered(2, masked_token=12), 2, 1).next_batch()
    assert microbatch.loss_mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 1]]


@given(micro=st.integers(1, 3), count=st.integers(1, 4), consumed=st.integers(0, 9))
def test_microbatches_are_consecutive_slices_of_consecutive_samples(
    micro: int, count: int, consumed: int
) -> None:
    loader = MicrobatchLoader(Numbered(1000), micro, count, consumed)
    for _ in range(2):
        batch = sample_numbers(loader.next_batch())
        assert [len(part) for part in batch] == [micro] * count
        read = [index for part in batch for index in part]
        assert read == list(range(consumed, consumed + micro * count))
        consumed += micro * count
        assert loader.consumed_samples == consumed


@given(st.sampled_from([(1, 6), (2, 3), (3, 2), (6, 1)]))
def test_order_of_samples_is_the_same_for_every_cut_into_microbatches(cut: tuple[int, int]) -> None:
    loader = MicrobatchLoader(Numbered(12), *cut)
    read = [
        index for _ in range(2) for part in sample_numbers(loader.next_batch()) for index in part
    ]
    assert read == list(range(12))


def test_resuming_continues_where_the_count_says() -> None:
    straight = MicrobatchLoader(Numbered(100), 2, 3)
    straight.next_batch()
    resumed = MicrobatchLoader(Numbered(100), 2, 3, straight.consumed_samples)
    assert sample_numbers(resumed.next_batch()) == sample_numbers(straight.next_batch())


def test_end_of_data_is_an_error_and_consumes_nothing() -> None:
    loader = MicrobatchLoader(Numbered(11), 2, 3)
    loader.next_batch()
    with pytest.raises(ValueError, match=r"data ends at sample 11, within .* samples 6 to 12"):
        loader.next_batch()
    assert loader.consumed_samples == 6


@pytest.mark.parametrize("kind", [MicrobatchLoader, PrefetchingLoader])
def test_ranks_that_share_samples_read_the_same_and_keep_their_own_tokens(
    kind: type[MicrobatchLoader],
) -> None:
    documents = DocumentSettings(True, True, eod_token=12)
    kept = torch.tensor([0, 3])
    for asked, positions in ((None, [[0, 3]]), (documents, [[0, 3], [0, 0]])):
        whole, own = (
            kind(Numbered(9, masked_token=12), 2, 1, documents=asked, kept=positions_kept)
            for positions_kept in (None, kept)
        )
        [all_], [part] = whole.next_batch(), own.next_batch()
        assert part.positions is not None
        assert part.positions.tolist() == positions
        for one, other in (
            (part.tokens, all_.tokens),
            (part.labels, all_.labels),
            (part.loss_mask, all_.loss_mask),
        ):
            assert torch.equal(one, other[:, kept])
        if asked is not None:
            assert all_.document_starts is not None
            assert part.document_starts is not None
            assert torch.equal(part.document_starts, all_.document_starts)  # attention needs all
        assert torch.equal(own.global_batch(0)[0].tokens, whole.global_batch(0)[0].tokens)


EOD = 7
DOCUMENTS = [
    ([1, 2, 3, 4], [0, 0, 0, 0]),
    ([1, EOD, 3, 4], [0, 0, 2, 2]),
    ([EOD, EOD, 3, EOD], [0, 1, 2, 2]),
]


@pytest.mark.parametrize(("tokens", "starts"), DOCUMENTS)
def test_an_end_belongs_to_the_document_that_it_ends(tokens: list[int], starts: list[int]) -> None:
    assert document_starts(torch.tensor([tokens]), EOD).tolist() == [starts]


def megatron_masks(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Visible keys and positions of a sample, by the rules of Megatron-LM's GPTDataset."""
    visible = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    positions, begin = torch.arange(len(tokens)), 0
    for end in (tokens == EOD).nonzero().flatten().tolist():
        visible[end + 1 :, : end + 1] = False
        positions[end + 1 :] -= end + 1 - begin
        begin = end + 1
    return visible, positions


@given(
    st.lists(st.lists(st.sampled_from([1, 2, EOD]), min_size=6, max_size=6), min_size=2, max_size=2)
)
def test_what_a_token_sees_and_its_position_are_megatrons(tokens: list[list[int]]) -> None:
    starts, place = document_starts(torch.tensor(tokens), EOD), torch.arange(6)
    for row, begins in zip(torch.tensor(tokens), starts, strict=True):
        visible, positions = megatron_masks(row)
        own = (place <= place[:, None]) & (place >= begins[:, None])
        assert torch.equal(own, visible)
        assert torch.equal(place - begins, positions)


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("positions", [False, True])
def test_documents_are_told_apart_where_it_is_asked_for(attention: bool, positions: bool) -> None:
    config = DocumentSettings(attention, positions, eod_token=11)
    loader = MicrobatchLoader(Numbered(2), 2, 1, documents=config)
    (microbatch,) = loader.next_batch()
    starts = [[0, 0, 0, 0], [0, 0, 2, 2]]
    own = microbatch.document_starts, microbatch.positions
    expected = starts, [[0, 1, 2, 3], [0, 1, 0, 1]]
    for tensor, wanted, asked in zip(own, expected, (attention, positions), strict=True):
        assert (None if tensor is None else tensor.tolist()) == (wanted if asked else None)


class Watched(Numbered):
    """Notes which thread reads which sample."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.read_by: dict[int, str] = {}

    def read(self, index: int, out: NDArray[np.int64]) -> None:
        self.read_by[index] = threading.current_thread().name
        super().read(index, out)


def next_of(ahead: PrefetchingLoader) -> list[Microbatch]:
    """The next batch, from whose end on the one after is read."""
    batch = ahead.next_prepared(list)
    ahead.read_ahead(list)
    return batch


def test_the_next_batch_is_read_ahead_in_a_thread() -> None:
    dataset = Watched(14)
    ahead, plain = PrefetchingLoader(dataset, 2, 3), MicrobatchLoader(Numbered(14), 2, 3)
    for _ in range(2):
        assert sample_numbers(next_of(ahead)) == sample_numbers(plain.next_batch())
        assert ahead.consumed_samples == plain.consumed_samples
    here = threading.current_thread().name
    assert {index for index, thread in dataset.read_by.items() if thread == here} == set(range(6))
    assert set(dataset.read_by) == set(range(12)), "a part of a batch is never read"
    with pytest.raises(ValueError, match="the data ends at sample 14"):
        next_of(ahead)


def test_another_batch_than_the_one_read_ahead_is_read_anew() -> None:
    ahead = PrefetchingLoader(Numbered(100), 2, 3, replica=(1, 2))
    plain = MicrobatchLoader(Numbered(100), 2, 3, replica=(1, 2))
    for consumed, count in ((0, 3), (12, 3), (60, 3), (72, 2), (80, 2)):
        for loader in (ahead, plain):
            loader.consumed_samples, loader.num_microbatches = consumed, count
        assert sample_numbers(next_of(ahead)) == sample_numbers(plain.next_batch())


def test_a_fault_in_a_batch_read_ahead_is_told_when_it_is_needed() -> None:
    class Faulty(Numbered):
        def read(self, index: int, out: NDArray[np.int64]) -> None:
            if index == 3:
                raise ValueError("sample 3 holds token ids")
            super().read(index, out)

    ahead = PrefetchingLoader(Faulty(8), 2, 1)
    next_of(ahead)
    with pytest.raises(ValueError, match="sample 3"):
        next_of(ahead)
