"""Weights of the tokens' losses add up to the share of what counts in the global batch."""

import pytest
import torch
from reference.plain_loss import RandomMicrobatch

from megatron.runtime.batch import to_device, token_counts

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gpu_gets_all_of_an_iteration_in_one_copy(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = []

    def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        copies.append(device)
        return tensor.clone()

    monkeypatch.setattr("megatron.runtime.batch._moved", moved)
    batch = [RandomMicrobatch.draw(10, 3, 7, seed) for seed in range(3)]
    gpu = torch.device("cuda", 1)
    for one, other in zip(to_device(batch, gpu, dtype), to_device(batch, CPU, dtype), strict=True):
        for name, value in vars(other).items():
            found = getattr(one, name)
            same = torch.equal(found, value) if torch.is_tensor(value) else found == value
            assert same, name
            assert not torch.is_tensor(value) or found.dtype == value.dtype
    assert copies == [gpu]
