"""What ranks that share a sequence compute, keep and wait for."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.model.build_layer import build_layer
from megatron.model.config import ModelConfig
from megatron.model.init import init_layer
from megatron.model.layer_spec import layer_spec
from megatron.parallel.context import ContextParallel, own_positions
from megatron.parallel.groups import ConnectedAxis
from megatron.simulator.costs.activation_bytes import layer_activation_bytes
from megatron.simulator.costs.device import FUSED, NOTIONAL
from megatron.simulator.costs.from_model import ModelTimes
from megatron.simulator.costs.machines import Machines
from megatron.simulator.costs.recomputed import Recomputed
from megatron.simulator.costs.replicas import Link
from megatron.simulator.costs.shape import ACTIVATION_BYTES, Shape, iteration_flops
from megatron.training.planning.model_shape import shape_of

CPU = torch.device("cpu")
WHOLE = Shape(64, 4, 32, 100, micro_batch_size=3, key_value_width=32)


@pytest.mark.parametrize("recomputed", [Recomputed(), Recomputed(core=True), Recomputed(group=1)])
@given(c=st.sampled_from([1, 2, 4, 8]), layers=st.integers(1, 4))
def test_ranks_share_the_work_of_a_sequence(recomputed: Recomputed, c: int, layers: int) -> None:
    whole = replace(WHOLE, recomputed=recomputed, windows=(None, 5, None, 9))
    own = replace(whole, context=c)
    for flops in ("forward_flops", "backward_flops", "weight_gradient_flops", "logits"):
        assert c * getattr(own, flops) == getattr(whole, flops)
    assert c * own.stage_repeated_flops(layers) == whole.stage_repeated_flops(layers)
    assert iteration_flops(own, layers, 5) == iteration_flops(whole, layers, 5)
    assert own.layer_parameters == whole.layer_parameters


@pytest.mark.parametrize("c", [2, 4])
def test_passes_wait_for_keys_and_values_and_for_their_gradients(c: int) -> None:
    free, network = ModelTimes(replace(WHOLE, context=c), NOTIONAL, FUSED), Link(5.0, 2.0)
    device = replace(NOTIONAL, link_bandwidth=3.0, link_latency=1.0)
    near = replace(free, device=device)
    apart = replace(near, machines=Machines(network, context=True))
    own = WHOLE.micro_batch_size * WHOLE.seq_length // c * 32 * ACTIVATION_BYTES
    for times, link in ((near, Link(3.0, 1.0)), (apart, network)):
        waiting = (c - 1) * (link.latency + own / link.bandwidth)
        for kind in ("F", "B"):
            assert times.layer()[kind] - free.layer()[kind] == pytest.approx(waiting)
        assert times.layer()["W"] == free.layer()["W"]
        again = replace(times, shape=replace(times.shape, recomputed=Recomputed(core=True)))
        alike = replace(free, shape=again.shape)
        assert again.layer()["B"] - alike.layer()["B"] == pytest.approx(2 * waiting)
    assert NOTIONAL.link_bandwidth == inf


class Echo(ContextParallel):
    """Ranks that all have the tokens of this one."""

    def gather(self, x_xbu: Tensor) -> Tensor:
        return torch.cat([x_xbu] * self.size, dim=2)


def kept_bytes(model: ModelConfig, c: int) -> int:
    """Bytes of the activations (not of vectors) that a layer keeps, by PyTorch's own account."""
    rank = min(1, c - 1)  # of several the second: none of its chunks is the begin of a sequence
    context, kernels = Echo(ConnectedAxis("context", rank, tuple(range(c)))), ReferenceKernels()
    layer = build_layer(model, 0, CPU, torch.bfloat16, kernels, context=context)
    init_layer(layer, 0, model, seed=0)
    rotation = layer_spec(model, 0).rotation
    rope = None if rotation is None else rotation.build(CPU, torch.bfloat16, kernels)
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        is_activation = tensor.dtype == torch.bfloat16 and tensor.dim() > 1
        if is_activation and storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    positions = own_positions(model.seq_length, rank, c)[None]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        x = torch.randn(1, model.seq_length // c, 24, dtype=torch.bfloat16, requires_grad=True)
        y = layer(x, None if rope is None else rope.at(positions))
    assert y.isfinite().all()
    return sum(kept.values())


@pytest.mark.parametrize(
    "options",
    [
        {"num_query_groups": 4},  # of fewer, queries without a rotation are copied
        {"position_embedding_type": "rope"},
        {"position_embedding_type": "rope", "qk_layernorm": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("c", [2, 4])
def test_a_layer_keeps_the_keys_and_values_of_all(c: int, options: dict[str, Any]) -> None:
    """Of the outputs of two chunks the reference's attention keeps none; flash attention does."""
    model = replace(ModelConfig(2, 24, 40, 4, 2, 10, 8, 64, 30, hidden_dropout=0.0), **options)
    shared = replace(model, seq_length=8 * c)
    outputs = ACTIVATION_BYTES * 8 * 4 * 10
    counted = layer_activation_bytes(replace(shape_of(shared, 1), context=c)) - outputs
    more = counted - layer_activation_bytes(shape_of(model, 1))
    assert kept_bytes(shared, c) - kept_bytes(model, 1) == more
