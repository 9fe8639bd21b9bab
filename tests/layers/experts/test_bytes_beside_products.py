"""What a GPU moves for a mixture beside its products, against the least that this can be.

The least: every step that no product can do reads its inputs once and writes its results once. The
steps are the copies into slots, the activation times its weight, and the sums of slots; and in the
backward their adjoints, and the copies of the layer's input that the weight gradient needs again,
since tokens are kept and not slots. Router and sort are left out of the least, and are counted.
"""

from collections.abc import Callable

import pytest
import torch
from harness.mixtures import mixture

from megatron.kernels.counted import counted_kernels
from megatron.layers.main_grad import give_main_grad
from megatron.layers.site import Site
from megatron.layers.weight_gradients import defer_weight_gradients
from megatron.planning.count.recorder import META, Recorder
from megatron.simulator.costs.count import Launch

Work = Callable[[], None]

TOKENS = 4096
BF16 = 2

SHAPES = {"Mixtral 8x7B": (4096, 14336, 8, 2), "Qwen3 30B-A3B": (2048, 768, 128, 8)}
"""Hidden size, width of an expert, experts, and experts of a token."""


def launches(name: str, *, splits: bool) -> list[Launch]:
    """Of a forward and a backward whose weight gradients, if it ``splits``, come last."""
    hidden, width, experts, topk = SHAPES[name]
    site = Site(META, torch.bfloat16, given_kernels=counted_kernels(torch.bfloat16))
    settings = mixture(experts, topk, moe_router_dtype="fp32", moe_ffn_hidden_size=width)
    layer, work = settings.layer(hidden, site), list[Work]()
    for parameter in layer.parameters():
        give_main_grad(parameter, torch.empty(parameter.shape, device=META))
    defer_weight_gradients(layer, work.append if splits else None)
    recorder = Recorder()
    with recorder:
        x_buh = torch.empty(1, TOKENS, hidden, dtype=torch.bfloat16, device=META).requires_grad_()
        with recorder.recording() as works:
            y_buh = layer(x_buh)
            torch.autograd.backward((y_buh,), (torch.empty_like(y_buh),))
            for each in work:
                each()
    return [launch for each in works for launch in each.launches]


def least_bytes(name: str, *, splits: bool) -> int:
    """With a split backward, W also copies the gradient of the output into slots again."""
    hidden, width, _, topk = SHAPES[name]
    slots = topk * TOKENS
    copies = 6 if splits else 5
    return BF16 * (copies * (TOKENS + slots) * hidden + 3 * slots * width + 5 * slots * width)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("splits", [False, True], ids=["whole", "split"])
def test_bytes_beside_products_are_few(name: str, splits: bool) -> None:
    found = launches(name, splits=splits)
    beside = sum(launch.bytes for launch in found if not launch.flops)
    assert 1 < beside / least_bytes(name, splits=splits) < 1.15


@pytest.mark.parametrize("splits", [False, True], ids=["whole", "split"])
def test_each_step_beside_the_products_is_one_launch(splits: bool) -> None:
    """Sorting takes three; weights of choices are read where the activation is multiplied."""
    found = [each.name for each in launches("Qwen3 30B-A3B", splits=splits) if not each.flops]
    first = found.index("count_choices")
    sort = ["count_choices", "cumsum", "place_choices"]
    steps = ["spread", "weighted", "join", "spread", "weighted_backward", "join"]
    assert found[first : first + 9] == sort + steps
    assert found.count("spread") == (4 if splits else 3)


def test_gradients_of_weights_are_added_in_their_products() -> None:
    """An addition of its own would move 10 bytes for each of the experts' weights."""
    found = launches("Mixtral 8x7B", splits=False)
    assert sum(launch.name == "add_grouped_weight_product_" for launch in found) == 2
    hidden, width, experts, _ = SHAPES["Mixtral 8x7B"]
    weights = experts * hidden * width
    assert max(launch.bytes for launch in found if not launch.flops) < 10 * weights
