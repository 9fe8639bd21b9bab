"""Computing again: the same bits from fewer kept bytes, and no product that nobody needs."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.layers.dropout import DropoutSeeds
from megatron.layers.linear import defer_weight_gradients
from megatron.layers.main_grad import give_main_grad
from megatron.layers.recompute import PARTS, Again, Recomputation, prepare
from megatron.model.build_layer import build_layer
from megatron.model.config import ModelConfig
from megatron.model.transformer_layer import TransformerLayer
from megatron.simulator.costs.activation_bytes import stage_activation_bytes, stage_recomputed_bytes
from megatron.training.planning.model_shape import shape_of

CPU = torch.device("cpu")
LAYERS, SAMPLES = 5, 2
GATED = {"swiglu": True, "add_bias_linear": False}
BESIDE = {"parallel_attn": True}
BEHIND = {"post_self_attn_layernorm": True, "post_mlp_layernorm": True}
KINDS = {
    "gelu": {},
    "swiglu": GATED,
    "parallel": BESIDE,
    "parallel with two norms": BESIDE | {"parallel_layernorm": True},
    "norms behind": BEHIND,
    "parallel with norms behind": BESIDE | BEHIND,
}
"""Options of a layer."""

EVERYTHING = Recomputation(parts=frozenset(PARTS))
WAYS = [
    *(Recomputation(parts=frozenset({part})) for part in PARTS),
    EVERYTHING,
    Recomputation(group=1),
    Recomputation(group=2),
    Recomputation(group=LAYERS),
    Recomputation(group=1, most=2),
]


def model_of(dropout: float = 0.0, **options: Any) -> ModelConfig:
    return ModelConfig(
        LAYERS, 32, 64, 4, 4, 8, 16, 16, 50, attention_dropout=dropout, hidden_dropout=dropout,
        **options,
    )  # fmt: skip


class Chunk:
    """Layers with random weights, whose gradients of weights may be left for later."""

    def __init__(
        self, model: ModelConfig, recomputation: Recomputation, dtype: torch.dtype, split: bool
    ) -> None:
        kernels = ReferenceKernels()
        self.layers = torch.nn.ModuleList(
            build_layer(model, i, CPU, dtype, kernels) for i in range(LAYERS)
        )
        self.recomputation = recomputation
        self.later: list[Callable[[], None]] = []
        torch.manual_seed(1)
        for parameter in self.layers.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
            give_main_grad(parameter, torch.zeros_like(parameter, dtype=torch.float32))
        prepare(self.layers, recomputation)
        defer_weight_gradients(self.layers, self.later.append if split else None)
        self.x = torch.randn(
            SAMPLES, model.seq_length, model.hidden_size, dtype=dtype, requires_grad=True
        )

    def forward(self, left_out: list[Again] | None = None) -> Tensor:
        def run(layer: torch.nn.Module, x: Tensor) -> Tensor:
            assert isinstance(layer, TransformerLayer)
            result: Tensor = layer(x, None, DropoutSeeds(3, 0, 0, layer.layer_number))
            return result

        return self.recomputation.run(list(self.layers), run, self.x, left_out)

    def gradients(self, ahead: int = 0) -> list[Tensor]:
        """Of the input and of all parameters; so many groups are computed again beforehand."""
        left_out: list[Again] = []
        y = self.forward(left_out)
        for group in left_out[:ahead]:
            group.compute()
        torch.manual_seed(2)
        torch.autograd.backward((y,), (torch.randn_like(y),))
        with torch.no_grad():
            for work in self.later:
                work()
        found = [self.x.grad]
        for parameter in self.layers.parameters():
            main_grad = parameter.main_grad  # type: ignore[attr-defined]  # given above
            found.append(main_grad if parameter.grad is None else parameter.grad)
        return [gradient for gradient in found if gradient is not None]


class Memory(TorchDispatchMode):
    """Knows all that operations allocate, for as long as it lives.

    Args:
        before: what was there before; views of it are no new memory.
    """

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # TorchDispatchMode has no types
        self._made: dict[StorageWeakRef, int] = {}
        self._before = {StorageWeakRef(tensor.untyped_storage()) for tensor in before}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                memory = StorageWeakRef(tensor.untyped_storage())
                if memory not in self._before:
                    self._made[memory] = tensor.untyped_storage().nbytes()
        return result

    @property
    def held(self) -> int:
        """Bytes that are still alive."""
        return sum(size for memory, size in self._made.items() if not memory.expired())


class Products(TorchDispatchMode):
    """Counts the FLOPs of matrix products; attention is another operation."""

    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            left, right = args[-2:]
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("split", [False, True], ids=["whole backward", "split backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recomputation", WAYS, ids=str)
def test_gradients_are_the_same_bits(
    recomputation: Recomputation, dtype: torch.dtype, split: bool
) -> None:
    model = model_of(dropout=0.2)
    plain = Chunk(model, Recomputation(), dtype, split).gradients()
    for ahead in (0, 1, LAYERS) if recomputation.group else (0,):
        again = Chunk(model, recomputation, dtype, split).gradients(ahead)
        assert len(plain) == len(again)
        assert all(map(torch.equal, plain, again))


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("recomputation", WAYS, ids=str)
def test_what_is_kept_is_what_the_costs_say(
    recomputation: Recomputation, options: dict[str, Any]
) -> None:
    """But for statistics of norms and of attention, which are vectors."""
    model = model_of(**options)
    chunk = Chunk(model, recomputation, torch.bfloat16, split=True)
    with Memory((chunk.x, *chunk.layers.parameters())) as memory:
        edge = get_gradient_edge(chunk.forward())
    found = memory.held + chunk.x.untyped_storage().nbytes()
    assert edge.node is not None  # it holds the graph, not the output
    shape = shape_of(model, SAMPLES, recomputation)
    vectors = 4 * LAYERS * shape.tokens * (2 * 2 + model.num_attention_heads)
    expected = stage_activation_bytes(shape, LAYERS)
    assert expected <= found <= expected + vectors


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("recomputation", [way for way in WAYS if way.group], ids=str)
def test_what_is_computed_ahead_is_what_the_costs_say(
    recomputation: Recomputation, options: dict[str, Any]
) -> None:
    """R makes a chunk as if nothing had been left out, and its backward repeats nothing."""
    model = model_of(**options)
    chunk = Chunk(model, recomputation, torch.bfloat16, split=True)
    shape = shape_of(model, SAMPLES, recomputation)
    left_out: list[Again] = []
    with Memory((chunk.x, *chunk.layers.parameters())) as memory:
        y = chunk.forward(left_out)
        with Products() as ahead:  # type: ignore[no-untyped-call]  # TorchDispatchMode has no types
            while left_out:
                left_out.pop(0).compute()
    found = memory.held + chunk.x.untyped_storage().nbytes() - y.untyped_storage().nbytes()
    vectors = 4 * LAYERS * shape.tokens * (2 * 2 + model.num_attention_heads)
    expected = stage_activation_bytes(shape, LAYERS) + stage_recomputed_bytes(shape, LAYERS)
    assert expected <= found <= expected + vectors
    attention = shape.recomputed.layers(LAYERS) * shape.attention_flops
    assert ahead.flops == shape.stage_repeated_flops(LAYERS) - attention
    with Products() as products:  # type: ignore[no-untyped-call]  # TorchDispatchMode has no types
        torch.autograd.backward((y,), (torch.ones_like(y),))
    assert products.flops == LAYERS * shape.linear_flops


def test_every_part_of_a_layer_counts() -> None:
    kept = {recomputation: stage_activation_bytes(shape, LAYERS) for recomputation, shape in (
        (way, shape_of(model_of(), SAMPLES, way)) for way in (Recomputation(), *WAYS))}  # fmt: skip
    parts = [kept[Recomputation(parts=frozenset({part}))] for part in PARTS]
    saved = sum(kept[Recomputation()] - one for one in parts)
    assert kept[Recomputation()] - kept[EVERYTHING] == saved
    assert len(set(kept.values())) == len(kept) - 1  # flash attention keeps nothing in its core


@pytest.mark.parametrize("split", [False, True], ids=["whole backward", "split backward"])
@pytest.mark.parametrize(
    ("recomputation", "dropout"),
    [
        (Recomputation(parts=frozenset({"mlp"})), 0.0),
        (Recomputation(parts=frozenset({"mlp"})), 0.2),
        (Recomputation(group=1), 0.0),
        (Recomputation(group=2), 0.0),
        (Recomputation(group=1), 0.2),
        (Recomputation(group=1, most=3), 0.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_products_are_repeated_as_the_costs_say(
    options: dict[str, Any], recomputation: Recomputation, dropout: float, split: bool
) -> None:
    """The MLP's last product is not, unless a norm or a dropout behind it has to be repeated."""
    model = model_of(dropout, **options)
    chunk = Chunk(model, recomputation, torch.float32, split)
    shape = shape_of(model, SAMPLES, recomputation)
    y = chunk.forward()
    with Products() as products:  # type: ignore[no-untyped-call]  # TorchDispatchMode has no types
        torch.autograd.backward((y,), (torch.ones_like(y),))
    backward = LAYERS * shape.linear_flops * (1 if split else 2)
    attention = shape.recomputed.layers(LAYERS) * shape.attention_flops
    assert products.flops == backward + shape.stage_repeated_flops(LAYERS) - attention


@pytest.mark.parametrize("recomputation", [EVERYTHING, Recomputation(group=2)], ids=str)
def test_an_evaluation_keeps_nothing_and_gives_the_same_bits(recomputation: Recomputation) -> None:
    plain, again = (
        Chunk(model_of(), way, torch.float32, split=False)
        for way in (Recomputation(), recomputation)
    )
    with torch.no_grad(), Memory((again.x, *again.layers.parameters())) as memory:
        found = again.forward()
    with torch.no_grad():
        assert torch.equal(found, plain.forward())
    assert memory.held == found.untyped_storage().nbytes()
