"""Weights of the tokens' losses add up to the share of what counts in the global batch."""

from functools import partial

import pytest
import torch
from reference.plain_loss import RandomMicrobatch

from megatron.data.microbatch import Microbatch, document_starts
from megatron.kernels.documents import Documents
from megatron.runtime.batch import DeviceMicrobatch, HostStep, to_device, token_counts

CPU = torch.device("cpu")


@pytest.mark.parametrize("replicas", [1, 3])
def test_weights_are_the_mask_over_the_tokens_of_the_global_batch(replicas: int) -> None:
    batch = [RandomMicrobatch.draw(10, 2, 7, seed, masked_out=seed == 1) for seed in range(4)]
    valid = sum(int(microbatch.loss_mask.sum()) for microbatch in batch)
    tokens = 4 * 2 * 7
    on_device = to_device(batch, CPU, torch.float64, replicas=replicas)
    assert token_counts(on_device) == (tokens, valid)
    assert valid < tokens
    for source, moved in zip(batch, on_device, strict=True):
        mask = source.loss_mask.flatten().double()
        torch.testing.assert_close(moved.weight_n * tokens * replicas, mask)
        assert torch.equal(moved.tokens_n, source.tokens.flatten())
        assert moved.samples == 2
        assert torch.equal(moved.targets_n, source.labels.flatten())


@pytest.mark.parametrize(("replicas", "ranks"), [(1, 1), (3, 1), (4, 2)])
def test_weights_of_equal_microbatches_are_the_mask_over_its_own_count(
    replicas: int, ranks: int
) -> None:
    """Also for a rank with a part of the samples. Without a token that counts all weights are 0.

    ``replicas`` counts the ranks that share samples too.
    """
    batch = [RandomMicrobatch.draw(10, 2, 8, seed, masked_out=seed == 1) for seed in range(4)]
    kept = torch.arange(8 // ranks)
    own = [Microbatch(m.tokens, m.labels, m.loss_mask).part(kept) for m in batch]
    total = 4 * replicas // ranks  # microbatches of the global batch
    moved = to_device(own, CPU, torch.float64, replicas=replicas, loss_scale=8, by_microbatch=True)
    for source, found in zip(batch, moved, strict=True):
        mask = source.loss_mask[:, kept].flatten().double()
        count = max(float(source.loss_mask.sum()), 1.0)
        torch.testing.assert_close(found.weight_n, 8 * mask / (count * total))
        assert found.mean_weight == pytest.approx(8 / (total * ranks))
        assert found.loss_factor is not None
        equal = found.weight_n * found.loss_factor
        torch.testing.assert_close(equal, 8 * mask / (replicas * 4 * 2 * len(kept)))


def test_nothing_valid_gives_zero_weights_not_nan() -> None:
    batch = [RandomMicrobatch.draw(10, 2, 7, seed, masked_out=True) for seed in range(2)]
    on_device = to_device(batch, CPU)
    assert not any(m.weight_n.any() for m in on_device)
    assert token_counts(on_device) == (28, 0)


def test_parts_of_the_sequence_come_one_after_the_other() -> None:
    source = RandomMicrobatch.draw(10, 3, 8, seed=0)
    [natural] = to_device([source], CPU)
    ordered = natural.part_by_part(4)
    parts = source.tokens.chunk(4, dim=1)  # what each rank has of every sample
    assert torch.equal(ordered.tokens_n, torch.stack(parts).flatten())
    weights = torch.stack(source.loss_mask.chunk(4, dim=1)).flatten() / source.tokens.numel()
    torch.testing.assert_close(ordered.weight_n, weights)
    labels = torch.stack(source.labels.chunk(4, dim=1)).flatten()
    assert torch.equal(ordered.targets_n, labels)
    assert natural.part_by_part(1) is natural
    assert (ordered.samples, ordered.valid_tokens) == (3, natural.valid_tokens)


def told_apart(seed: int) -> Microbatch:
    """A microbatch with documents, of numbers of tokens that are no multiples of anything."""
    source, shape = RandomMicrobatch.draw(10, 3, 7, seed), (3, 7)
    starts = document_starts(source.tokens, eod_token=seed)
    positions = torch.arange(shape[1]) - starts
    return Microbatch(source.tokens, source.labels, source.loss_mask, starts, positions)


def same(one: object, other: object) -> bool:
    """Whether all that two microbatches hold is equal, to the bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, DeviceMicrobatch | Documents):
        found = vars(other)
        return all(same(value, found[name]) for name, value in vars(one).items())
    return one == other


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("apart", [False, True], ids=["as one", "documents apart"])
def test_all_of_an_iteration_lies_in_one_buffer(dtype: torch.dtype, apart: bool) -> None:
    draw = told_apart if apart else partial(RandomMicrobatch.draw, 10, 3, 7)
    batch = [draw(seed) for seed in range(3)]
    step = HostStep.of(batch, CPU)
    copy = torch.cat((step.buffer, torch.zeros(5, dtype=torch.uint8)))
    moved = step.on(copy, dtype, replicas=2, loss_scale=3.0)
    for source, found in zip(batch, moved, strict=True):
        weights = source.loss_mask.flatten().to(dtype) * (3.0 / (2 * 3 * 21))
        starts = source.document_starts if apart else None
        expected = DeviceMicrobatch(
            source.tokens.flatten(),
            source.labels.flatten(),
            weights,
            3,
            float(source.loss_mask.sum()),
            None if starts is None else Documents.of(starts, torch.clone),
            source.positions if apart else None,
            mean_weight=float(source.loss_mask.sum()) * (3.0 / (2 * 3 * 21)),
        )
        assert same(found, expected)
        tensors = [found.tokens_n, found.targets_n, found.positions_bs]
        if found.documents is not None:
            tensors += [found.documents.first_bs, found.documents.bounds_k]
            assert found.documents.host_first_bs is not found.documents.first_bs
        for tensor in tensors:
            at = copy.data_ptr(), copy.data_ptr() + step.buffer.numel()
            assert tensor is None or at[0] <= tensor.data_ptr() < at[1]
    assert all(map(same, to_device(batch, CPU, dtype, replicas=2, loss_scale=3.0), moved))
