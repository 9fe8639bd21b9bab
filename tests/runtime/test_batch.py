"""Weights of the tokens' losses make the loss a mean over what counts in the whole iteration."""

import pytest
import torch
from reference.plain_loss import RandomMicrobatch

from megatron.runtime.batch import to_device

CPU = torch.device("cpu")


def test_weights_are_the_mask_over_the_valid_tokens_of_the_iteration() -> None:
    batch = [RandomMicrobatch.draw(10, 2, 7, seed, masked_out=seed == 1) for seed in range(4)]
    valid = sum(int(microbatch.loss_mask.sum()) for microbatch in batch)
    on_device = to_device(batch, CPU, torch.float64)
    assert sum(float(m.weight_n.sum()) for m in on_device) == pytest.approx(1, rel=1e-12)
    for source, moved in zip(batch, on_device, strict=True):
        assert torch.equal(moved.weight_n * valid, source.loss_mask.flatten().double())
        assert torch.equal(moved.tokens_bs, source.tokens)
        assert torch.equal(moved.targets_n, source.labels.flatten())


def test_nothing_valid_gives_zero_weights_not_nan() -> None:
    batch = [RandomMicrobatch.draw(10, 2, 7, seed, masked_out=True) for seed in range(2)]
    assert not any(m.weight_n.any() for m in to_device(batch, CPU))
