"""Self-attention against the formula written out in float64, head by head."""

import math

import pytest
import torch
from torch import Tensor

from megatron.layers import compiled_attention
from megatron.layers.attention import AttentionShape, SelfAttention
from megatron.layers.causal import causal_attention, causal_self_attention, split_heads
from megatron.layers.norm import build_norm
from megatron.layers.rope import RotaryEmbedding

CPU = torch.device("cpu")


def explicit_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[b, heads, s, d] with [b, groups, s, d], one head at a time."""
    share = q.shape[1] // k.shape[1]
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    heads = []
    for head in range(q.shape[1]):
        key, value = k[:, head // share], v[:, head // share]
        score = torch.einsum("bid,bjd->bij", q[:, head], key) / math.sqrt(q.shape[-1])
        heads.append(score.masked_fill(future, -math.inf).softmax(-1) @ value)
    return torch.stack(heads, dim=1)


def random_qkv(
    batch: int, heads: int, groups: int, seq: int, size: int, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Transposed views, as the layer passes them."""
    generator = torch.Generator().manual_seed(seq)
    return [
        torch.randn(batch, seq, n, size, generator=generator, dtype=torch.float64)
        .to(dtype)
        .transpose(1, 2)
        .requires_grad_()
        for n in (heads, groups, groups)
    ]


def relative_error(value: Tensor, reference: Tensor) -> float:
    return ((value - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize(
    ("batch", "heads", "groups", "seq"),
    [
        pytest.param(2, 4, 4, 7, id="one block"),
        pytest.param(2, 6, 2, 7, id="grouped"),
        pytest.param(1, 2, 2, 512, id="two blocks"),
        pytest.param(2, 4, 1, 300, id="uneven blocks, grouped"),
        pytest.param(1, 4, 2, 520, id="kernel of PyTorch, grouped"),
    ],
)
def test_output_and_gradients_are_those_of_the_formula(
    batch: int, heads: int, groups: int, seq: int
) -> None:
    qkv = random_qkv(batch, heads, groups, seq, size=8)
    output = causal_attention(*qkv, dropout=0.0)
    expected = explicit_attention(*qkv)
    grad = torch.randn(expected.shape, dtype=torch.float64)
    torch.testing.assert_close(output, expected)
    for got, want in zip(
        torch.autograd.grad(output, qkv, grad),
        torch.autograd.grad(expected, qkv, grad),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


def test_gradcheck_across_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_attention, "BLOCK", 2)
    qkv = random_qkv(batch=1, heads=4, groups=2, seq=5, size=2)
    assert torch.autograd.gradcheck(lambda *t: causal_attention(*t, dropout=0.0), qkv)


def attention_in_bf16(
    batch: int, heads: int, groups: int, seq: int, size: int, scale: float = 1.0
) -> list[tuple[Tensor, Tensor]]:
    """Output and gradients, each with what the formula gives in float64 for the same inputs."""
    narrow = [
        (t * scale).detach().requires_grad_()
        for t in random_qkv(batch, heads, groups, seq, size, torch.bfloat16)
    ]
    wide = [t.detach().double().requires_grad_() for t in narrow]
    output, expected = causal_attention(*narrow, dropout=0.0), explicit_attention(*wide)
    grad = torch.randn(expected.shape).bfloat16()
    got = torch.autograd.grad(output, narrow, grad)
    want = torch.autograd.grad(expected, wide, grad.double())
    return [(output, expected), *zip(got, want, strict=True)]


@pytest.mark.parametrize(
    ("batch", "heads", "groups", "seq", "size"),
    [
        pytest.param(1, 4, 4, 1, 16, id="one position"),
        pytest.param(2, 4, 4, 33, 24, id="one block"),
        pytest.param(2, 6, 2, 33, 16, id="one block, grouped"),
        pytest.param(1, 6, 2, 129, 16, id="an odd row after whole vectors, grouped"),
        pytest.param(1, 2, 2, 512, 16, id="two blocks"),
        pytest.param(2, 4, 1, 700, 8, id="uneven blocks, grouped"),
        pytest.param(1, 4, 2, 1030, 8, id="kernel of PyTorch, grouped"),
    ],
)
def test_bf16_stays_within_bf16_rounding(
    batch: int, heads: int, groups: int, seq: int, size: int
) -> None:
    (output, expected), *gradients = attention_in_bf16(batch, heads, groups, seq, size)
    assert relative_error(output.double(), expected) < 5e-3
    for got, want in gradients:
        assert (got.double() - want).norm() <= 1e-2 * want.norm() + 1e-12


@pytest.mark.parametrize(("batch", "heads", "groups", "seq"), [(1, 2, 2, 9), (2, 6, 2, 300)])
def test_of_a_fused_projection_attention_is_that_of_its_parts(
    batch: int, heads: int, groups: int, seq: int
) -> None:
    """To the bit: the same products of the same numbers, only gathered from elsewhere."""
    qkv = torch.randn(batch, seq, groups, heads // groups + 2, 16).bfloat16().requires_grad_()
    assert compiled_attention.serves(qkv, seq), "the tests need a C++ compiler"
    q, k, v = (t.transpose(1, 2) for t in split_heads(qkv))
    apart = causal_attention(q, k, v, dropout=0.0).transpose(1, 2).flatten(2)
    fused = causal_self_attention(qkv, dropout=0.0)
    assert torch.equal(fused, apart)
    grad = torch.randn(apart.shape).bfloat16()
    for got, want in zip(
        torch.autograd.grad(fused, qkv, grad), torch.autograd.grad(apart, qkv, grad), strict=True
    ):
        assert torch.equal(got, want)


def test_scores_of_any_size_and_blocks_of_few_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_attention, "BLOCK", 3)
    for got, want in attention_in_bf16(2, 6, 2, 17, 16, scale=4.0):
        assert relative_error(got.double(), want) < 5e-2  # scores up to 50 have an error of 1/8
    assert len(compiled_attention.blocks(17)) == 6


def test_gradients_of_a_row_of_scores_sum_to_zero() -> None:
    """Rounded probabilities do not sum to one: felt where all values are far from zero."""
    q, k, v = (t.detach() for t in random_qkv(1, 2, 2, 300, 16, torch.bfloat16))
    q.requires_grad_()
    output = causal_attention(q, torch.ones_like(k), v + 8, dropout=0.0)
    (grad,) = torch.autograd.grad(output, q, torch.randn(output.shape).bfloat16())
    assert grad.abs().max() < 0.01  # all keys are the same; 0.06 with a mean not over their sum


def test_backward_can_be_run_twice() -> None:
    qkv = random_qkv(1, 2, 2, 300, 16, torch.bfloat16)
    output = causal_attention(*qkv, dropout=0.0)
    grad = torch.randn(output.shape).bfloat16()
    first = torch.autograd.grad(output, qkv, grad, retain_graph=True)
    second = torch.autograd.grad(output, qkv, grad)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradient_that_is_not_finite_spares_the_keys_that_its_row_does_not_see() -> None:
    q, k, v = random_qkv(1, 2, 2, 150, 16, torch.bfloat16)
    output = causal_attention(q, k, v, dropout=0.0)
    grad = torch.ones_like(output).index_fill(2, torch.tensor(70), math.nan)
    (k_grad,) = torch.autograd.grad(output, k, grad)
    assert k_grad[:, :, :71].isnan().all()
    assert k_grad[:, :, 71:].isfinite().all()


def test_what_is_not_finite_reaches_only_those_who_see_it() -> None:
    q, k, v = (t.detach() for t in random_qkv(1, 2, 2, 9, 16, torch.bfloat16))
    q, k, v = (t.requires_grad_() for t in (q, k.index_fill(2, torch.tensor(5), math.nan), v))
    output = causal_attention(q, k, v, dropout=0.0)
    assert output[:, :, :5].isfinite().all()
    assert output[:, :, 5:].isnan().all()
    output.sum().backward()
    assert q.grad is not None
    assert q.grad[:, :, 5:].isnan().all()


def test_without_a_compiler_bf16_stays_within_its_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled_attention, "library_for", lambda _: None)
    for got, want in attention_in_bf16(2, 4, 2, 320, 16):
        assert relative_error(got.double(), want) < 1e-2


def test_dropout_keeps_the_mean_and_drops_only_in_training() -> None:
    torch.manual_seed(0)
    q, k, _ = random_qkv(64, 4, 4, 8, 4)
    ones = torch.ones_like(k)
    kept = causal_attention(q, k, ones, dropout=0.25)
    first = kept[:, :, 0]  # one weight of 1: dropped, or scaled by 1 / 0.75
    assert set(first.unique().tolist()) == {0.0, 1 / 0.75}
    assert abs(kept.mean().item() - 1) < 0.05

    layer = make_layer(dropout=0.5)
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def make_layer(
    groups: int = 2, *, bias: bool = True, dropout: float = 0.0, qk_norm: bool = False
) -> SelfAttention:
    shape = AttentionShape(hidden_size=12, num_heads=4, num_groups=groups, head_size=6)
    norms = None
    if qk_norm:
        norms = tuple(build_norm("RMSNorm", 6, 1e-5, torch.float64, CPU) for _ in range(2))
    layer = SelfAttention(
        shape, bias=bias, dropout=dropout, qk_norms=norms, device=CPU, dtype=torch.float64
    )
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=generator)
    return layer


def explicit_layer(layer: SelfAttention, x: Tensor, *, rope: bool) -> Tensor:
    """The layer row by row of the fused matrix, rotation by complex numbers."""
    shape = layer.shape
    projected = iter(projected_heads(layer, x))
    heads: dict[str, list[Tensor]] = {"q": [], "k": [], "v": []}
    for _ in range(shape.num_groups):
        heads["q"] += [next(projected) for _ in range(shape.num_heads // shape.num_groups)]
        heads["k"].append(next(projected))
        heads["v"].append(next(projected))
    q, k, v = (torch.stack(heads[name], dim=1) for name in "qkv")
    if layer.q_layernorm is not None:
        q, k = (
            t * (t.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight
            for t, norm in ((q, layer.q_layernorm), (k, layer.k_layernorm))
        )
    if rope:
        frequency = 10000.0 ** -(torch.arange(3, dtype=torch.float64) / 3)
        angle = torch.outer(torch.arange(x.shape[1], dtype=torch.float64), frequency)
        turn = torch.polar(torch.ones_like(angle), angle)
        q, k = (complex_turn(t, turn) for t in (q, k))
    context = explicit_attention(q, k, v).transpose(1, 2).flatten(2)
    output = context @ layer.linear_proj.weight.T
    return output if layer.linear_proj.bias is None else output + layer.linear_proj.bias


def projected_heads(layer: SelfAttention, x: Tensor) -> list[Tensor]:
    """The heads of the fused projection in the order of its rows."""
    fused, size = layer.linear_qkv, layer.shape.head_size
    heads = [x @ rows.T for rows in fused.weight.split(size)]
    if fused.bias is None:
        return heads
    return [head + bias for head, bias in zip(heads, fused.bias.split(size), strict=True)]


def complex_turn(x: Tensor, turn: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat([turned.real, turned.imag], dim=-1)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(
    ("bias", "qk_norm", "rope"),
    [(True, False, False), (False, True, True), (True, True, False), (False, False, True)],
)
def test_layer_is_the_formula_on_megatrons_row_layout(
    groups: int, bias: bool, qk_norm: bool, rope: bool
) -> None:
    layer = make_layer(groups, bias=bias, qk_norm=qk_norm)
    x = torch.randn(2, 9, 12, dtype=torch.float64, requires_grad=True)
    rotary = RotaryEmbedding(6, 9, 1.0, 10000, CPU) if rope else None
    output, expected = layer(x, rotary), explicit_layer(layer, x, rope=rope)
    # the angles are kept in fp32
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    inputs = [x, *layer.parameters()]
    grad = torch.randn_like(expected)
    for got, want in zip(
        torch.autograd.grad(output, inputs, grad),
        torch.autograd.grad(expected, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_no_position_sees_a_later_one() -> None:
    layer = make_layer()
    x = torch.randn(1, 6, 12, dtype=torch.float64)
    changed = x.clone()
    changed[:, 4:] += 1
    before, after = layer(x), layer(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_uneven_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="6 attention heads cannot form 4 query groups"):
        AttentionShape(hidden_size=24, num_heads=6, num_groups=4, head_size=4)
