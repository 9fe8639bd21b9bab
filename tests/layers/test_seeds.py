"""Seeds: equal for equal names in every process, different otherwise."""

import subprocess
import sys

import pytest
import torch
from parallel.tensor_axis import without_groups

from megatron.layers.dropout import DropoutSeeds, dropout
from megatron.layers.seeds import stable_seed
from megatron.layers.site import Site

CPU = torch.device("cpu")


def test_seed_fits_63_bits_and_tells_neighbours_apart() -> None:
    seeds = [stable_seed(s, n, b) for s in range(5) for n in ("a", "b") for b in range(20)]
    seeds += [stable_seed(1, 11), stable_seed(11, 1), stable_seed("1", "1", "1")]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seed_is_the_same_in_another_process() -> None:
    code = "from megatron.layers.seeds import stable_seed; print(stable_seed(7, 'name', 3))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert int(other.stdout) == stable_seed(7, "name", 3)


@pytest.mark.parametrize("other", [(2, 3, 4, 5), (1, 4, 4, 5), (1, 3, 5, 5), (1, 3, 4, -1)])
def test_dropout_mask_belongs_to_seed_iteration_microbatch_and_layer(
    other: tuple[int, int, int, int],
) -> None:
    def mask(key: tuple[int, int, int, int], use: str = "embedding") -> torch.Tensor:
        return dropout(torch.ones(256), 0.5, DropoutSeeds(*key), use, Site(CPU, torch.float32))

    first = mask((1, 3, 4, 5))
    assert not torch.equal(first, mask(other))
    assert torch.equal(first, mask((1, 3, 4, 5)))
    assert not torch.equal(first, mask((1, 3, 4, 5), "mlp output"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_with_their_own_tokens_drop_what_one_rank_would(
    size: int, dtype: torch.dtype
) -> None:
    """Their parts side by side are the whole; for the backward each keeps a byte per element."""
    x_bsh = torch.randn(3, 8, 5).to(dtype).requires_grad_()
    seeds, probability = DropoutSeeds(1, 2, 3, 4), 0.3
    whole = dropout(x_bsh, probability, seeds, "mlp output", Site(CPU, dtype))
    parts, kept = [], list[torch.Tensor]()

    def keep(saved: torch.Tensor) -> torch.Tensor:
        kept.append(saved)
        return saved

    for rank in range(size):
        tensor = without_groups(rank, size, split_tokens=True)
        own_buh = tensor.own_tokens(x_bsh)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            site = Site(CPU, dtype, tensor=tensor)
            parts.append(dropout(own_buh, probability, seeds, "mlp output", site))
    side_by_side = torch.cat(parts, dim=1)
    assert torch.equal(side_by_side.eq(0), whole.eq(0))
    tolerance = 0.0 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(side_by_side, whole, rtol=tolerance, atol=0)
    assert sum(saved.untyped_storage().nbytes() for saved in kept) == whole.numel()
