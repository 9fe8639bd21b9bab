"""What a forward pass brings to a layer, and where the layer leaves a loss."""

import torch

from megatron.kernels.documents import Documents
from megatron.layers.dropout import DropoutSeeds
from megatron.layers.forward_pass import PLAIN_PASS, ForwardPass, LayerLosses
from megatron.layers.recompute import Again
from megatron.layers.rope import RotaryEmbedding


def test_a_layer_has_its_own_rotation_and_seeds_and_all_else_of_the_pass() -> None:
    documents = Documents.of(torch.zeros(1, 4, dtype=torch.int64), torch.clone)
    rope = RotaryEmbedding(4, 4, 1.0, 10000, torch.device("cpu"))
    brought = ForwardPass(DropoutSeeds(1, 2, 3), documents=documents, losses=LayerLosses())
    own = brought.in_layer(5, rope)
    assert own.seeds == DropoutSeeds(1, 2, 3, 5)
    assert own.rope is rope
    assert own.documents is documents
    assert own.losses is brought.losses
    assert PLAIN_PASS.in_layer(5, None) == PLAIN_PASS, "no dropout stays no dropout"


def test_layers_leave_losses_in_one_place_until_it_is_closed() -> None:
    """Layers that are computed again leave theirs again, which must count once."""
    brought = ForwardPass(losses=LayerLosses())
    assert brought.losses is not None
    first, second, again = torch.ones(3).unbind()
    brought.in_layer(0, None).leave_loss(first)
    brought.in_layer(1, None).leave_loss(second)
    left = brought.losses.close()
    assert left[0] is first
    assert left[1] is second
    brought.in_layer(0, None).leave_loss(again)
    assert brought.losses.close() == []
    PLAIN_PASS.leave_loss(first)  # of a forward that nobody trains: it counts for nothing


def test_layers_do_not_hold_what_only_their_stage_reads() -> None:
    """Layers that are computed again hold their pass until the backward."""
    again: list[Again] = []
    brought = ForwardPass(
        positions_bs=torch.zeros(1, 4), ahead_bwh=torch.zeros(1, 5, 8), left_out=again
    )
    held = brought.of_layers
    assert held.ahead_bwh is None
    assert held.left_out is None
    assert held.positions_bs is brought.positions_bs
