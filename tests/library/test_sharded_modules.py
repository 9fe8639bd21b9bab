"""The vocabulary layers as modules, against the whole matrix and PyTorch's own functions."""

import copy
import gc
import re
import weakref
from collections.abc import Mapping
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from harness.rank_pool import RankPool
from torch import Tensor

from megatron.library.vocabulary import IGNORED, VocabParallelEmbedding, VocabParallelHead

V, H, BATCH, SEQUENCE = 23, 5, 2, 12
FORMS: Final[Mapping[str, dict[str, Any]]] = {
    "plain": {},
    "every form": {"label_smoothing": 0.1, "z_loss": 1e-2, "logit_softcap": 3.0},
    "smoothing": {"label_smoothing": 0.2},
}
HOW: Final[Mapping[str, dict[str, Any]]] = {
    "alike": {},
    "split": {"sequence_parallel": True},
    "recomputed": {"recompute": True},
    "split, recomputed": {"sequence_parallel": True, "recompute": True},
}


def draw() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input, matrix, targets (some ignored) and a weight for every token's loss."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, SEQUENCE, H, generator=generator, dtype=torch.float64)
    whole = 2 * torch.randn(V, H, generator=generator, dtype=torch.float64)
    targets = torch.randint(V, (BATCH, SEQUENCE), generator=generator)
    targets[0, 3] = targets[1, ::4] = IGNORED
    return x, whole, targets, torch.rand(BATCH, SEQUENCE, generator=generator, dtype=torch.float64)


def expected_losses(
    x: Tensor,
    whole: Tensor,
    targets: Tensor,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_softcap: float = 0.0,
) -> Tensor:
    """Return every token's loss, from all logits."""
    logits = x @ whole.T
    if logit_softcap:
        logits = logit_softcap * torch.tanh(logits / logit_softcap)
    plain = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none", label_smoothing=label_smoothing
    ).view_as(targets)
    squared = logits.logsumexp(-1).square().where(targets != IGNORED, 0.0)
    return plain + z_loss * squared


def own_part(tensor: Tensor, rank: int, world_size: int, split: bool) -> Tensor:
    return tensor.chunk(world_size, 1)[rank].clone() if split else tensor.clone()


def faults(
    rank: int, world_size: int, form: dict[str, Any], how: dict[str, Any], reduction: str
) -> tuple[float, float, float]:
    """Return how far the loss and both gradients are from the whole matrix's, at most."""
    split = how.get("sequence_parallel", False)
    x, whole, targets, g = draw()
    head = VocabParallelHead(H, V, dtype=torch.float64, **form, **how)
    head.load_whole(whole)
    own_x = own_part(x, rank, world_size, split).requires_grad_()
    own_targets = own_part(targets, rank, world_size, split)
    x.requires_grad_()
    whole.requires_grad_()
    if reduction == "log_probs":
        cap = form.get("logit_softcap", 0.0)
        found = head.log_probs(own_x, own_targets)
        expected = -expected_losses(x, whole, targets, logit_softcap=cap)
    else:
        found = head(own_x, own_targets, reduction)
        expected = expected_losses(x, whole, targets, **form)
    if reduction == "mean":
        expected = expected.sum() / (targets != IGNORED).sum()
    elif reduction == "sum":
        expected = expected.sum()
    if found.ndim:
        found.backward(own_part(g, rank, world_size, split))
        expected.backward(g)
        expected = own_part(expected, rank, world_size, split)
    else:
        (3 * found).backward()
        (3 * expected).backward()
    assert own_x.grad is not None
    assert x.grad is not None
    assert whole.grad is not None
    assert head.weight.grad is not None
    first, real = head.shard.first_real_row, head.shard.real_rows
    assert not head.weight.grad[real:].any(), "padding has no gradient"
    rows = head.weight.grad[:real] - whole.grad[first : first + real]
    return (
        float((found - expected).detach().abs().max()),
        float((own_x.grad - own_part(x.grad, rank, world_size, split)).abs().max()),
        float(rows.abs().max()) if real else 0.0,
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none", "log_probs"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("form", "world_size"), [("plain", 1), ("every form", 3), ("smoothing", 4)]
)
def test_a_head_is_cross_entropy_of_the_whole_matrix(
    ranks: RankPool, form: str, how: str, reduction: str, world_size: int
) -> None:
    arguments = {"form": FORMS[form], "how": HOW[how], "reduction": reduction}
    for found in ranks.run(faults, world_size, **arguments):
        assert max(found) < 1e-12


def empty_shard(rank: int, world_size: int) -> tuple[int, float, bool]:
    """A vocabulary of 5 over 4 ranks: 2, 2, 1 and no rows."""
    head = VocabParallelHead(H, 5, dtype=torch.float64, recompute=rank % 2 == 0)
    x = torch.ones(3, H, dtype=torch.float64, requires_grad=True)
    loss = head(x, torch.tensor([0, 4, 2]))
    loss.backward()
    return head.shard.real_rows, float(loss.detach()), x.grad is not None


def test_a_rank_may_have_no_row(ranks: RankPool) -> None:
    found = ranks.run(empty_shard, 4)
    assert [rows for rows, _, _ in found] == [2, 2, 1, 0]
    assert len({loss for _, loss, _ in found}) == 1
    assert all(has_gradient for _, _, has_gradient in found)


def embedding_faults(rank: int, world_size: int, split: bool) -> tuple[float, float]:
    _, whole, targets, _ = draw()
    tokens = targets.clamp_min(0)
    weight = torch.randn(
        BATCH, SEQUENCE, H, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    layer = VocabParallelEmbedding(V, H, dtype=torch.float64, sequence_parallel=split)
    layer.load_whole(whole)
    found = layer(own_part(tokens, rank, world_size, split))
    (found * own_part(weight, rank, world_size, split)).sum().backward()
    whole.requires_grad_()
    expected = F.embedding(tokens, whole)
    (expected * weight).sum().backward()
    assert whole.grad is not None
    assert layer.weight.grad is not None
    first, real = layer.shard.first_real_row, layer.shard.real_rows
    rows = layer.weight.grad[:real] - whole.grad[first : first + real]
    values = found - own_part(expected, rank, world_size, split)
    return float(values.detach().abs().max()), float(rows.abs().max())


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
def test_an_embedding_is_that_of_the_whole_matrix(
    ranks: RankPool, world_size: int, split: bool
) -> None:
    for values, rows in ranks.run(embedding_faults, world_size, split=split):
        assert values == 0, "every sum has one nonzero term"
        assert rows < 1e-14


def tied_fault(rank: int, world_size: int) -> float:
    """A language model of nothing but its tied vocabulary layers."""
    _, whole, targets, _ = draw()
    tokens = targets.clamp_min(0)
    embedding = VocabParallelEmbedding(V, H, dtype=torch.float64)
    head = VocabParallelHead(H, V, weight=embedding.weight)
    embedding.load_whole(whole)
    for _ in range(2):  # gradients add up
        head(embedding(tokens).tanh(), targets).backward()
    whole.requires_grad_()
    losses = expected_losses(F.embedding(tokens, whole).tanh(), whole, targets)
    (2 * losses.sum() / (targets != IGNORED).sum()).backward()
    assert whole.grad is not None
    assert head.weight.grad is not None
    first, real = head.shard.first_real_row, head.shard.real_rows
    return float((head.weight.grad[:real] - whole.grad[first : first + real]).abs().max())


def test_tied_layers_and_two_backwards_add_up(ranks: RankPool) -> None:
    assert max(ranks.run(tied_fault, 2)) < 1e-13


def subgroup_loss(rank: int, world_size: int) -> float:
    """Ranks 0 and 2, 1 and 3 share a matrix each."""
    groups = [dist.new_group([k, k + 2]) for k in range(2)]
    x, whole, targets, _ = draw()
    head = VocabParallelHead(H, V, group=groups[rank % 2], dtype=torch.float64)
    head.load_whole(whole * (1 + rank % 2))
    assert head.shard.rows == 12
    return float(head(x, targets).detach())


def test_any_group_will_do(ranks: RankPool) -> None:
    x, whole, targets, _ = draw()
    found = ranks.run(subgroup_loss, 4)
    for rank, loss in enumerate(found):
        losses = expected_losses(x, whole * (1 + rank % 2), targets)
        assert loss == pytest.approx(float(losses.sum() / (targets != IGNORED).sum()), abs=1e-12)


def kept_by_a_cycle(rank: int, world_size: int, split: bool) -> bool:
    """Whether the ranks of a head outlive it, after a forward and a backward."""
    x, weight, targets, _ = draw()
    head = VocabParallelHead(H, V, sequence_parallel=split, dtype=torch.float64)
    head.load_whole(weight)
    own = own_part(x, rank, world_size, split).requires_grad_()
    gc.disable()
    try:
        head(own, own_part(targets, rank, world_size, split)).backward()
        known = weakref.ref(head._sharded.ranks)
        del head
        return known() is not None
    finally:
        gc.enable()


@pytest.mark.parametrize("split", [False, True])
def test_a_process_group_goes_with_the_last_layer(split: bool, ranks: RankPool) -> None:
    assert ranks.run(kept_by_a_cycle, 2, split=split) == [False, False]


def first_rows(rank: int, world_size: int) -> tuple[list[float], list[float], list[float]]:
    torch.manual_seed(5)  # the same everywhere
    first, second = VocabParallelHead(H, V), VocabParallelHead(H, V)
    x, _, targets, _ = draw()
    copied = copy.deepcopy(first)
    loss = copied(x.float(), targets)
    assert torch.equal(loss, first(x.float(), targets))
    return first.weight[0].tolist(), second.weight[0].tolist(), [float(first.weight.detach().std())]


def test_ranks_draw_different_rows_from_one_seed(ranks: RankPool) -> None:
    (a, b, spread), (c, d, _) = ranks.run(first_rows, 2)
    assert len({tuple(row) for row in (a, b, c, d)}) == 4
    assert 0.01 < spread[0] < 0.03


def test_what_is_frozen_has_no_gradient() -> None:
    x, whole, targets, _ = draw()
    for recompute in (False, True):
        head = VocabParallelHead(H, V, dtype=torch.float64, recompute=recompute)
        head.load_whole(whole)
        head.weight.requires_grad_(False)
        own = x.clone().requires_grad_()
        head(own, targets).backward()
        assert head.weight.grad is None
        only_x = own.grad
        head.weight.requires_grad_()
        head(x, targets).backward()
        only_weight = head.weight.grad
        own.grad = head.weight.grad = None
        head(own, targets).backward()
        assert own.grad is not None
        assert head.weight.grad is not None
        assert torch.equal(own.grad, only_x) if only_x is not None else False
        assert torch.equal(head.weight.grad, only_weight) if only_weight is not None else False


def test_without_a_token_that_counts_the_loss_is_0() -> None:
    head = VocabParallelHead(H, V)
    x = torch.randn(4, H, requires_grad=True)
    loss = head(x, torch.full((4,), IGNORED))
    loss.backward()
    assert loss == 0
    assert x.grad is not None
    assert not x.grad.any()


def test_another_target_may_be_ignored() -> None:
    x, whole, targets, _ = draw()
    head = VocabParallelHead(H, V, dtype=torch.float64, ignore_index=0)
    head.load_whole(whole)
    wanted = targets.masked_fill(targets == IGNORED, 0)
    expected = F.cross_entropy((x @ whole.T).flatten(0, 1), wanted.flatten(), ignore_index=0)
    assert float(head(x, wanted).detach()) == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize("recompute", [False, True])
def test_bf16_is_close_and_the_loss_is_fp32(recompute: bool) -> None:
    x, whole, targets, _ = draw()
    head = VocabParallelHead(H, V, dtype=torch.bfloat16, recompute=recompute)
    head.load_whole(whole.bfloat16())
    own = x.bfloat16().requires_grad_()
    loss = head(own, targets)
    loss.backward()
    assert loss.dtype == torch.float32
    rounded, matrix = own.detach().double().requires_grad_(), head.weight.detach().double()
    losses = expected_losses(rounded, matrix[:V], targets)
    expected = losses.sum() / (targets != IGNORED).sum()
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-2)
    assert own.grad is not None
    assert rounded.grad is not None
    assert own.grad.dtype == torch.bfloat16
    assert float((own.grad - rounded.grad).norm() / rounded.grad.norm()) < 2e-2


def test_under_autocast_fp32_weights_get_fp32_gradients() -> None:
    x, whole, targets, _ = draw()
    head = VocabParallelHead(H, V)
    head.load_whole(whole.float())
    own = x.float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = head(own, targets)
    loss.backward()
    narrow = VocabParallelHead(H, V, dtype=torch.bfloat16)
    narrow.load_whole(whole.bfloat16())
    assert torch.equal(loss, narrow(x.bfloat16(), targets))
    assert own.grad is not None
    assert head.weight.grad is not None
    assert (own.grad.dtype, head.weight.grad.dtype) == (torch.float32, torch.float32)


def test_autograd_releases_what_s_has_kept() -> None:
    """A loss that someone keeps, as for a log, must not hold the exponentials."""
    x, _, targets, _ = draw()
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    head = VocabParallelHead(H, V, dtype=torch.float64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = head(x.requires_grad_(), targets)
    kept = sum(tensor.numel() for tensor in packed if tensor.shape[1:] == (targets.numel(),))
    assert kept >= V * targets.numel(), "the exponentials go through autograd"
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize(("recompute", "grad"), [(True, True), (False, False)])
def test_nothing_of_the_logits_is_kept(recompute: bool, grad: bool) -> None:
    x, _, targets, _ = draw()
    packed: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.numel())
        return tensor

    head = VocabParallelHead(H, V, dtype=torch.float64, recompute=recompute)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.set_grad_enabled(grad),
    ):
        head(x, targets, "sum")
    assert sum(packed) < V * targets.numel()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocab_size": 0}, "a vocabulary of 0 and a hidden size of 5: both must be at least 1"),
        ({"label_smoothing": 2.0}, "label_smoothing=2.0"),
        (
            {"weight": torch.nn.Parameter(torch.zeros(3, H))},
            "the given weight has the shape (3, 5)",
        ),
    ],
)
def test_a_wrong_head_is_refused(arguments: dict[str, Any], message: str) -> None:
    whole: dict[str, Any] = {"hidden_size": H, "vocab_size": V}
    with pytest.raises(ValueError, match=re.escape(message)):
        VocabParallelHead(**whole | arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, t: (x, t + V), "is no entry of a vocabulary of 23"),
        (lambda x, t: (x, t - 7), "is no entry of a vocabulary of 23"),
        (lambda x, t: (x[:1], t), "input (1, 12, 5) and targets (2, 12)"),
        (lambda x, t: (x.double(), t), "input in torch.float64, weight in torch.float32"),
    ],
)
def test_wrong_input_is_refused(change: Any, message: str) -> None:
    x, _, targets, _ = draw()
    head = VocabParallelHead(H, V)
    with pytest.raises(ValueError, match=re.escape(message)):
        head(*change(x.float(), targets.clamp_min(0)))


def test_a_matrix_of_another_size_and_an_unknown_token_are_refused() -> None:
    layer = VocabParallelEmbedding(V, H)
    with pytest.raises(ValueError, match=re.escape("the shape (24, 5), not (23, 5)")):
        layer.load_whole(torch.zeros(V + 1, H))
    with pytest.raises(ValueError, match="23 is no entry of a vocabulary of 23"):
        layer(torch.tensor([[1, V]]))


def test_an_unknown_reduction_is_refused() -> None:
    x, _, targets, _ = draw()
    with pytest.raises(ValueError, match="reduction='max': choose mean, sum or none"):
        VocabParallelHead(H, V)(x.float(), targets, "max")
