"""Batches that are brought during the iteration before are those that would be read in it."""

import threading

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megatron.data.microbatch import Microbatch, MicrobatchLoader, PrefetchingLoader
from megatron.data.settings import DocumentSettings
from megatron.runtime.batch import DeviceMicrobatch, to_device
from megatron.runtime.feed import Feed

CPU = torch.device("cpu")
DOCUMENTS = DocumentSettings(True, True, eod_token=3)


class Numbered:
    """Samples that tell their number, and which thread has read them."""

    def __init__(self, count: int = 100) -> None:
        self.seq_length = 5
        self.masked_token: int | None = 3
        self._count = count
        self.readers: set[str] = set()

    def __len__(self) -> int:
        return self._count

    def read(self, index: int, out: NDArray[np.int64]) -> None:
        self.readers.add(threading.current_thread().name)
        if index == 90:
            raise ValueError("sample 90 holds token ids")
        out[:] = np.arange(index, index + 6) % 11


def contents(batch: list[DeviceMicrobatch]) -> list[object]:
    """All tensors of a batch, as lists of numbers."""
    found: list[object] = []
    for m in batch:
        assert m.documents is not None
        assert m.positions_bs is not None
        tensors = (m.tokens_n, m.targets_n, m.weight_n, m.positions_bs, m.documents.bounds_k)
        found.append([tensor.tolist() for tensor in tensors])
    return found


@pytest.mark.parametrize("make", [MicrobatchLoader, PrefetchingLoader])
def test_a_feed_brings_what_is_read_when_it_is_needed(make: type[MicrobatchLoader]) -> None:
    """Also after batches have grown, samples were passed over, and the loss scale has changed."""
    fed = make(Numbered(), 2, 3, documents=DOCUMENTS)
    plain = MicrobatchLoader(Numbered(), 2, 3, documents=DOCUMENTS)
    feed = Feed(CPU)
    steps = [(0, 3, 1.0), (6, 3, 1.0), (12, 3, 8.0), (40, 3, 4.0), (46, 4, 4.0), (54, 4, 4.0)]
    for consumed, count, scale in steps:
        for loader in (fed, plain):
            loader.consumed_samples, loader.num_microbatches = consumed, count
        staged = fed.next_prepared(feed.stage)
        batch = feed.take(staged, replicas=2, loss_scale=scale)
        fed.read_ahead(feed.stage)
        expected = to_device(plain.next_batch(), CPU, replicas=2, loss_scale=scale)
        assert contents(batch) == contents(expected)
        assert fed.consumed_samples == plain.consumed_samples


def test_the_next_batch_is_packed_by_another_thread() -> None:
    dataset, feed = Numbered(), Feed(CPU)
    loader = PrefetchingLoader(dataset, 2, 3, documents=DOCUMENTS)
    loader.next_prepared(feed.stage)
    here = dataset.readers.copy()
    dataset.readers.clear()
    loader.read_ahead(feed.stage)
    loader.next_prepared(feed.stage)
    assert here == {threading.current_thread().name}
    assert len(dataset.readers) == 1
    assert here != dataset.readers


def test_a_batch_is_prepared_only_after_one_that_nobody_takes() -> None:
    """They may share a buffer."""
    under_way, begun = threading.Lock(), threading.Event()

    def prepare(batch: list[Microbatch]) -> int:
        assert under_way.acquire(blocking=False), "two are prepared at a time"
        begun.set()
        threading.Event().wait(0.05)
        under_way.release()
        return len(batch)

    loader = PrefetchingLoader(Numbered(), 2, 3)
    loader.read_ahead(prepare)
    assert begun.wait(20)
    loader.consumed_samples = 30
    assert loader.next_prepared(prepare) == 3


def test_a_fault_is_told_when_the_batch_is_needed() -> None:
    feed, loader = Feed(CPU), PrefetchingLoader(Numbered(), 2, 3, consumed_samples=84)
    loader.next_prepared(feed.stage)
    loader.read_ahead(feed.stage)
    with pytest.raises(ValueError, match="sample 90"):
        loader.next_prepared(feed.stage)
