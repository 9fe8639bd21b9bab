"""dense_gpt.py: FLOPs of the papers, bytes of this project's kernels, and the cut of a layer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.simulator.costs.count import Begin, Collective, Work
from megatron.simulator.costs.dense_gpt import (
    SEEDS,
    DenseGpt,
    Recomputation,
    layer,
)

GPT = DenseGpt(4096, 32, 4096, 256_000)
"""The layer of docs/benchmarks/2026-11-22-gpu-count."""


def gpts() -> st.SearchStrategy[DenseGpt]:
    return st.builds(
        lambda heads, tensor, batch, gated, dropout, parallel, again: DenseGpt(
            128 * heads * tensor,
            heads * tensor,
            1024,
            51_200,
            batch,
            llama=gated,
            dropout=dropout,
            tensor=tensor,
            sequence_parallel=parallel,
            recomputation=again,
        ),
        st.integers(1, 8),
        st.sampled_from([1, 2, 8]),
        st.integers(1, 4),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.sampled_from(["none", "selective", "full"]),
    )


@given(gpts())
def test_products_are_those_of_the_papers(gpt: DenseGpt) -> None:
    """24 bsh^2 + 4 bs^2h of a layer without a gate, twice that in its backward (2104.04473)."""
    n, h, s = gpt.tokens, gpt.hidden_size, gpt.seq_length
    linear = n * h * h * (32 if gpt.llama else 24) // gpt.tensor
    attention = 4 * n * s * h // gpt.tensor
    passes = layer(gpt)
    assert passes["F"].flops == linear + attention
    again = attention if gpt.recomputation == "selective" else 0
    backward = (
        2 * linear + 2 * attention + again
    )  # scores that flash attention repeats do not count
    assert passes["B"].flops == backward
    split = layer(gpt, split=True)
    assert split["B"].flops + split["W"].flops == backward
    assert ("R" in passes) == (gpt.recomputation == "full")


@given(gpts())
def test_ranks_of_a_layer_cut_products_and_share_the_sums(gpt: DenseGpt) -> None:
    forward = [step for step in layer(gpt)["F"].steps if isinstance(step, Collective)]
    kinds = [each.kind for each in forward]
    if gpt.tensor == 1:
        assert not kinds
    elif gpt.sequence_parallel:
        assert kinds == ["all_gather", "reduce_scatter"] * 2
    else:
        assert kinds == ["all_reduce"] * 2
    assert {each.bytes for each in forward} <= {2 * gpt.tokens * gpt.hidden_size}


@pytest.mark.parametrize(("parallel", "begun"), [(False, 2), (True, 4)])
def test_an_unsplit_backward_hides_collectives_beside_products(parallel: bool, begun: int) -> None:
    gpt = DenseGpt(4096, 32, 4096, 256_000, tensor=8, sequence_parallel=parallel)
    steps = layer(gpt)["B"].steps
    assert sum(isinstance(step, Begin) for step in steps) == begun


@pytest.mark.parametrize(("again", "activations"), [("none", 16), ("selective", 16), ("full", 1)])
def test_a_layer_keeps_what_the_papers_table_says(again: Recomputation, activations: int) -> None:
    """34 sbh with dropout, of which the masks are 2 (table 2 of 2205.05198, flash attention)."""
    gpt = DenseGpt(4096, 32, 4096, 256_000, recomputation=again)
    passes = layer(gpt)
    norms = 16 * gpt.tokens  # mean and deviation, in fp32
    statistics = 0 if again == "full" else 4 * gpt.tokens * 32 + norms + SEEDS
    assert passes["F"].left == activations * gpt.activation + statistics
    assert sum(work.left for work in passes.values()) == 0


def _sizes(work: Work) -> list[tuple[str, float]]:
    return [(each.name, round(each.bytes / 1e6, 1)) for each in work.launches]


def test_kernels_move_the_bytes_that_a_pretended_gpu_sees() -> None:
    """Compare with what tests/pretended_gpu/launches.py counted of the layer's forward."""
    assert _sizes(layer(GPT)["F"]) == [
        ("norm", 67.2),
        ("addmm", 234.9),
        ("_scaled_dot_product_flash_attention", 134.7),
        ("addmm", 100.7),
        ("norm", 134.3),
        ("addmm", 302.0),
        ("activation", 268.4),
        ("addmm", 302.0),
        ("add", 100.7),
    ]
    weights = [704.6, 704.6, 201.3, 536.9]
    assert _sizes(layer(GPT, split=True)["W"]) == [("addmm", size) for size in weights]
    assert len(list(layer(GPT)["B"].launches)) == 27
    assert len(list(layer(GPT, split=True)["B"].launches)) == 23
