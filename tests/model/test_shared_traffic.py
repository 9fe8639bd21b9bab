"""What tensor-parallel ranks send for a layer and a microbatch, counted."""

from collections import Counter

import pytest
import torch
from model.shared_stage import BATCH, GPT, MIDDLE, build
from parallel.tensor_axis import without_groups
from torch import Tensor

from megatron.layers.dropout import DropoutSeeds
from megatron.layers.forward_pass import ForwardPass
from megatron.layers.main_grad import give_main_grad
from megatron.layers.weight_gradients import defer_weight_gradients
from megatron.parallel import collectives
from megatron.parallel.groups import ConnectedAxis

CONFIG = GPT.replaced(hidden_dropout=0.1, attention_dropout=0.1)
WHOLE_BYTES = BATCH * CONFIG.seq_length * CONFIG.hidden_size * 4
"""Of one activation of all tokens in fp32."""

Sent = Counter[tuple[str, int]]
"""Number of collectives by name and bytes of the whole activation."""


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Counts the collectives of strategies, of which each rank has the same numbers."""
    counted: Sent = Counter()

    def note(name: str, whole: Tensor) -> Tensor:
        counted[name, whole.numel() * whole.element_size()] += 1
        return whole

    def gather(x: Tensor, axis: ConnectedAxis) -> Tensor:
        return note("all-gather", torch.stack([x] * axis.size))

    monkeypatch.setattr(collectives, "all_gather", gather)
    monkeypatch.setattr(collectives, "all_reduce", lambda x, op, axis: note("all-reduce", x))
    monkeypatch.setattr(collectives, "reduce_scatter", lambda x, axis: note("reduce-scatter", x))
    return counted


def count(sent: Sent, **collectives_of_whole: int) -> None:
    """Check what was sent since the last check."""
    expected = {
        (name.replace("_", "-"), WHOLE_BYTES): number
        for name, number in collectives_of_whole.items()
    }
    assert dict(sent) == expected
    sent.clear()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("split_tokens", [False, True])
def test_two_pairs_forward_and_two_backward(
    size: int, split_tokens: bool, split_backward: bool, sent: Sent
) -> None:
    """An all-gather and a reduce-scatter together send as much as one all-reduce.

    With sequence parallelism what was not kept is gathered again for the weight gradients: the
    inputs of the two column-parallel layers, and in W also the gradients of the row-parallel ones.
    """
    tensor = without_groups(1, size, split_tokens=split_tokens)
    model = build(CONFIG, MIDDLE, torch.float32, tensor)
    for parameter in model.parameters():
        give_main_grad(parameter, torch.zeros_like(parameter))
    work: list[object] = []
    defer_weight_gradients(model, work.append if split_backward else None)
    shape = (BATCH, CONFIG.seq_length // tensor.sequence_parts, CONFIG.hidden_size)
    y = model(0, torch.randn(shape, requires_grad=True), ForwardPass(DropoutSeeds(1, 0, 0)))
    count(sent, **({"all_gather": 2, "reduce_scatter": 2} if split_tokens else {"all_reduce": 2}))
    y.backward(torch.randn_like(y))
    if not split_tokens:
        count(sent, all_reduce=2)
    else:
        count(sent, all_gather=2 if split_backward else 4, reduce_scatter=2)
    for product in work:
        assert callable(product)
        product()
    count(sent, **({"all_gather": 4} if split_tokens and split_backward else {}))
