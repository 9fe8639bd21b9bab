"""What an operation reads, writes and multiplies is what a hand counts for it.

Bytes are written as (elements read or written) x (bytes of an element), tensor by tensor.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron.kernels.attention_options import AttentionOptions
from megatron.kernels.counted import AMPERE, CountedGpu, counted_kernels
from megatron.kernels.scores import Scores
from megatron.planning.count.recorder import Recorder
from megatron.simulator.costs.count import Launch, Product

BF16, FP32, IDS = torch.bfloat16, torch.float32, torch.int64


def made(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launched(operation: Callable[[], object]) -> list[Launch]:
    recorder = Recorder()
    with recorder, recorder.recording() as works:
        operation()
    return [launch for work in works for launch in work.launches]


def test_a_product_reads_its_factors_and_writes_its_result() -> None:
    size = (3 * 5 + 5 * 7 + 3 * 7) * 2
    assert launched(lambda: made(3, 5) @ made(5, 7)) == [
        Launch("mm", size, 2 * 3 * 5 * 7, Product(3, 7, 5), 2 * 3 * 5 * 7)
    ]


def test_a_bias_is_read_with_its_product() -> None:
    size = (7 + 3 * 5 + 5 * 7 + 3 * 7) * 2
    assert launched(lambda: torch.addmm(made(7), made(3, 5), made(5, 7))) == [
        Launch("addmm", size, 2 * 3 * 5 * 7, Product(3, 7, 5), 2 * 3 * 5 * 7)
    ]


def test_a_batch_of_products_has_all_their_flops() -> None:
    size = 2 * (3 * 5 + 5 * 7 + 3 * 7) * 2
    assert launched(lambda: torch.bmm(made(2, 3, 5), made(2, 5, 7))) == [
        Launch("bmm", size, 2 * 2 * 3 * 5 * 7, Product(3, 7, 5, 2), 2 * 2 * 3 * 5 * 7)
    ]


@pytest.mark.parametrize("repeated", [False, True])
def test_a_row_that_is_repeated_is_read_once(repeated: bool) -> None:
    row = made(6, dtype=FP32)
    other = row.expand(4, 6) if repeated else row
    size = (4 * 6 + 6 + 4 * 6) * 4
    assert launched(lambda: made(4, 6, dtype=FP32) + other) == [Launch("add", size)]


def test_a_lookup_reads_the_rows_of_its_indices() -> None:
    rows = 3 * 8 * 2
    assert launched(lambda: torch.nn.functional.embedding(made(3, dtype=IDS), made(100, 8))) == [
        Launch("embedding", rows + 3 * 8 + rows)
    ]


def test_an_addition_to_rows_reads_and_writes_them_alone() -> None:
    rows = 3 * 8 * 4
    sums, added = made(100, 8, dtype=FP32), made(3, 8, dtype=FP32)
    assert launched(lambda: sums.index_add_(0, made(3, dtype=IDS), added)) == [
        Launch("index_add_", rows + 3 * 8 + rows + rows)
    ]


def test_an_addition_in_place_reads_and_writes_its_sum() -> None:
    assert launched(lambda: made(4, 6, dtype=FP32).add_(made(4, 6))) == [
        Launch("add_", 4 * 6 * (4 + 2 + 4))
    ]


def test_a_list_of_copies_is_written_and_not_read() -> None:
    into, out_of = [made(4, 6), made(5)], [made(4, 6, dtype=FP32), made(5, dtype=FP32)]
    assert launched(lambda: torch._foreach_copy_(into, out_of)) == [
        Launch("_foreach_copy_", (4 * 6 + 5) * (2 + 4))
    ]


def test_memory_views_and_types_are_no_launches() -> None:
    x = made(4, 6)
    assert not launched(lambda: (torch.empty_like(x), x.view(6, 4), x.t(), x.detach()))
    assert not launched(lambda: torch.promote_types(BF16, FP32))


def test_causal_attention_does_half_of_the_flops_that_count() -> None:
    """Forward two products, backward five, of which the scores formed again do not count."""
    heads, tokens, channels = 2, 8, 16
    q, k, v = (made(1, heads, tokens, channels).requires_grad_() for _ in range(3))
    one = 2 * heads * tokens * tokens * channels
    size = heads * tokens * channels * 2
    statistics = heads * tokens * 4
    seeds = 2 * 8 + 8

    def both() -> None:
        out = counted_kernels(BF16).causal_attention(q, k, v)
        out.backward(made(*out.shape))

    forward, backward = (each for each in launched(both) if each.flops)
    assert (forward.flops, forward.executed) == (2 * one, 2 * one // 2)
    assert forward.bytes == 4 * size + statistics + seeds
    assert (backward.flops, backward.executed) == (4 * one, 5 * one // 2)
    assert backward.bytes == (5 + 3) * size + statistics + seeds


@pytest.mark.parametrize("gpu", [AMPERE, CountedGpu(has_cudnn_attention=True)], ids=["A", "H"])
def test_slices_of_attention_count_what_the_whole_does(gpu: CountedGpu) -> None:
    """However a GPU computes them: at once, or in two parts of the keys."""
    heads, tokens, channels = 2, 24, 16
    q, k, v = (made(1, heads, tokens, channels).requires_grad_() for _ in range(3))
    kernels, one = counted_kernels(BF16, gpu), 2 * heads * tokens * tokens * channels
    found = []
    for first in range(0, tokens, 8):
        end = first + 8
        own = q[:, :, first:end], k[:, :, :end], v[:, :, :end]

        def both(own: tuple[Tensor, Tensor, Tensor] = own) -> None:
            out = kernels.causal_attention(*own)
            out.backward(made(*out.shape))

        found += [each for each in launched(both) if each.flops]
    assert sum(each.flops for each in found) == (2 + 4) * one
    assert sum(each.executed for each in found) == (2 + 5) * one // 2


def test_two_parts_of_attention_move_what_a_hand_counts() -> None:
    """Queries of the last 8 of 24 positions, on a GPU on which cuDNN's attention is the fastest."""
    heads, queries, earlier, channels = 2, 8, 16, 16
    own, before = (heads * length * channels * 2 for length in (queries, earlier))
    sums = heads * queries * 4
    q, k, v = (
        made(1, length, heads, channels).transpose(1, 2).requires_grad_()
        for length in (queries, queries + earlier, queries + earlier)
    )
    kernels = counted_kernels(BF16, CountedGpu(has_cudnn_attention=True))
    out = kernels.causal_attention(q, k, v)
    forward = launched(lambda: kernels.causal_attention(q, k, v))
    grad = made(1, queries, heads, channels).transpose(1, 2)
    backward = launched(lambda: torch.autograd.grad(out, (q, k, v), grad))
    # Seeds of no dropout are read and written, too: two numbers of 8 bytes.
    assert [(each.name, each.bytes) for each in forward] == [
        ("_scaled_dot_product_cudnn_attention", 4 * own + sums + 16),
        ("_scaled_dot_product_cudnn_attention", 2 * own + 2 * before + sums + 16),
        ("join_parts_", 3 * own + 3 * sums),
    ]
    assert [(each.name, each.bytes) for each in backward] == [
        ("_scaled_dot_product_cudnn_attention_backward", 8 * own + sums + 16),
        ("_scaled_dot_product_cudnn_attention_backward", 4 * own + 4 * before + sums + 16),
        ("add_", 3 * own),
        ("cat", 2 * (own + before)),
        ("cat", 2 * (own + before)),
    ]


@pytest.mark.parametrize(("window", "seen"), [(None, None), (2, 1 + 2 + 6 * 3)])
def test_attention_with_sinks_counts_the_positions_that_a_window_shows(
    window: int | None, seen: int | None
) -> None:
    """Flash attention, and what the sinks add: bytes of sums and outputs, and no products."""
    heads, tokens, channels = 2, 8, 16
    q, k, v = (made(1, heads, tokens, channels).requires_grad_() for _ in range(3))
    sinks = made(heads).requires_grad_()
    pairs = tokens * tokens if seen is None else seen
    one = 2 * heads * pairs * channels

    def both() -> None:
        out = counted_kernels(BF16).causal_attention(
            q, k, v, options=AttentionOptions(Scores(window=window), sinks_a=sinks)
        )
        out.backward(made(*out.shape))

    forward, backward = (each for each in launched(both) if each.flops)
    halved = 2 if seen is None else 1
    assert (forward.flops, forward.executed) == (2 * one, 2 * one // halved)
    assert (backward.flops, backward.executed) == (4 * one, 5 * one // halved)
