"""How documents reach CUDA's kernel for sequences of unequal length; a formula stands in."""

import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernels.formulas import explicit_attention, explicit_documents, first_positions
from torch import Tensor

from megatron.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from megatron.kernels.documents import Documents
from megatron.kernels.reference import kernels as reference
from megatron.kernels.reference import packed_attention as packed
from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.kernels.reference.packed_attention import can_pack, packed_attention
from megatron.kernels.reference.scored_attention import scored_attention
from megatron.kernels.scores import PLAIN, Scores

STARTS = ([0, 1, 4], [0], [0, 6])
SEQ = 7


def varlen_formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What PyTorch documents of ``varlen_attn``, sequence by sequence."""
    assert cu_seq_q.dtype == torch.int32
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert max_q == max_k == cu_seq_q.diff().max()
    assert enable_gqa or query.shape[1] == key.shape[1]
    left, right = window_size
    assert right == 0
    scores = Scores(scale=scale, window=None if left == -1 else left)
    parts = []
    for begin, end in pairwise(cu_seq_q.tolist()):
        heads = (t[None, begin:end].transpose(1, 2) for t in (query, key, value))
        parts.append(explicit_attention(*heads, scores=scores)[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("scores", [PLAIN, Scores(scale=0.3, window=2)], ids=str)
def test_every_document_is_a_sequence(
    scores: Scores, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "_kernel", lambda: varlen_formula)
    q, k, v = (torch.randn(3, heads, SEQ, 8).double() for heads in (4, groups, groups))
    documents = Documents.of(first_positions(STARTS, SEQ), lambda t: t)
    own = packed_attention(q, k, v, AttentionOptions(scores, documents=documents))
    torch.testing.assert_close(own, explicit_documents(q, k, v, starts=STARTS, scores=scores))


def test_bounds_of_documents() -> None:
    documents = Documents.of(first_positions(STARTS, SEQ), lambda t: t)
    assert documents.bounds_k.tolist() == [0, 1, 4, 7, 14, 20, 21]
    assert documents.longest == 7


@pytest.mark.parametrize(("queries", "keys", "whole"), [(7, 7, True), (3, 7, False), (3, 3, False)])
def test_documents_of_a_part_of_the_positions_are_not_packed(
    queries: int, keys: int, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that shares the sequence has the documents of all of it, whose bounds do not fit."""
    monkeypatch.setattr(reference, "can_pack", lambda *_: True)
    packed: list[bool] = []

    def noting(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        packed.append(True)
        return scored_attention(q, k, v, options)

    monkeypatch.setattr(reference, "packed_attention", noting)
    q, k, v = (torch.randn(3, heads, SEQ, 8).double() for heads in (4, 2, 2))
    documents = Documents.of(first_positions(STARTS, SEQ), lambda t: t)
    own = ReferenceKernels().causal_attention(
        q[:, :, keys - queries : keys],
        k[:, :, :keys],
        v[:, :, :keys],
        options=AttentionOptions(documents=documents),
    )
    expected = explicit_documents(q, k, v, starts=STARTS)[:, :, keys - queries : keys]
    torch.testing.assert_close(own, expected)
    assert bool(packed) == whole


def test_nothing_is_packed_on_a_cpu() -> None:
    assert not can_pack(torch.zeros(1, 1, 4, 8, dtype=torch.bfloat16), PLAIN_ATTENTION)


class OnCuda:
    """As much of a tensor on a GPU as is asked."""

    is_cuda, dtype, device = True, torch.bfloat16, "cuda"

    def __init__(self, **different: Any) -> None:
        self.shape = (1, 1, 4, different.pop("channels", 64))
        self.__dict__ |= different


@pytest.mark.parametrize(
    ("query", "scores", "dropout", "expected"),
    [
        (OnCuda(), Scores(scale=2.0, window=3), 0.0, True),
        (OnCuda(dtype=torch.float32), PLAIN, 0.0, False),
        (OnCuda(channels=20), PLAIN, 0.0, False),
        (OnCuda(channels=264), PLAIN, 0.0, False),
        (OnCuda(), PLAIN, 0.1, False),
        (OnCuda(), Scores(softcap=1.0), 0.0, False),
        (OnCuda(), Scores(slopes_a=(1.0,)), 0.0, False),
    ],
    ids=["packed", "fp32", "20 channels", "264 channels", "dropout", "cap", "alibi"],
)
def test_what_the_kernel_does_not_know_is_left_to_others(
    query: Any, scores: Scores, dropout: float, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert can_pack(query, AttentionOptions(scores, dropout)) == expected
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not can_pack(query, AttentionOptions(scores, dropout))


def first_varlen_attn(query: Any, key: Any, value: Any, is_causal: bool = False) -> None:
    """As in PyTorch 2.10, as far as is asked: causal or not, and no more."""


@pytest.mark.parametrize(
    ("module", "known"),
    [
        (None, None),  # before 2.10
        (SimpleNamespace(varlen_attn=first_varlen_attn), None),
        (SimpleNamespace(varlen_attn=varlen_formula), varlen_formula),
    ],
    ids=["no module", "less", "all"],
)
def test_a_pytorch_whose_kernel_knows_less_packs_nothing(
    module: Any, known: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    found = packed._kernel.__wrapped__()
    assert found is known
    monkeypatch.setattr(packed, "_kernel", lambda: found)
    assert can_pack(OnCuda(), PLAIN_ATTENTION) == (known is not None)  # type: ignore[arg-type] # it stands in
