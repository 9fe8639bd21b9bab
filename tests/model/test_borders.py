"""The borders of a chunk's layers lie around the layers, whatever recomputation runs them."""

from collections.abc import Callable

import pytest
import torch
from harness.small_models import LLAMA, whole_model
from planning.count.counting import MODEL, plan_of, run_of
from torch import Tensor, nn

from megatron.layers.forward_pass import ForwardPass
from megatron.layers.recompute import Recomputation
from megatron.layers.site import Site
from megatron.model.borders import Borders
from megatron.planning.count.rank import CountedRank, Part
from megatron.planning.count.subject import Subject
from megatron.schedules.lower import lower

META = torch.device("meta")


class Noted(Borders):
    """Notes the borders among the calls of layers."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def begin(self, x_bsh: Tensor, used: object) -> Tensor:
        """See ``Borders``."""
        self.events.append("begin")
        return x_bsh

    def end(self, x_bsh: Tensor) -> Tensor:
        """See ``Borders``."""
        self.events.append("end")
        return x_bsh

    def named(self, name: str) -> Callable[..., None]:
        """Return a hook that notes ``name``."""
        return lambda *_: self.events.append(name)


@pytest.mark.parametrize("group", [0, 1, 2])
def test_borders_lie_around_the_layers_in_the_forward_alone(group: int) -> None:
    noted = Noted()
    model = whole_model(LLAMA, Site(META, torch.float32, recomputation=Recomputation(group=group)))
    model._borders = noted
    for index, layer in enumerate(model.chunks[0].children()):
        layer.register_forward_pre_hook(noted.named(f"layer {index}"))
    assert isinstance(model.final_norm, nn.Module)
    model.final_norm.register_forward_pre_hook(noted.named("norm"))
    x_bsh = torch.empty(1, LLAMA.seq_length, LLAMA.hidden_size, device=META, requires_grad=True)
    y_bsh = model(0, x_bsh, ForwardPass())
    forward = ["begin", "layer 0", "layer 1", "end", "norm"]
    assert noted.events == forward
    y_bsh.backward(torch.empty_like(y_bsh))
    assert set(noted.events[len(forward) :]) <= {"layer 0", "layer 1"}
    assert (len(noted.events) > len(forward)) == (group > 0)


@pytest.mark.parametrize("again", [Recomputation(), Recomputation(group=1)])
def test_a_count_runs_the_recomputation_that_the_run_has(again: Recomputation) -> None:
    run = run_of(MODEL, recomputation=again)
    subject, plan = Subject.of(run, 1), plan_of(run)
    part = Part(subject.placement(plan, [8], 0), again)
    rank = CountedRank(subject, plan, 0, part)
    rank.count(lower(plan))
    assert rank._model.recomputation is again
