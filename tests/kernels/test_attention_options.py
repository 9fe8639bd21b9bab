"""A property of attention is asked for in one place, and kernels that do not name it refuse it."""

from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from megatron.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from megatron.kernels.choose import kernels_for
from megatron.kernels.counted import counted_kernels
from megatron.kernels.cuda.flash import FlashAttention, Version
from megatron.kernels.documents import Documents
from megatron.kernels.reference import kernels as reference
from megatron.kernels.reference.packed_attention import knows_packed
from megatron.kernels.reference.windowed_attention import knows_window
from megatron.kernels.scores import Scores
from megatron.layers.attention_call import AttentionCall
from megatron.layers.ring_attention import ring_attention
from megatron.parallel.context import WHOLE_SEQUENCES

DOCUMENTS: Final = Documents.of(torch.zeros(1, 4, dtype=torch.int64), lambda t: t)
SINKS: Final = torch.zeros(2)


@dataclass(frozen=True)
class FurtherScores(Scores):
    """Scores with a property that no kernel has heard of."""

    further: float = 0.0


FURTHER: Final = AttentionOptions(FurtherScores(further=1.0))


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (PLAIN_ATTENTION, set()),
        (AttentionOptions(Scores(scale=0.5)), set()),
        (AttentionOptions(Scores(window=0)), {"window"}),
        (AttentionOptions(Scores(softcap=2.0, slopes_a=(1.0,))), {"softcap", "slopes_a"}),
        (AttentionOptions(dropout=0.1, documents=DOCUMENTS), {"dropout", "documents"}),
        (AttentionOptions(Scores(window=3), sinks_a=SINKS), {"window", "sinks_a"}),
        (FURTHER, {"further"}),
        (AttentionOptions(FurtherScores()), set()),
    ],
    ids=[
        "plain",
        "scale",
        "window",
        "caps and slopes",
        "dropout and documents",
        "window and sinks",
        "further",
        "further, unset",
    ],
)
def test_a_kernel_is_asked_for_all_that_differs_from_plain_attention(
    options: AttentionOptions, asked: set[str]
) -> None:
    assert options.asked == asked
    assert options.are_plain == (not asked and options.scores.scale is None)


def test_heads_have_their_own_slopes_and_sinks() -> None:
    sinks = torch.arange(4.0)
    whole = AttentionOptions(Scores(slopes_a=(4.0, 3.0, 2.0, 1.0)), 0.1, DOCUMENTS, sinks)
    own = whole.of_heads(1, 2)
    assert own.scores.slopes_a == (3.0, 2.0)
    assert own.sinks_a is not None
    assert own.sinks_a.tolist() == [1.0, 2.0]
    assert (own.dropout, own.documents) == (0.1, DOCUMENTS)
    assert PLAIN_ATTENTION.of_heads(1, 2).are_plain


@pytest.mark.parametrize("version", [2, 3])
def test_no_quick_kernel_takes_a_property_that_it_does_not_name(version: Version) -> None:
    heads = torch.zeros(1, 2, 4, 8, dtype=torch.bfloat16)
    module: Any = type("Module", (), {"flash_attn_func": None, "flash_attn_varlen_func": None})
    assert FlashAttention(version, module).refusal(heads, heads, FURTHER) == "further"
    assert not knows_packed(heads, FURTHER)
    assert not knows_window(heads, heads, FURTHER)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_specification_computes_a_property_that_no_kernel_names(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[AttentionOptions] = []

    def noting(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        given.append(options)
        return torch.empty_like(q)

    monkeypatch.setattr(reference, "scored_attention", noting)
    dtype = torch.bfloat16
    kernels = (
        counted_kernels(dtype) if device == "meta" else kernels_for(torch.device("cpu"), dtype)
    )
    heads = torch.empty(1, 2, 4, 8, dtype=dtype, device=device)
    kernels.causal_attention(heads, heads, heads, options=FURTHER)
    fused = torch.empty(1, 4, 2, 3, 8, dtype=dtype, device=device)
    kernels.causal_self_attention(fused, options=FURTHER)
    assert given == [FURTHER, FURTHER]


def test_a_ring_refuses_a_property_that_it_does_not_name() -> None:
    """Its parts add up by formulas of their own, so no specification takes its place."""
    kernels = kernels_for(torch.device("cpu"), torch.float32)
    one = torch.ones(1, 4, 2, 8)
    call = AttentionCall(kernels, FURTHER)
    with pytest.raises(AssertionError, match="a ring does not compute further"):
        ring_attention(WHOLE_SEQUENCES, (one, one, one), call)
