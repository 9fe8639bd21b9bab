"""Sections of the report of a GPU, in small: attention, and passes as graphs."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from correctness.recorded_graph import RecordedGraph, RecordedSlot
from harness.precisions import precision
from kernels.formulas import explicit_attention, explicit_documents

from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.kernels.scores import Scores
from megatron.run.run_config import RunConfig
from megatron.training import setup
from tools.gpu_sections import attention, graphs, predicted, two_microbatches
from tools.gpu_sections.attention import VARIANTS, Variant, attention_formula
from tools.gpu_sections.predicted import Measured
from tools.gpu_sections.timing import Scale

SMALL = Scale(torch.device("cpu"), small=True)


@pytest.mark.parametrize(
    "own",
    [
        Variant(2, 1, 12, 12, 4),
        Variant(2, 1, 12, 12, 4, Scores(window=3, softcap=2.0)),
        Variant(2, 1, 12, 12, 4, Scores(slopes_a=(0.5, 0.25))),
        Variant(2, 1, 12, 12, 4, Scores(window=2), sinks=True),
        Variant(2, 1, 12, 12, 4, Scores(window=2), document=5, sinks=True),
    ],
    ids=str,
)
def test_the_formula_is_that_of_the_contract(own: Variant) -> None:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn(1, heads, 12, 4, dtype=torch.float64, generator=generator)
        for heads in (2, 1, 1)
    )
    sinks = torch.tensor([0.3, -1.0], dtype=torch.float64) if own.sinks else None
    found = attention_formula(own, q, k, v, sinks)
    if own.document:
        starts = [list(range(0, 12, own.document))]
        expected = explicit_documents(q, k, v, starts=starts, scores=own.scores, sinks=sinks)
    else:
        expected = explicit_attention(q, k, v, scores=own.scores, sinks=sinks)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_the_last_queries_see_what_they_see_among_all() -> None:
    own = Scores(window=3)
    whole, last = Variant(2, 1, 12, 12, 4, own), Variant(2, 1, 4, 12, 4, own)
    device = torch.device("cpu")
    assert torch.equal(last.seen_sz(device), whole.seen_sz(device)[8:])
    assert bool(Variant(2, 1, 6, 12, 4, part=True).seen_sz(device).all())
    assert int(Variant(2, 1, 12, 12, 4, part=True).seen_sz(device).sum()) == 12 * 13 // 2


def test_every_attention_has_its_row_and_rounds_only() -> None:
    found = attention.measure(SMALL)
    assert found.values["failed"] == {}
    assert found.values["not within"] == []
    rows = found.values["rows"]
    assert [row["attention"] for row in rows] == list(VARIANTS)
    for row in rows:
        assert 0 < float(row["largest error"]) < attention.WITHIN
        assert all(math.isfinite(row[name]) for name in ("forward, us", "backward, us", "TFLOP/s"))


def test_an_attention_that_fails_says_why_and_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no such kernel\nand more")

    two = {name: VARIANTS[name] for name in ("causal", "a ring's own keys")}
    monkeypatch.setattr(attention, "VARIANTS", two)
    monkeypatch.setattr(attention, "_part_call", fail)
    found = attention.measure(SMALL)
    assert found.values["failed"] == {"a ring's own keys": "RuntimeError: no such kernel"}
    assert "**Failed: a ring's own keys: RuntimeError: no such kernel" in "\n".join(found.lines)
    monkeypatch.setattr(attention, "_call", fail)
    with pytest.raises(RuntimeError, match="no attention runs"):
        attention.measure(SMALL)


def test_an_attention_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "WITHIN", 1e-9)
    monkeypatch.setattr(attention, "VARIANTS", {"causal": Variant()})
    assert attention.measure(SMALL).values["not within"] == ["causal"]


def test_every_way_to_form_two_gradients_comes_to_the_same_sum() -> None:
    kernels, sums = ReferenceKernels(), []
    for which in range(3):
        torch.manual_seed(3)
        ways, total = two_microbatches.works(SMALL, kernels, 8, 4, 6)
        ways[which]()
        sums.append(total)
    assert sums[0].abs().min() > 0
    for other in sums[1:]:
        torch.testing.assert_close(sums[0], other, rtol=2e-2, atol=2e-2)


def test_two_microbatches_have_a_row_for_every_layer_and_number_of_tokens() -> None:
    rows = two_microbatches.measure(SMALL).values["rows"]
    assert len(rows) == 2 * len(two_microbatches.LAYERS)
    for row in rows:
        assert all(0 < row[name] < math.inf for name in list(row)[2:])


@pytest.mark.parametrize(
    "models",
    [
        pytest.param(["Llama, W apart (zb-h1)", "sinks, windows"], id="two"),
        pytest.param(["further tokens", "8 bits, delayed"], id="what an iteration leaves"),
        pytest.param(list(graphs.MODELS), id="all", marks=pytest.mark.full),
    ],
)
def test_both_ways_of_a_model_come_to_the_same_losses(
    models: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded graph stands in for one of CUDA.

    It does not see what the compiled kernels of a CPU do in bf16, so activations are in fp32; the
    flags say bf16, because 8 bits ask for it.
    """
    usual = predicted.train_some

    def train_wide(scale: Scale, config: RunConfig) -> Measured:
        train = replace(config.train, precision=precision(torch.float32))
        return usual(scale, replace(config, train=train))

    monkeypatch.setattr(graphs, "train_some", train_wide)
    monkeypatch.setattr(setup, "CudaSlot", RecordedSlot)
    monkeypatch.setattr(graphs, "captures", lambda scale: True)
    monkeypatch.setattr(graphs, "MODELS", {name: graphs.MODELS[name] for name in models})
    before = RecordedGraph.replays
    found = graphs.measure(SMALL)
    assert found.values["failed"] == {}
    assert found.values["not within"] == []
    rows = found.values["rows"]
    assert [row["model"] for row in rows] == models
    assert {row["slots"] for row in rows} == {4}  # of the layers, of S and T, of IF and of IB
    assert {row["largest difference of a loss"] for row in rows} == {"0.0e+00"}
    assert RecordedGraph.replays - before >= 2 * len(rows)


def test_a_model_that_allows_no_graphs_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = "--num-experts 2 --moe-router-topk 2 --moe-ffn-hidden-size 32"
    models = {"GPT": "", "experts": f"{experts} --moe-router-load-balancing-type sinkhorn"}
    monkeypatch.setattr(graphs, "MODELS", models)
    found = graphs.measure(SMALL)
    assert found.values["failed"] == {"experts": "ValueError: the model allows no graphs"}
    assert [row["model"] for row in found.values["rows"]] == ["GPT"]
    assert "A CPU captures nothing: both ways are the same." in found.lines


def test_graphs_that_capture_nothing_have_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MODELS", {"GPT": ""})
    monkeypatch.setattr(graphs, "captures", lambda scale: True)
    monkeypatch.setattr(setup, "CudaSlot", None)
    with pytest.raises(RuntimeError, match="no pass was captured"):
        graphs.measure(SMALL)
