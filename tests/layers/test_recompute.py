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
from megatron.layers.forward_pass import ForwardPass
from megatron.layers.main_grad import give_main_grad
from megatron.layers.recompute import PARTS, Again, Recomputation
from megatron.layers.site import Site
from megatron.layers.weight_gradients import defer_weight_gradients
from megatron.model.build_layer import build_layer
from megatron.model.settings import ModelSettings
from megatron.model.transformer_layer import TransformerLayer

CPU = torch.device("cpu")
LAYERS, SAMPLES = 5, 2
GATED: dict[str, Any] = {"activation": "swiglu", "add_bias_linear": False}
BESIDE = {"parallel_attn": True}
BEHIND = {"post_self_attn_layernorm": True, "post_mlp_layernorm": True}
KINDS: dict[str, dict[str, Any]] = {
    "gelu": {},
    "swiglu": GATED,
    "parallel": BESIDE,
    "parallel with two norms": BESIDE | {"parallel_layernorm": True},
    "norms behind": BEHIND,
    "parallel with norms behind": BESIDE | BEHIND,
    "norms behind alone": {"pre_layernorm": False} | BEHIND,
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


UNITS = {
    "gelu": (12, 2, 4),
    "swiglu": (14, 2, 6),
    "parallel": (10, 1, 4),
    "parallel with two norms": (11, 2, 4),
    "norms behind": (14, 2, 4),
    "parallel with norms behind": (12, 1, 4),
    "norms behind alone": (12, 0, 4),
}
"""Activations of [n, h] that a layer keeps in all, of its norms and within its MLP.

By hand, from arXiv 2205.05198, section 4.1, without dropout and attention matrices, at a width of
the MLP of 2 h: of attention its input and output, queries, keys and values (5); of the MLP its
input, and twice (gated: three times) 2 h; and the input of each norm."""

ACTIVE = 2
"""Activations of [n, h] in the result of the MLP's function."""

H, TOKENS = 32, 2 * 16
ACTIVATION = 2 * TOKENS * H
VECTORS = 4 * 5 * TOKENS * (2 * 2 + 4)
"""Bytes of the statistics of norms and attention heads, at most."""
LAST_PRODUCT = 2 * TOKENS * H * 64
"""FLOPs of the MLP's last product."""


def kept_bytes(kind: str, way: Recomputation) -> int:
    """Return the bytes that all layers keep from their forward on."""
    layer, norms, mlp = UNITS[kind]
    of_mlp = mlp if "mlp" in way.parts else ACTIVE * ("mlp_act" in way.parts)
    parts = norms * ("layernorm" in way.parts) + of_mlp
    groups = list(way.groups(range(LAYERS)))
    whole = sum(map(len, groups))
    return ACTIVATION * (len(groups) + (LAYERS - whole) * (layer - parts))


def linear_flops(kind: str) -> int:
    """Return the FLOPs of a layer's products."""
    return 2 * TOKENS * H * (4 * H + (3 if kind == "swiglu" else 2) * 64)


def repeated_flops(kind: str, way: Recomputation, dropout: float = 0.0) -> int:
    """Return the FLOPs of the products of all layers that are computed again.

    The last product of an MLP alone is spared, and that of layers if no norm or dropout follows it.
    """
    spared = 0 if dropout or "behind" in kind else LAST_PRODUCT
    if "mlp" in way.parts:
        return LAYERS * (2 if kind == "swiglu" else 1) * LAST_PRODUCT
    groups = list(way.groups(range(LAYERS)))
    return sum(map(len, groups)) * linear_flops(kind) - len(groups) * spared


def model_of(dropout: float = 0.0, **options: Any) -> ModelSettings:
    return ModelSettings.of(
        num_layers=LAYERS,
        hidden_size=32,
        ffn_hidden_size=64,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=8,
        seq_length=16,
        max_position_embeddings=16,
        vocab_size=50,
        attention_dropout=dropout,
        hidden_dropout=dropout,
        **options,
    )


class Chunk:
    """Layers with random weights, whose gradients of weights may be left for later."""

    def __init__(
        self, model: ModelSettings, recomputation: Recomputation, dtype: torch.dtype, split: bool
    ) -> None:
        kernels = ReferenceKernels()
        site = Site(CPU, dtype, recomputation=recomputation, given_kernels=kernels)
        self.layers = torch.nn.ModuleList(build_layer(model, i, site) for i in range(LAYERS))
        self.recomputation = recomputation
        self.later: list[Callable[[], None]] = []
        torch.manual_seed(1)
        for parameter in self.layers.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
            give_main_grad(parameter, torch.zeros_like(parameter, dtype=torch.float32))
        defer_weight_gradients(self.layers, self.later.append if split else None)
        self.x = torch.randn(
            SAMPLES, model.seq_length, model.hidden_size, dtype=dtype, requires_grad=True
        )

    def forward(self, left_out: list[Again] | None = None) -> Tensor:
        def run(layer: torch.nn.Module, x: Tensor) -> Tensor:
            assert isinstance(layer, TransformerLayer)
            result: Tensor = layer(x, ForwardPass(DropoutSeeds(3, 0, 0, layer.layer_number)))
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recomputation", WAYS, ids=str)
def test_a_forward_keeps_what_papers_count(recomputation: Recomputation, kind: str) -> None:
    """But for statistics of norms and of attention, which are vectors."""
    chunk = Chunk(model_of(**KINDS[kind]), recomputation, torch.bfloat16, split=True)
    with Memory((chunk.x, *chunk.layers.parameters())) as memory:
        edge = get_gradient_edge(chunk.forward())
    found = memory.held + chunk.x.untyped_storage().nbytes()
    assert edge.node is not None  # it holds the graph, not the output
    expected = kept_bytes(kind, recomputation)
    assert expected <= found <= expected + VECTORS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recomputation", [way for way in WAYS if way.group], ids=str)
def test_layers_that_are_computed_ahead_are_as_if_nothing_was_left_out(
    recomputation: Recomputation, kind: str
) -> None:
    """The backward after R repeats nothing."""
    chunk = Chunk(model_of(**KINDS[kind]), recomputation, torch.bfloat16, split=True)
    left_out: list[Again] = []
    with Memory((chunk.x, *chunk.layers.parameters())) as memory:
        y = chunk.forward(left_out)
        with Products() as ahead:  # type: ignore[no-untyped-call]  # TorchDispatchMode has no types
            while left_out:
                left_out.pop(0).compute()
    found = memory.held + chunk.x.untyped_storage().nbytes() - y.untyped_storage().nbytes()
    expected = kept_bytes(kind, Recomputation())
    assert expected <= found <= expected + VECTORS
    assert ahead.flops == repeated_flops(kind, recomputation)
    with Products() as products:  # type: ignore[no-untyped-call]  # TorchDispatchMode has no types
        torch.autograd.backward((y,), (torch.ones_like(y),))
    assert products.flops == LAYERS * linear_flops(kind)


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
@pytest.mark.parametrize("kind", KINDS)
def test_no_product_is_repeated_in_vain(
    kind: str, recomputation: Recomputation, dropout: float, split: bool
) -> None:
    chunk = Chunk(model_of(dropout, **KINDS[kind]), recomputation, torch.float32, split)
    y = chunk.forward()
    with Products() as products:  # type: ignore[no-untyped-call]  # TorchDispatchMode has no types
        torch.autograd.backward((y,), (torch.ones_like(y),))
    backward = LAYERS * linear_flops(kind) * (1 if split else 2)
    assert products.flops == backward + repeated_flops(kind, recomputation, dropout)


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
