"""The tensors of an operation's arguments are those that PyTorch's own trees have."""

from typing import Any

import torch
from torch.utils import _pytree as pytree

from megatron.planning.count.launches import tensors_of


def test_they_are_the_leaves_of_pytorchs_trees_in_their_order() -> None:
    a, b, c, d = (torch.empty(size, device="meta") for size in range(1, 5))
    trees: list[Any] = [
        a,
        None,
        3,
        (),
        [a, 2.0, [b, (c,)]],
        ((a, None, b), {"out": d, "dim": 1}),
        {"x": [c, a]},
    ]
    trees.append(torch.return_types.max((a, b)))
    for tree in trees:
        leaves = [own for own in pytree.tree_leaves(tree) if isinstance(own, torch.Tensor)]
        assert list(map(id, tensors_of(tree))) == list(map(id, leaves))
