"""Models of checkpoints: today's form, and the form of versions before November 2026."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from megatron.checkpoint.saved_model import differences, read_model, renewed, stored
from megatron.run.command_line import parse

RUN: Final = (
    "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --device cpu --vocab-size 63"
)
EARLIER: Final[list[dict[str, Any]]] = json.loads(
    Path(__file__).with_name("models_before_nodes.json").read_text()
)
"""Models as commit 7dec4a2a wrote them into checkpoints, each with the flags of its run."""


@pytest.mark.parametrize("earlier", EARLIER, ids=lambda earlier: earlier["kind"])
def test_an_earlier_checkpoint_has_the_model_of_its_flags(earlier: dict[str, Any]) -> None:
    model = parse([*RUN.split(), *earlier["flags"].split()], 1, speak=False).model
    assert read_model(earlier["model"]) == model
    assert differences(earlier["model"], model) == []


@pytest.mark.parametrize("earlier", EARLIER, ids=lambda earlier: earlier["kind"])
def test_a_model_is_stored_as_plain_data_and_read_again(earlier: dict[str, Any]) -> None:
    model = parse([*RUN.split(), *earlier["flags"].split()], 1, speak=False).model
    assert read_model(json.loads(json.dumps(stored(model)))) == model


def test_values_that_are_missing_do_not_count() -> None:
    """A run compares what the checkpoint has; it does not fill it up with defaults."""
    for earlier in EARLIER:
        assert renewed({"num_layers": 3}) == {"num_layers": 3}
        known = {name: earlier["model"][name] for name in ("num_layers", "hidden_size")}
        assert renewed(known) == known
    model = parse([*RUN.split(), *EARLIER[0]["flags"].split()], 1, speak=False).model
    assert differences({"num_layers": 3}, model) == ["--num-layers 3 there, --num-layers 2 here"]
    assert differences({"swiglu": True}, model) == ["--swiglu there, no --swiglu here"]
    assert differences({"swiglu": False, "geglu": False}, model) == []
