"""Self-attention against the formula written out in float64, head by head."""

import pytest
import torch
from kernels.formulas import explicit_attention
from parallel.tensor_axis import without_groups
from torch import Tensor

from megatron.layers.attention import AttentionShape, SelfAttention
from megatron.layers.dropout import DropoutSeeds
from megatron.layers.forward_pass import ForwardPass
from megatron.layers.rope import RotaryEmbedding
from megatron.layers.settings import AttentionSettings, NormSettings
from megatron.layers.site import Site
from megatron.parallel import collectives
from megatron.parallel.tensor import ALONE, TensorParallel

CPU = torch.device("cpu")


def test_weights_are_dropped_only_in_training() -> None:
    torch.manual_seed(0)
    layer = make_layer(dropout=0.5)
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    first, second = (ForwardPass(DropoutSeeds(1, 0, microbatch, 0)) for microbatch in range(2))
    assert torch.equal(layer(x, first), layer(x, first))
    assert not torch.equal(layer(x, first), layer(x, second))
    torch.testing.assert_close(layer(x), make_layer()(x))


@pytest.mark.parametrize("fault", [False, True])
def test_ranks_drop_different_weights_of_equal_heads(
    fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their parts of the sum are equal without dropout, and if every rank draws what others do."""
    begin = DropoutSeeds.begin
    monkeypatch.setattr(collectives, "all_reduce", lambda x, operation, axis: x)
    if fault:
        monkeypatch.setattr(DropoutSeeds, "begin", lambda self, use, shard=0: begin(self, use))
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    axes = [without_groups(rank, 2, split_tokens=False) for rank in range(2)]
    layers = [make_layer(dropout=0.5, tensor=axis) for axis in axes]
    assert torch.equal(layers[0](x), layers[1](x))
    first, second = (layer(x, ForwardPass(DropoutSeeds(1, 0, 0, 0))) for layer in layers)
    assert torch.allclose(first, second) == fault


def make_layer(
    groups: int = 2,
    *,
    bias: bool = True,
    qkv_bias: bool = False,
    dropout: float = 0.0,
    qk_norm: bool = False,
    tensor: TensorParallel = ALONE,
) -> SelfAttention:
    settings = AttentionSettings(
        num_attention_heads=4,
        num_query_groups=groups,
        kv_channels=6,
        qk_layernorm=qk_norm,
        add_qkv_bias=qkv_bias,
        attention_dropout=dropout,
    )
    site, norm = Site(CPU, torch.float64, tensor=tensor), NormSettings("RMSNorm")
    layer = SelfAttention(settings, 12, site, bias=bias, norm=norm)
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
    if layer.q_layernorm is not None and layer.k_layernorm is not None:
        q, k = (
            t * (t.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.get_parameter("weight")
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
    [
        ("all", False, False),
        ("none", True, True),
        ("all", True, False),
        ("none", False, True),
        ("qkv", False, False),
        ("qkv", False, True),
    ],
)
def test_layer_is_the_formula_on_megatrons_row_layout(
    groups: int, bias: str, qk_norm: bool, rope: bool
) -> None:
    layer = make_layer(groups, bias=bias == "all", qkv_bias=bias == "qkv", qk_norm=qk_norm)
    biases = {name for name, _ in layer.named_parameters() if name.endswith("bias")}
    assert (
        biases
        == {
            "all": {"linear_qkv.bias", "linear_proj.bias"},
            "qkv": {"linear_qkv.bias"},
            "none": set(),
        }[bias]
    )
    x = torch.randn(2, 9, 12, dtype=torch.float64, requires_grad=True)
    rotary = RotaryEmbedding(6, 9, 1.0, 10000, CPU) if rope else None
    output, expected = layer(x, ForwardPass(rope=rotary)), explicit_layer(layer, x, rope=rope)
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
        AttentionShape(num_heads=6, num_groups=4, head_size=4)


def test_ranks_that_share_heads_drop_other_weights() -> None:
    """Here both ranks have the same weights, so only their masks can differ."""
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    contexts = []
    for rank in range(2):
        layer = make_layer(tensor=without_groups(rank, 2, split_tokens=False), dropout=0.5)
        layer.linear_proj.register_forward_pre_hook(
            lambda module, inputs: contexts.append(inputs[0])
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives, "all_reduce", lambda partial, operation, axis: partial)
            for seeds in (None, DropoutSeeds(1, 0, 0, 0), DropoutSeeds(1, 0, 0, 0)):
                layer(x, ForwardPass(seeds))
    first, first_dropped, first_again, second, second_dropped, _ = contexts
    assert torch.equal(first, second)
    assert torch.equal(first_dropped, first_again)
    assert not torch.allclose(first_dropped, second_dropped)
