"""What a forward pass brings to a layer, and where the layer leaves a loss."""

import torch

from megatron.kernels.documents import Documents
from megatron.layers.dropout import DropoutSeeds
from megatron.layers.forward_pass import PLAIN_PASS, ForwardPass
from megatron.layers.left_losses import LayerLosses
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
    assert own.layer == 5
    assert PLAIN_PASS.in_layer(5, None).seeds is None, "no dropout stays no dropout"


def test_layers_leave_losses_in_one_place_until_it_is_closed() -> None:
    """Layers that are computed again leave theirs again, which must count once."""
    brought = ForwardPass(losses=LayerLosses())
    assert brought.losses is not None
    first, second, again = torch.ones(3).unbind()
    brought.in_layer(0, None).leave_loss("a", first, 3.0)
    brought.in_layer(1, None).leave_loss("b", second)
    brought.in_layer(1, None).leave_load(again)
    assert brought.counts_load
    losses, loads = brought.losses.close()
    assert [(own.layer, own.name) for own in losses] == [(0, "a"), (1, "b")]
    assert [(own.value.item(), own.loss.item()) for own in losses] == [(1, 3), (1, 1)]
    assert [own.layer for own in loads] == [1]
    brought.in_layer(0, None).leave_loss("a", again)
    assert not brought.counts_load
    assert brought.losses.close() == ([], [])
    PLAIN_PASS.leave_loss("a", first)  # of a forward that nobody trains: it counts for nothing
    assert not PLAIN_PASS.counts_load


def test_a_layer_that_is_computed_again_sees_the_same_choices_so_far() -> None:
    so_far: dict[int, torch.Tensor] = {}
    passes = [LayerLosses(so_far) for _ in range(3)]
    seen = [own.choices_so_far(4, lambda: torch.tensor([2, 1])).tolist() for own in passes]
    assert seen == [[2, 1], [4, 2], [6, 3]]
    again = [own.choices_so_far(4, lambda: torch.tensor([9, 9])).tolist() for own in passes]
    assert again == seen


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
