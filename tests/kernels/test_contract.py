"""What ``Kernels`` promises, of every implementation that this machine can run, in every type.

Each is compared with a formula in float64 of the same, already rounded, numbers. What they promise
of the output layer is in ``test_output.py``.
"""

from collections.abc import Callable

import pytest
import torch
from kernels.formulas import (
    explicit_attention,
    explicit_documents,
    explicit_exact_gelu,
    explicit_geglu,
    explicit_gelu,
    explicit_layer_norm,
    explicit_quick_geglu,
    explicit_relu,
    explicit_rms_norm,
    explicit_self_attention,
    explicit_squared_relu,
    explicit_swiglu,
    first_positions,
)
from kernels.implementations import HALF_UNIT, IMPLEMENTATIONS, Implementation
from torch import Tensor

from megatron.kernels.attention_options import AttentionOptions
from megatron.kernels.documents import Documents
from megatron.kernels.heads import split_heads
from megatron.kernels.scores import PLAIN, Scores

pytestmark = pytest.mark.parametrize("tried", IMPLEMENTATIONS, ids=str)

Function = Callable[..., Tensor]


def assert_same(
    tried: Implementation,
    ours: Function,
    formula: Function,
    *inputs: Tensor,
    roundings: int | None = None,
) -> None:
    """Output and gradients of all inputs.

    With ``roundings``, every element in bf16 is what rounding so many times may make of it: all
    between is computed in fp32.
    """
    narrow = [t.detach().requires_grad_() for t in inputs]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    output, expected = ours(*narrow), formula(*wide)
    grad = tried.activation(*expected.shape, seed=99)
    got = torch.autograd.grad(output, narrow, grad)
    want = torch.autograd.grad(expected, wide, grad.double())
    for own, exact in zip((output, *got), (expected, *want), strict=True):
        assert own.dtype == tried.dtype
        tried.assert_close(own, exact)
        if roundings is not None and tried.dtype == torch.bfloat16:
            times = 2 * roundings if tried.cuts_off else roundings
            rtol = (1 + HALF_UNIT) ** times - 1 + 1e-5  # and the error of fp32
            torch.testing.assert_close(own.double(), exact, rtol=rtol, atol=1e-6)


def test_gelu(tried: Implementation) -> None:
    assert_same(tried, tried.kernels.gelu, explicit_gelu, tried.activation(5, 7))
    every_magnitude = torch.linspace(-60, 60, 20_001).to(tried.device, tried.dtype)
    assert_same(tried, tried.kernels.gelu, explicit_gelu, every_magnitude)


def test_gelu_takes_strided_input(tried: Implementation) -> None:
    assert_same(tried, tried.kernels.gelu, explicit_gelu, tried.activation(6, 4).T)


def test_gelu_of_what_is_not_finite_is_not_hidden(tried: Implementation) -> None:
    x = tried.activation(40).index_fill_(0, torch.arange(0, 40, 2, device=tried.device), torch.nan)
    x[1::4] = torch.inf
    finite = tried.kernels.gelu(x).isfinite()
    assert not finite[::2].any()
    assert not finite[1::4].any()
    assert finite[3::4].all()


def test_exact_gelu(tried: Implementation) -> None:
    every_magnitude = torch.linspace(-60, 60, 20_001).to(tried.device, tried.dtype)
    for x in (tried.activation(5, 7), tried.activation(6, 4).T, every_magnitude):
        assert_same(tried, tried.kernels.exact_gelu, explicit_exact_gelu, x)


def test_relu(tried: Implementation) -> None:
    """At 0 it has no slope."""
    every_magnitude = torch.linspace(-60, 60, 20_001).to(tried.device, tried.dtype)
    for x in (tried.activation(5, 7), tried.activation(6, 4).T, every_magnitude):
        assert_same(tried, tried.kernels.relu, explicit_relu, x)
    x = tried.activation(4).index_fill_(0, torch.arange(2, device=tried.device), torch.nan)
    x[2] = torch.inf
    assert tried.kernels.relu(x).isfinite().tolist() == [False, False, False, True]


def test_squared_relu(tried: Implementation) -> None:
    every_magnitude = torch.linspace(-60, 60, 20_001).to(tried.device, tried.dtype)
    for x in (tried.activation(5, 7), tried.activation(6, 4).T, every_magnitude):
        assert_same(tried, tried.kernels.squared_relu, explicit_squared_relu, x)


def test_squared_relu_has_no_slope_below_zero(tried: Implementation) -> None:
    x = -tried.activation(50).abs().detach()
    x[0] = 0
    (gradient,) = torch.autograd.grad(
        tried.kernels.squared_relu(x.requires_grad_()), x, tried.activation(50, seed=1)
    )
    assert not gradient.any()


def test_squared_relu_of_what_is_not_finite_is_not_hidden(tried: Implementation) -> None:
    x = tried.activation(4).index_fill_(0, torch.arange(2, device=tried.device), torch.nan)
    x[2] = torch.inf
    assert tried.kernels.squared_relu(x).isfinite().tolist() == [False, False, False, True]


def test_swiglu(tried: Implementation) -> None:
    """It rounds silu(gate), or the gradient's product with the other half, and the result."""
    gate_up = 2 * tried.activation(4, 50, 96)
    assert_same(tried, tried.kernels.swiglu, explicit_swiglu, gate_up, roundings=2)


def test_geglu(tried: Implementation) -> None:
    assert_same(tried, tried.kernels.geglu, explicit_geglu, 2 * tried.activation(4, 50, 96))


@pytest.mark.parametrize(("limit", "offset"), [(None, 0.0), (1.5, 1.0)])
def test_quick_geglu(tried: Implementation, limit: float | None, offset: float) -> None:
    assert_same(
        tried,
        lambda gate_up: tried.kernels.quick_geglu(gate_up, limit=limit, offset=offset),
        lambda gate_up: explicit_quick_geglu(gate_up, limit, offset),
        2 * tried.activation(4, 50, 96),
    )


def test_layer_norm(tried: Implementation) -> None:
    inputs = (2 * tried.activation(2, 5, 48) + 1, tried.activation(48), tried.activation(48))
    for epsilon in (1e-5, 0.1):
        assert_same(
            tried,
            lambda x, w, b, e=epsilon: tried.kernels.layer_norm(x, w, b, e),
            lambda x, w, b, e=epsilon: explicit_layer_norm(x, w, b, e),
            *inputs,
        )


def test_layer_norm_takes_any_layout(tried: Implementation) -> None:
    weight_h, bias_h = tried.activation(16), tried.activation(16, seed=1)
    x = tried.activation(16, 6, 2).permute(2, 1, 0).requires_grad_()
    wide = x.detach().double().requires_grad_()
    output = tried.kernels.layer_norm(x, weight_h, bias_h, 1e-5)
    expected = explicit_layer_norm(wide, weight_h.double(), bias_h.double(), 1e-5)
    tried.assert_close(output, expected)
    grad = tried.activation(6, 16, seed=2).expand(2, 6, 16)
    (got,) = torch.autograd.grad(output, x, grad)
    (want,) = torch.autograd.grad(expected, wide, grad.double())
    tried.assert_close(got, want)


def test_layer_norm_does_not_hide_what_is_not_finite(tried: Implementation) -> None:
    x = tried.activation(3, 16)
    x[0, 3], x[1, 4] = torch.nan, torch.inf
    finite = tried.kernels.layer_norm(
        x, tried.activation(16), tried.activation(16), 1e-5
    ).isfinite()
    assert not finite[:2].any()
    assert finite[2].all()


def test_rms_norm(tried: Implementation) -> None:
    assert_same(
        tried,
        lambda x, weight_h: tried.kernels.rms_norm(x, weight_h, 0.1),
        lambda x, weight_h: explicit_rms_norm(x, weight_h, 0.1),
        2 * tried.activation(4, 50, 48),
        tried.activation(48, seed=1),
        roundings=1,
    )


ATTENTION = [(2, 4, 4, 7), (2, 6, 2, 33), (1, 2, 2, 300), (1, 2, 1, 520)]
"""Batch, heads, groups, positions."""


@pytest.mark.parametrize(("batch", "heads", "groups", "seq"), ATTENTION)
def test_causal_attention(
    tried: Implementation, batch: int, heads: int, groups: int, seq: int
) -> None:
    assert_same(
        tried,
        lambda *t: tried.kernels.causal_attention(*t),
        explicit_attention,
        *(
            tried.activation(batch, seq, of, 8, seed=seed).transpose(1, 2)
            for seed, of in enumerate((heads, groups, groups))
        ),
    )


@pytest.mark.parametrize(("batch", "heads", "groups", "seq"), ATTENTION)
def test_causal_self_attention(
    tried: Implementation, batch: int, heads: int, groups: int, seq: int
) -> None:
    assert_same(
        tried,
        lambda qkv: tried.kernels.causal_self_attention(qkv),
        explicit_self_attention,
        tried.activation(batch, seq, groups, heads // groups + 2, 8),
    )


SLOPES = (0.5, 0.2, 0.1, 0.02)
SCORES = [
    Scores(scale=0.7),
    Scores(softcap=1.5),
    Scores(window=0),
    Scores(window=40),
    Scores(window=299),
    Scores(slopes_a=SLOPES),
    Scores(0.7, 1.5, 40, SLOPES),
]


@pytest.mark.pairwise
@pytest.mark.one_in(3)
@pytest.mark.parametrize("scores", SCORES, ids=str)
@pytest.mark.parametrize("seq", [5, 300])
def test_attention_with_other_scores(tried: Implementation, scores: Scores, seq: int) -> None:
    assert_same(
        tried,
        lambda *t: tried.kernels.causal_attention(*t, options=AttentionOptions(scores)),
        lambda *t: explicit_attention(*t, scores=scores),
        *(
            tried.activation(2, seq, heads, 8, seed=seed).transpose(1, 2)
            for seed, heads in enumerate((4, 2, 2))
        ),
    )
    assert_same(
        tried,
        lambda qkv: tried.kernels.causal_self_attention(qkv, options=AttentionOptions(scores)),
        lambda qkv: explicit_self_attention(qkv, scores=scores),
        tried.activation(1, seq, 4, 3, 8),
    )


STARTS = {5: ([0, 1, 4], [0]), 300: ([0, 1, 130, 256, 257], [0, 290])}


@pytest.mark.pairwise
@pytest.mark.one_in(4)
@pytest.mark.parametrize("scores", [PLAIN, *SCORES[3:]], ids=str)
@pytest.mark.parametrize("seq", STARTS)
def test_attention_within_documents(tried: Implementation, scores: Scores, seq: int) -> None:
    starts = STARTS[seq]
    documents = Documents.of(first_positions(starts, seq), lambda t: t.to(tried.device))
    assert_same(
        tried,
        lambda *t: tried.kernels.causal_attention(
            *t, options=AttentionOptions(scores, documents=documents)
        ),
        lambda *t: explicit_documents(*t, starts=starts, scores=scores),
        *(
            tried.activation(2, seq, heads, 8, seed=seed).transpose(1, 2)
            for seed, heads in enumerate((4, 2, 2))
        ),
    )


@pytest.mark.pairwise
@pytest.mark.one_in(2)
@pytest.mark.parametrize("scores", [PLAIN, *SCORES[3:]], ids=str)
@pytest.mark.parametrize("queries", [1, 70])
@pytest.mark.parametrize("apart", [False, True], ids=["one document", "documents"])
def test_queries_of_the_last_positions_only(
    tried: Implementation, scores: Scores, queries: int, apart: bool
) -> None:
    seq, starts = 300, STARTS[300] if apart else ([0], [0])
    documents = Documents.of(first_positions(starts, seq), lambda t: t.to(tried.device))
    q, k, v = (
        tried.activation(2, seq, heads, 8, seed=seed).transpose(1, 2)
        for seed, heads in enumerate((4, 2, 2))
    )
    assert_same(
        tried,
        lambda q, k, v: tried.kernels.causal_attention(
            q[:, :, -queries:],
            k,
            v,
            options=AttentionOptions(scores, documents=documents if apart else None),
        ),
        lambda q, k, v: explicit_documents(q, k, v, starts=starts, scores=scores)[:, :, -queries:],
        q,
        k,
        v,
    )


@pytest.mark.pairwise
@pytest.mark.one_in(3)
@pytest.mark.parametrize("scores", [PLAIN, *SCORES[1:]], ids=str)
@pytest.mark.parametrize("queries", [300, 70])
@pytest.mark.parametrize("apart", [False, True], ids=["one document", "documents"])
def test_attention_with_sinks(
    tried: Implementation, scores: Scores, queries: int, apart: bool
) -> None:
    seq, starts = 300, STARTS[300] if apart else ([0], [0])
    documents = Documents.of(first_positions(starts, seq), lambda t: t.to(tried.device))
    q, k, v = (
        tried.activation(2, seq, heads, 8, seed=seed).transpose(1, 2)
        for seed, heads in enumerate((4, 2, 2))
    )
    assert_same(
        tried,
        lambda q, k, v, sinks: tried.kernels.causal_attention(
            q[:, :, -queries:],
            k,
            v,
            options=AttentionOptions(scores, documents=documents if apart else None, sinks_a=sinks),
        ),
        lambda q, k, v, sinks: explicit_documents(
            q, k, v, starts=starts, scores=scores, sinks=sinks
        )[:, :, -queries:],
        q,
        k,
        v,
        3 * tried.activation(4, seed=5),
    )


def test_sinks_in_a_fused_projection(tried: Implementation) -> None:
    def explicit(qkv: Tensor, sinks: Tensor) -> Tensor:
        heads = (t.transpose(1, 2) for t in split_heads(qkv))
        return explicit_attention(*heads, sinks=sinks).transpose(1, 2).flatten(2)

    assert_same(
        tried,
        lambda qkv, sinks: tried.kernels.causal_self_attention(
            qkv, options=AttentionOptions(sinks_a=sinks)
        ),
        explicit,
        tried.activation(2, 5, 4, 3, 8),
        tried.activation(4, seed=5),
    )


def test_documents_in_a_fused_projection(tried: Implementation) -> None:
    starts = STARTS[5]
    documents = Documents.of(first_positions(starts, 5), lambda t: t.to(tried.device))

    def explicit(qkv: torch.Tensor) -> torch.Tensor:
        heads = (t.transpose(1, 2) for t in split_heads(qkv))
        return explicit_documents(*heads, starts=starts).transpose(1, 2).flatten(2)

    assert_same(
        tried,
        lambda qkv: tried.kernels.causal_self_attention(
            qkv, options=AttentionOptions(documents=documents)
        ),
        explicit,
        tried.activation(2, 5, 4, 3, 8),
    )


def test_the_backward_with_other_scores_drops_what_the_forward_dropped(
    tried: Implementation,
) -> None:
    """The output is linear in the values, so that it meets a gradient as the values meet theirs."""
    q, k, v = (tried.activation(2, 4, 300, 8, seed=seed).requires_grad_() for seed in range(3))
    torch.manual_seed(0)
    output = tried.kernels.causal_attention(
        q, k, v, options=AttentionOptions(Scores(window=280), 0.5)
    )
    grad, state = tried.activation(*output.shape, seed=4), torch.get_rng_state()
    (gradient,) = torch.autograd.grad(output, v, grad)
    assert torch.equal(torch.get_rng_state(), state)
    met = (output.double() * grad.double()).sum().item()
    bound = output.double().norm().item() * grad.double().norm().item()
    half = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
    accuracy = ({torch.float64: 1e-12, torch.float32: 1e-6} | half)[tried.dtype]
    assert abs((v.double() * gradient.double()).sum().item() - met) < accuracy * bound
    assert abs(met) > 0.001 * bound  # or the same would hold of other masks
    dropped = tried.kernels.causal_attention(
        q, k, torch.ones_like(v), options=AttentionOptions(Scores(window=0), 0.25)
    )
    assert set(dropped.unique().tolist()) == {
        0.0,
        float(torch.tensor(1 / 0.75, dtype=tried.dtype)),
    }


def test_dropout_of_attention_keeps_the_mean(tried: Implementation) -> None:
    torch.manual_seed(0)
    q, k = (tried.activation(64, 4, 8, 16, seed=seed) for seed in range(2))
    kept = tried.kernels.causal_attention(
        q, k, torch.ones_like(k), options=AttentionOptions(dropout=0.25)
    )
    first = kept[:, :, 0]  # one weight of 1: dropped, or scaled by 1 / 0.75
    dropped, scaled = first.unique().tolist()
    assert dropped == 0.0
    assert scaled == pytest.approx(1 / 0.75, rel=2 * torch.finfo(tried.dtype).eps)
    assert abs(kept.double().mean().item() - 1) < 0.05


@pytest.mark.parametrize(
    "shape", [(7,), (3, 5), ((1 << 18) + 3,), (1000, 513), (2, 200_000), (0, 4)]
)
def test_accumulation_does_not_round_the_addend(
    tried: Implementation, shape: tuple[int, ...]
) -> None:
    total, part = tried.statistic(*shape), tried.activation(*shape, seed=1)
    expected = total + part.to(tried.statistics)
    tried.kernels.accumulate_(total, part)
    assert torch.equal(total, expected)
    tried.kernels.accumulate_(total, expected)  # of the total's own type
    assert torch.equal(total, 2 * expected)


def test_a_transposed_gradient_is_added_in_place(tried: Implementation) -> None:
    total, part = tried.statistic(600, 400), tried.activation(400, 600, seed=1).T
    expected = total + part.to(tried.statistics)
    tried.kernels.accumulate_(total, part)
    assert torch.equal(total, expected)


def test_a_product_is_accumulated(tried: Implementation) -> None:
    total, left, right = (
        tried.statistic(5, 9),
        tried.activation(4, 5, seed=1).T,
        tried.activation(4, 9, seed=2),
    )
    expected = total.double() + left.double() @ right.double()
    tried.kernels.accumulate_product_(total, left, right)
    tried.assert_close(total, expected)
    total.fill_(torch.nan)
    tried.kernels.accumulate_product_(total, left, right, begins=True)
    tried.assert_close(total, left.double() @ right.double())
