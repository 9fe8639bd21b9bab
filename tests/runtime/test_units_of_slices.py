"""Units of a microbatch: slices with the tokens and the positions that are theirs."""

import torch
from torch import Tensor

from megatron.layers.slices import SequenceSlice
from megatron.runtime.batch import DeviceMicrobatch
from megatron.runtime.units import units_of

SAMPLES, LENGTH = 2, 12


def microbatch(positions_bs: Tensor | None) -> DeviceMicrobatch:
    tokens_n = torch.arange(SAMPLES * LENGTH)
    return DeviceMicrobatch(
        tokens_n=tokens_n,
        targets_n=tokens_n + 1,
        weight_n=torch.ones(SAMPLES * LENGTH),
        samples=SAMPLES,
        valid_tokens=float(SAMPLES * LENGTH),
        positions_bs=positions_bs,
    )


def test_slices_have_the_places_of_their_tokens_in_the_sample() -> None:
    own_bs = torch.randint(LENGTH, (SAMPLES, LENGTH))
    parts = SequenceSlice.of_lengths((2, 4, 6))
    units = units_of([microbatch(None), microbatch(own_bs)], parts)
    usual_bs = torch.arange(LENGTH).expand(SAMPLES, -1)
    tokens_bs = torch.arange(SAMPLES * LENGTH).view(SAMPLES, LENGTH)
    for expected_bs, found in ((usual_bs, units[:3]), (own_bs, units[3:])):
        for part, unit in zip(parts, found, strict=True):
            kept = slice(part.first, part.end)
            assert unit.positions_bs is not None
            assert torch.equal(unit.positions_bs.expand(SAMPLES, -1), expected_bs[:, kept])
            assert torch.equal(unit.tokens_n, tokens_bs[:, kept].flatten())


def test_slices_share_the_positions_that_samples_usually_have() -> None:
    units = units_of([microbatch(None)] * 2, SequenceSlice.of_lengths((4, 8)))
    made = {
        own.positions_bs.untyped_storage().data_ptr()
        for own in units
        if own.positions_bs is not None
    }
    assert len(made) == 1
