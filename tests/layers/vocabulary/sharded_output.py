"""An output layer's inputs and answers: the textbook's way, and over shards in one process.

Shapes: n tokens, h hidden size, v vocabulary entries, t rows of a tile.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor

from megatron.kernels.face import Kernels
from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.kernels.softmax import (
    LossOptions,
    Merged,
    ShardState,
    merged_from,
    rescale_sum,
    statistics_dtype,
    token_losses,
)
from megatron.kernels.tiled.output_s import tile_heights
from megatron.layers.vocabulary.shard import VocabularyShard
from megatron.schedules.treatments import TREATMENTS, Treatment

ALGORITHM_2, ALGORITHM_1, NAIVE = (TREATMENTS[name] for name in ("vocab-2", "vocab-1", "naive"))


@dataclass(frozen=True)
class Problem:
    """Inputs of an output layer.

    Attributes:
        x_nh: input.
        weight_vh: the whole matrix.
        targets_n: target ids.
        weight_n: weight of every token's loss, in the dtype of statistics.
        options: form of the loss.
    """

    x_nh: Tensor
    weight_vh: Tensor
    targets_n: Tensor
    weight_n: Tensor
    options: LossOptions

    def to(self, dtype: torch.dtype) -> "Problem":
        return Problem(
            self.x_nh.to(dtype),
            self.weight_vh.to(dtype),
            self.targets_n,
            self.weight_n.to(statistics_dtype(dtype)),
            self.options,
        )


@dataclass(frozen=True)
class Answer:
    """Loss of every token and the gradients of their weighted sum."""

    losses_n: Tensor
    x_gradient_nh: Tensor
    weight_gradient_vh: Tensor


def draw(
    n: int, h: int, v: int, options: LossOptions, magnitude: float = 1.0, seed: int = 0
) -> Problem:
    """A float64 problem whose logits are around ``magnitude``, with some tokens masked out."""
    generator = torch.Generator().manual_seed(seed)
    x_nh = torch.randn(n, h, generator=generator, dtype=torch.float64) * magnitude / h**0.5
    weight_vh = torch.randn(v, h, generator=generator, dtype=torch.float64)
    targets_n = torch.randint(v, (n,), generator=generator)
    weight_n = torch.rand(n, generator=generator, dtype=torch.float64) / n
    weight_n[torch.rand(n, generator=generator) < 0.2] = 0
    return Problem(x_nh, weight_vh, targets_n, weight_n, options)


def by_autograd(problem: Problem) -> Answer:
    """The textbook's way: capped logits in the problem's dtype, their loss in fp32 or better."""
    options = problem.options
    x_nh = problem.x_nh.detach().requires_grad_()
    weight_vh = problem.weight_vh.detach().requires_grad_()
    logits_nv = x_nh @ weight_vh.T
    if options.logit_softcap:
        logits_nv = options.logit_softcap * torch.tanh(logits_nv / options.logit_softcap)
    logits_nv = logits_nv.to(problem.weight_n.dtype)
    losses_n = F.cross_entropy(
        logits_nv,
        problem.targets_n,
        reduction="none",
        label_smoothing=options.label_smoothing,
    )
    losses_n = losses_n + options.z_loss_coeff * torch.logsumexp(logits_nv, dim=1).square()
    gradients = torch.autograd.grad((losses_n * problem.weight_n).sum(), (x_nh, weight_vh))
    return Answer(losses_n.detach(), *gradients)


def by_shards(
    problem: Problem,
    shards: int,
    treatment: Treatment,
    tile_rows: int | None,
    kernels: Kernels | None = None,
    *,
    recompute: bool = False,
) -> Answer:
    """The paper's way: S on every shard, C1, T on every shard, then C2 where T forms gradients.

    In the naive treatment, between C1, of the maximum, and C2, of the sums, E. With ``recompute`` S
    keeps no tile, and T forms the tiles again. ``tile_rows`` is for kernels that work on
    tiles; with ``None`` the kernels choose.
    """
    kernels = kernels or ReferenceKernels()
    v, options = len(problem.weight_vh), problem.options
    padded = -(-v // shards) * shards
    parts = [VocabularyShard.of(v, padded, index, shards) for index in range(shards)]
    weights = [problem.weight_vh[p.first_row : p.first_row + p.real_rows] for p in parts]
    states = [
        shard_s(problem, weight_vh, part.first_row, treatment, tile_rows, kernels, not recompute)
        for part, weight_vh in zip(parts, weights, strict=True)
    ]
    in_barriers = [
        merge(states, state, weight_vh, problem, treatment, kernels, not recompute)
        for state, weight_vh in zip(states, weights, strict=True)
    ]
    merged = in_barriers[0][0]
    gradients = [
        shard_t(state, weight_vh, barrier, problem, treatment, tile_rows, kernels, recompute)
        for state, weight_vh, barrier in zip(states, weights, in_barriers, strict=True)
    ]
    x_gradients, weight_gradients = zip(*gradients, strict=True)
    return Answer(
        token_losses(merged, options),
        torch.stack(x_gradients).sum(0),
        torch.cat(weight_gradients),
    )


def room_of(
    problem: Problem, rows: int, tile_rows: int | None, kernels: Kernels, *, kept: bool
) -> Sequence[Tensor]:
    """Buffers for the tiles of ``rows`` rows; those that are not kept share their memory."""
    if tile_rows is None:
        if kept:
            return kernels.kept_room(problem.x_nh, rows)
        return kernels.scratch_room(problem.x_nh, rows, again=True)
    heights, n = tile_heights(rows, tile_rows), len(problem.x_nh)
    if kept:
        return [problem.x_nh.new_empty(height, n) for height in heights]
    scratch = problem.x_nh.new_empty(max(heights, default=0), n)
    return [scratch[:height] for height in heights]


def shard_s(
    problem: Problem,
    weight_vh: Tensor,
    first_row: int,
    treatment: Treatment,
    tile_rows: int | None,
    kernels: Kernels,
    keep: bool,
) -> ShardState:
    """S of one shard."""
    room = room_of(problem, len(weight_vh), tile_rows, kernels, kept=keep)
    arguments = (problem.x_nh, weight_vh, problem.targets_n, first_row, problem.options, room)
    if treatment.maximum_first and keep:
        return kernels.naive_s(*arguments)
    form_gradient = treatment.gradient_pass == "S"
    return kernels.output_s(*arguments, form_gradient=form_gradient, keep=keep)


def merge(
    states: list[ShardState],
    own: ShardState,
    weight_vh: Tensor,
    problem: Problem,
    treatment: Treatment,
    kernels: Kernels,
    keep: bool,
) -> tuple[Merged, Tensor | None]:
    """C1 on one shard, or C1, E and C2 in the naive treatment."""
    weight_n, options = problem.weight_n, problem.options
    if not treatment.maximum_first:
        gathered_p4n = torch.stack([state.statistics_4n for state in states])
        return kernels.merge(gathered_p4n, own, weight_vh, weight_n, options)
    maximum_n = torch.stack([state.maximum_n for state in states]).amax(0)
    if own is states[0]:  # those of all shards, before the first sum
        for state in states:
            if keep:
                kernels.naive_e(state, maximum_n, options)
            else:
                rescale_sum(state, maximum_n)
    sums_kn = torch.stack([state.sums_kn for state in states]).sum(0)
    return merged_from(maximum_n, sums_kn), None


def shard_t(
    state: ShardState,
    weight_vh: Tensor,
    in_barrier: tuple[Merged, Tensor | None],
    problem: Problem,
    treatment: Treatment,
    tile_rows: int | None,
    kernels: Kernels,
    recompute: bool,
) -> tuple[Tensor, Tensor]:
    """The input gradient, of C1 or T, and the weight gradient, which begins with this T."""
    merged, begun_nh = in_barrier
    weight_n, options = problem.weight_n, problem.options
    gradient_vh = torch.full_like(weight_vh, torch.nan, dtype=weight_n.dtype)
    room = None
    if recompute:
        room = room_of(problem, len(weight_vh), tile_rows, kernels, kept=False)
    in_s = treatment.gradient_pass == "S"
    gradient_nh = kernels.output_t(
        state,
        weight_vh,
        gradient_vh,
        merged,
        weight_n,
        options,
        room,
        form_gradient=not in_s,
        begins=True,
    )
    finished_nh = begun_nh if in_s else gradient_nh
    assert finished_nh is not None
    return finished_nh, gradient_vh


def error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference, relative to the norm of what is expected."""
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-30))


def assert_equal(actual: Answer, expected: Answer, tolerance: float) -> None:
    assert error(actual.losses_n, expected.losses_n) < tolerance
    assert error(actual.x_gradient_nh, expected.x_gradient_nh) < tolerance
    assert error(actual.weight_gradient_vh, expected.weight_gradient_vh) < tolerance
