"""The parts that shards look up add up to the embedding, and gradients find their rows."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)

from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.kernels.rows import local_rows
from megatron.layers.main_grad import give_main_grad, main_grad_of
from megatron.layers.vocabulary.input_layer import InputLayer
from megatron.layers.vocabulary.shard import VocabularyShard

V, H = 11, 4


def make_shards(shards: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[InputLayer]]:
    """The whole matrix without padding, and its shards."""
    padded = -(-V // shards) * shards
    whole = torch.randn(V, H, generator=torch.Generator().manual_seed(0)).to(dtype)
    layers = []
    for index in range(shards):
        shard = VocabularyShard.of(V, padded, index, shards)
        layer = InputLayer(shard, H, ReferenceKernels(), dtype, torch.device("cpu"))
        layer.weight.detach().zero_()
        layer.weight.detach()[: shard.real_rows] = whole[shard.first_row :][: shard.real_rows]
        give_main_grad(layer.weight, torch.zeros(shard.rows, H, dtype=torch.float32))
        layers.append(layer)
    return whole, layers


def draw_tokens() -> torch.Tensor:
    """Some tokens twice, every shard's first and last among them."""
    return torch.cat([torch.arange(V), torch.arange(V).flip(0), torch.zeros(2).long()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_parts_add_up_to_the_embedding_exactly(shards: int, dtype: torch.dtype) -> None:
    whole, layers = make_shards(shards, dtype)
    total = torch.stack([layer.lookup(draw_tokens()) for layer in layers]).sum(0)
    assert torch.equal(total, F.embedding(draw_tokens(), whole))


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_gradients_add_up_in_the_rows_of_their_tokens(shards: int) -> None:
    whole, layers = make_shards(shards, torch.float32)
    gradient_nh = torch.randn(24, H, generator=torch.Generator().manual_seed(1))
    leaf = whole.requires_grad_()
    F.embedding(draw_tokens(), leaf).backward(gradient_nh)
    for layer in layers:
        for _ in range(2):  # a second microbatch adds to the first
            layer.add_gradient(draw_tokens(), gradient_nh)
    assert leaf.grad is not None
    found = torch.cat([main_grad_of(layer.weight) for layer in layers])
    torch.testing.assert_close(found[:V], 2 * leaf.grad)
    assert not found[V:].any()


@pytest.mark.parametrize("shards", [2, 3, 8])
def test_tokens_of_other_shards_do_not_meet_in_one_row(shards: int) -> None:
    """On CUDA additions to one row wait for one another."""
    _, layers = make_shards(shards, torch.float32)
    for layer in layers:
        rows, owned = local_rows(draw_tokens(), layer.shard.first_row, layer.shard.rows)
        assert torch.equal(rows[owned] + layer.shard.first_row, draw_tokens()[owned])
        hits = rows[~owned].bincount(minlength=layer.shard.rows)
        assert len(hits) == layer.shard.rows
        assert hits.max() <= -(-draw_tokens().numel() // layer.shard.rows)


def test_bf16_gradients_add_up_in_fp32() -> None:
    """Many small addends to one row would be lost in bf16."""
    _, [layer] = make_shards(1, torch.bfloat16)
    tokens_n = torch.zeros(1024, dtype=torch.int64)
    layer.add_gradient(tokens_n, torch.ones(1024, H, dtype=torch.bfloat16))
    assert torch.equal(main_grad_of(layer.weight)[0], torch.full((H,), 1024.0))
