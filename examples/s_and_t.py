"""The output layer in two passes, S and T: cross entropy over a vocabulary split among four ranks.

Shows the mathematics of vocab-2 (Algorithm 2 of arXiv 2411.05288) with plain PyTorch, one process
per rank, and nothing of this project. S is all that a rank can do alone, C1 the one barrier, and T
may wait as long as it likes.

    python examples/s_and_t.py

You should see four lines that compare the loss and both gradients of every rank with
torch.nn.functional.cross_entropy in one process. All differences are rounding errors of float64.
"""

import tempfile

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

TOKENS, HIDDEN, VOCABULARY, RANKS = 64, 32, 1000, 4


def output_layer(
    x_nh: Tensor, weight_vh: Tensor, targets_n: Tensor, first: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean loss, its gradient by x, and its gradient by this rank's rows of the weight.

    Shapes: n tokens, h hidden size, v vocabulary rows of this rank.

    Args:
        x_nh: input of the output layer; C0 has broadcast it, so that every rank has it.
        weight_vh: this rank's rows of the output matrix.
        targets_n: the next token of each token, counted in the whole vocabulary.
        first: the vocabulary entry of ``weight_vh[0]``.
    """
    # S: what this rank can do alone
    y_nv = x_nh @ weight_vh.T
    max_n = y_nv.amax(1)
    e_nv = torch.exp(y_nv - max_n[:, None])
    sum_n = e_nv.sum(1)
    a_nh = e_nv @ weight_vh
    is_mine_n = (first <= targets_n) & (targets_n < first + len(weight_vh))
    row_n = torch.where(is_mine_n, targets_n - first, 0)
    target_n = torch.where(is_mine_n, y_nv.gather(1, row_n[:, None])[:, 0], 0)
    d_nh = weight_vh[row_n] * is_mine_n[:, None]

    # C1: the barrier. This project gathers the three statistics at once, and merges them locally.
    all_max_n = max_n.clone()
    dist.all_reduce(all_max_n, dist.ReduceOp.MAX)
    shrink_n = torch.exp(max_n - all_max_n)
    all_sum_n, all_target_n = sum_n * shrink_n, target_n
    dist.all_reduce(all_sum_n)
    dist.all_reduce(all_target_n)
    share_n = shrink_n / all_sum_n
    x_gradient_nh = (a_nh * share_n[:, None] - d_nh) / len(x_nh)
    dist.all_reduce(x_gradient_nh)
    loss = (all_max_n + all_sum_n.log() - all_target_n).mean()

    # T: what nobody waits for
    softmax_nv = e_nv * share_n[:, None]
    softmax_nv[is_mine_n, row_n[is_mine_n]] -= 1
    return loss, x_gradient_nh, softmax_nv.T @ x_nh / len(x_nh)


def differences(rank: int, ranks: int) -> tuple[float, float, float]:
    """Return how far this rank's results are from cross entropy in one process, at most."""
    torch.manual_seed(0)  # all ranks draw the same numbers
    x_nh = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    weight_vh = torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64, requires_grad=True)
    targets_n = torch.randint(VOCABULARY, (TOKENS,))
    whole = cross_entropy(x_nh @ weight_vh.T, targets_n)
    x_gradient_nh, weight_gradient_vh = torch.autograd.grad(whole, (x_nh, weight_vh))

    first, last = (VOCABULARY * k // ranks for k in (rank, rank + 1))
    shard_vh = weight_vh.detach()[first:last]
    loss, x_own_nh, own_vh = output_layer(x_nh.detach(), shard_vh, targets_n, first)
    return (
        float((loss - whole.detach()).abs()),
        float((x_own_nh - x_gradient_nh).abs().max()),
        float((own_vh - weight_gradient_vh[first:last]).abs().max()),
    )


def play(rank: int, meeting_place: str) -> None:
    """Be one rank: meet the others, run the output layer, and print the line."""
    dist.init_process_group("gloo", f"file://{meeting_place}", rank=rank, world_size=RANKS)
    loss, x_gradient, weight_gradient = differences(rank, RANKS)
    line = (
        f"rank {rank} of {RANKS}: differs from cross_entropy by {loss:.0e} in the loss, "
        f"{x_gradient:.0e} in the gradient of x, {weight_gradient:.0e} in that of its rows"
    )
    print(f"{line}\n", end="", flush=True)  # one write, which no other rank's write can cut
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(play, (f"{folder}/meeting",), nprocs=RANKS)
