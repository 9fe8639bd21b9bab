"""The output layer of a rank over microbatches and iterations, alone and with other ranks."""

from collections.abc import Sequence
from operator import attrgetter

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from correctness.rank_runs import make_pipeline_groups
from harness.rank_pool import RankPool
from layers.vocabulary.sharded_output import ALGORITHM_1, ALGORITHM_2, NAIVE
from torch import Tensor, nn

from megatron.kernels.cpu.kernels import CpuKernels
from megatron.layers.main_grad import give_main_grad, main_grad_of
from megatron.layers.vocabulary.output_layer import OutputLayer
from megatron.layers.vocabulary.output_s import (
    LossOptions,
    Merged,
    ShardState,
    merge_some_statistics,
    merge_statistics,
    token_losses,
)
from megatron.layers.vocabulary.shard import VocabularyShard
from megatron.parallel import collectives
from megatron.parallel.groups import ConnectedAxis
from megatron.schedules.treatments import Treatment

N, H, V = 6, 5, 23
OPTIONS = LossOptions(V, label_smoothing=0.1, z_loss_coeff=1e-2, logit_softcap=4.0)


def draw(microbatches: int, n: int = N, seed: int = 0) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Input, targets and loss weights of every microbatch, in float64."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(n, H, generator=generator, dtype=torch.float64),
            torch.randint(V, (n,), generator=generator),
            torch.rand(n, generator=generator, dtype=torch.float64),
        )
        for _ in range(microbatches)
    ]


def matrix() -> Tensor:
    return torch.randn(V, H, generator=torch.Generator().manual_seed(99), dtype=torch.float64)


def by_autograd(
    weight_vh: Tensor, batch: Sequence[tuple[Tensor, Tensor, Tensor]]
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Weighted loss, the gradient of every input, the gradient of the matrix."""
    weight_vh = weight_vh.clone().requires_grad_()
    inputs = [x_nh.clone().requires_grad_() for x_nh, _, _ in batch]
    loss = torch.zeros((), dtype=torch.float64)
    for x_nh, (_, targets_n, weight_n) in zip(inputs, batch, strict=True):
        logits_nv = OPTIONS.logit_softcap * torch.tanh(x_nh @ weight_vh.T / OPTIONS.logit_softcap)
        losses_n = F.cross_entropy(
            logits_nv, targets_n, reduction="none", label_smoothing=OPTIONS.label_smoothing
        )
        losses_n = losses_n + OPTIONS.z_loss_coeff * logits_nv.logsumexp(1).square()
        loss = loss + (losses_n * weight_n).sum()
    *gradients, weight_gradient = torch.autograd.grad(loss, (*inputs, weight_vh))
    return loss.detach(), gradients, weight_gradient


def make_layer(
    rank: int = 0, ranks: int = 1, tile_rows: int = 1000, *, recompute: bool = False
) -> OutputLayer:
    """A shard of ``matrix``, the padding filled with numbers that must not matter."""
    padded = -(-V // (4 * ranks)) * 4 * ranks
    shard = VocabularyShard.of(V, padded, rank, ranks)
    weight_vh = torch.full((shard.rows, H), 1e3, dtype=torch.float64)
    weight_vh[: shard.real_rows] = matrix()[shard.first_row : shard.first_row + shard.real_rows]
    weight = nn.Parameter(weight_vh)
    give_main_grad(weight, torch.zeros_like(weight_vh))
    return OutputLayer(shard, weight, OPTIONS, CpuKernels(tile_rows), recompute)


def run_alone(
    layer: OutputLayer, batch: Sequence[tuple[Tensor, Tensor, Tensor]], delay: int
) -> tuple[set[int], list[Tensor]]:
    """One iteration, every T ``delay`` microbatches after its S.

    Returns:
        Where the tiles lay in memory, and the gradient of every input.
    """
    states: dict[int, ShardState] = {}
    places: set[int] = set()
    gradients = []

    def finish(i: int) -> None:
        state = states.pop(i)
        merged, gradient_nh = layer.merge(state.statistics_4n.unsqueeze(0), state, batch[i][2])
        assert gradient_nh is not None
        gradients.append(gradient_nh)
        layer.t(state, merged, batch[i][2])

    for i, (x_nh, targets_n, _) in enumerate(batch):
        states[i] = layer.s(x_nh, targets_n, form_gradient=True)
        places.update(tile.data_ptr() for tile in states[i].exp_tiles[:1])
        if i >= delay:
            finish(i - delay)
    for i in sorted(states):
        finish(i)
    return places, gradients


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_iterations_with_any_number_of_microbatches(delay: int, recompute: bool) -> None:
    layer = make_layer(tile_rows=4, recompute=recompute)
    for seed, microbatches in enumerate((1, 5, 4, 2, 7, 1)):
        batch = draw(microbatches, seed=seed)
        _, expected, expected_weight = by_autograd(matrix(), batch)
        main_grad_of(layer.weight).zero_()
        _, gradients = run_alone(layer, batch, delay)
        torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(
            main_grad_of(layer.weight)[:V], expected_weight, rtol=1e-10, atol=1e-12
        )
        assert not main_grad_of(layer.weight)[V:].any()


def test_gradients_add_to_what_is_there() -> None:
    """Tied embeddings share the gradient with the input layer."""
    layer = make_layer(tile_rows=4)
    batch = draw(3)
    main_grad_of(layer.weight).fill_(1)
    run_alone(layer, batch, delay=1)
    expected = 1 + by_autograd(matrix(), batch)[2]
    torch.testing.assert_close(main_grad_of(layer.weight)[:V], expected, rtol=1e-10, atol=1e-12)


def test_buffers_are_as_many_as_microbatches_between_s_and_t_and_are_used_again() -> None:
    layer = make_layer()
    delay = 2
    first, _ = run_alone(layer, draw(9), delay)
    again, _ = run_alone(layer, draw(9, seed=1), delay)
    assert again <= first
    assert len(first) == delay + 1


def test_microbatches_of_another_size_get_buffers_of_their_own() -> None:
    layer = make_layer()
    for n in (N, N + 3, 2):
        batch = draw(3, n=n)
        main_grad_of(layer.weight).zero_()
        run_alone(layer, batch, delay=1)
        expected = by_autograd(matrix(), batch)[2]
        torch.testing.assert_close(main_grad_of(layer.weight)[:V], expected, rtol=1e-10, atol=1e-12)


def test_evaluation_between_iterations_gives_the_loss_and_leaves_no_trace() -> None:
    layer = make_layer(tile_rows=4)
    batch = draw(3)
    run_alone(layer, draw(5, seed=1), delay=1)
    before = main_grad_of(layer.weight).clone()
    loss = torch.zeros((), dtype=torch.float64)
    for x_nh, targets_n, weight_n in batch:
        state = layer.evaluate(x_nh, targets_n)
        merged = merge_statistics(state.statistics_4n.unsqueeze(0))
        loss += (token_losses(merged, OPTIONS) * weight_n).sum()
    torch.testing.assert_close(loss, by_autograd(matrix(), batch)[0], rtol=1e-12, atol=0)
    assert torch.equal(main_grad_of(layer.weight), before)


@pytest.mark.parametrize("sizes", [(3, 1, 2), (2, 2, 2), (1, 5)], ids=str)
def test_statistics_may_be_merged_in_steps(sizes: tuple[int, ...]) -> None:
    """Also where some shards of a step, or all of them, are padding: a maximum of -inf, sum 0."""
    n = 7
    generator = torch.Generator().manual_seed(2)
    shards = torch.randn(sum(sizes), 4, n, generator=generator, dtype=torch.float64)
    shards[:, 1].abs_()
    for padding in (slice(0, 0), slice(-1, None), slice(-sizes[-1], None)):
        statistics_p4n = shards.clone()
        statistics_p4n[padding] = torch.tensor([-torch.inf, 0, 0, 0])[:, None].double()
        at_once = merge_statistics(statistics_p4n)
        steps = [merge_some_statistics(some) for some in statistics_p4n.split(sizes)]
        merged = merge_statistics(torch.stack(steps))
        for found, wanted in zip(vars(merged).values(), vars(at_once).values(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-13, atol=0)


def run_on_rank(
    rank: int,
    world_size: int,
    *,
    batch: list[tuple[Tensor, Tensor, Tensor]],
    treatment: Treatment,
    recompute: bool,
) -> tuple[float, list[Tensor], Tensor]:
    """Loss, input gradients as the last rank gets them, and this rank's weight gradient."""
    layer = make_layer(rank, world_size, recompute=recompute)
    root, loss, gradients = world_size - 1, 0.0, []
    axis = make_pipeline_groups().column
    for x_nh, targets_n, weight_n in batch:
        begun_nh = None
        if treatment.maximum_first:
            state, merged = naive_merged(layer, x_nh, targets_n, axis)
        else:
            state = layer.s(x_nh, targets_n, form_gradient=treatment.gradient_pass == "S")
            gathered = collectives.all_gather(state.statistics_4n, axis)
            merged, begun_nh = layer.merge(gathered, state, weight_n)
        loss += float((token_losses(merged, OPTIONS) * weight_n).sum())
        part_nh = layer.t(state, merged, weight_n, form_gradient=treatment.gradient_pass == "T")
        part_nh = begun_nh if part_nh is None else part_nh
        assert part_nh is not None
        gradients.append(collectives.reduce(part_nh, root, axis))
    assert not main_grad_of(layer.weight)[layer.shard.real_rows :].any()
    return loss, gradients, main_grad_of(layer.weight)[: layer.shard.real_rows]


def naive_merged(
    layer: OutputLayer, x_nh: Tensor, targets_n: Tensor, axis: ConnectedAxis
) -> tuple[ShardState, Merged]:
    """S, C1, E and C2 of the naive treatment; the collectives get copies, as in the runtime."""
    state = layer.naive_s(x_nh, targets_n)
    maximum_n = state.maximum_n.clone()
    collectives.all_reduce(maximum_n, collectives.MAXIMUM, axis)
    layer.naive_e(state, maximum_n)
    sums_kn = state.sums_kn.clone()
    collectives.all_reduce(sums_kn, collectives.SUM, axis)
    return state, layer.merged_from(maximum_n, sums_kn)


@pytest.mark.parametrize("treatment", [ALGORITHM_2, ALGORITHM_1, NAIVE], ids=attrgetter("name"))
@pytest.mark.parametrize(
    ("world_size", "recompute"), [(1, False), (2, False), (3, False), (3, True), (4, False)]
)
def test_shards_on_real_ranks(
    world_size: int, recompute: bool, treatment: Treatment, ranks: RankPool
) -> None:
    batch = draw(3)
    loss, gradients, weight_gradient = by_autograd(matrix(), batch)
    results = ranks.run(
        run_on_rank, world_size, batch=batch, treatment=treatment, recompute=recompute
    )
    assert [own for own, _, _ in results] == pytest.approx([float(loss)] * world_size, rel=1e-12)
    torch.testing.assert_close(results[-1][1], gradients, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        torch.cat([shard for _, _, shard in results]), weight_gradient, rtol=1e-10, atol=1e-12
    )
