"""A tensor enters a stage's graph without being kept, and its gradient comes out."""

import torch

from megatron.runtime.entry import Entry


def test_a_gradient_lies_in_one_piece_whatever_the_stage_does_first() -> None:
    """It may be sent to another rank; Megatron-Core's stages are transposed."""
    generator = torch.Generator().manual_seed(1)
    x_bsh = torch.randn(2, 3, 4, generator=generator)
    factor_sbh = torch.randn(3, 2, 4, generator=generator)
    entry = Entry()
    (entry.connect(x_bsh).transpose(0, 1).contiguous() * factor_sbh).sum().backward()
    found = entry.take_gradient()
    assert torch.equal(found, factor_sbh.transpose(0, 1))
    assert found.is_contiguous()
