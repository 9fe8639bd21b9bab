"""Attention of slices, one after the other, is attention of whole samples."""

from importlib import import_module
from typing import Any

import pytest
import torch
from harness.marks import full
from kernels.cudnn_stand_in import Cudnn
from kernels.formulas import explicit_documents, first_positions
from kernels.implementations import CPU, of_a_gpu, relative_error
from torch import Tensor

from megatron.kernels.attention_options import AttentionOptions
from megatron.kernels.choose import kernels_for
from megatron.kernels.documents import Documents
from megatron.kernels.face import Kernels
from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.kernels.scores import PLAIN, Scores
from megatron.layers.attention_call import AttentionCall
from megatron.layers.slices import SeenKeys, SequenceSlice, SlicedPass

B, S, HEADS, GROUPS, D = 2, 24, 4, 2, 8
STARTS = ([0, 1, 7, 20], [0, 13])
ALL_SCORES = Scores(0.7, 1.5, 6, (0.5, 0.25, 0.125, 0.0625))


def operands(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys, values, the gradient of the output and sinks."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(B, S, heads, D) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
    drawn = (torch.randn(s, generator=generator, dtype=torch.float64) for s in (*shapes, (HEADS,)))
    return [t.to(dtype) for t in drawn]


def slice_by_slice(
    lengths: tuple[int, ...],
    kernels: Kernels,
    scores: Scores,
    documents: Documents | None,
    *,
    with_sinks: bool,
    again: bool = False,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """Output, and gradients of queries, keys, values and sinks, in the order of real passes.

    With ``again``, every forward is repeated before its backward, as recomputation does.
    """
    q, k, v, grad, sinks = operands(dtype)
    seen, parts = SeenKeys(), SequenceSlice.of_lengths(lengths)
    own = [[t[:, p.first : p.end].clone().requires_grad_() for t in (q, k, v)] for p in parts]
    sinks.requires_grad_(with_sinks)

    def run(number: int) -> Tensor:
        call = AttentionCall(
            kernels,
            AttentionOptions(scores, documents=documents, sinks_a=sinks if with_sinks else None),
            sliced=SlicedPass(parts[number], seen),
            layer=3,
        )
        q_buad, k_bugd, v_bugd = own[number]
        return call.of_all_tokens((q_buad, k_bugd, v_bugd))

    outputs = [run(number) for number in range(len(parts))]
    for number in reversed(range(len(parts))):
        output = run(number) if again else outputs[number]
        output.backward(grad[:, parts[number].first : parts[number].end])
    gradients = [torch.cat([t[i].grad for t in own], 1) for i in range(3)]  # type: ignore[misc]
    found = [torch.cat([output.detach() for output in outputs], 1), *gradients]
    return [*found, sinks.grad] if sinks.grad is not None else found


def written_out(scores: Scores, starts: tuple[list[int], ...], *, with_sinks: bool) -> list[Tensor]:
    """The same of whole samples, by the formulas of the tests."""
    q, k, v, grad, sinks = operands()
    own = [t.transpose(1, 2).requires_grad_() for t in (q, k, v)]
    sinks.requires_grad_()
    made = explicit_documents(
        *own, starts=starts, scores=scores, sinks=sinks if with_sinks else None
    )
    made.backward(grad.transpose(1, 2))
    found = [made.detach(), *(t.grad for t in own if t.grad is not None)]
    whole = [t.transpose(1, 2) for t in found]
    return [*whole, sinks.grad] if sinks.grad is not None else whole


@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("apart", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("scores", [PLAIN, ALL_SCORES, Scores(window=3)])
@pytest.mark.parametrize("lengths", [(12, 12), (3, 9, 12), full((3,) * 8)], ids=str)
@pytest.mark.parametrize("reference", [True, False], ids=["reference", "cpu"])
def test_slices_together_are_whole_samples(
    reference: bool,
    lengths: tuple[int, ...],
    scores: Scores,
    apart: bool,
    with_sinks: bool,
    again: bool,
) -> None:
    kernels = ReferenceKernels() if reference else kernels_for(CPU, torch.float64)
    documents = Documents.of(first_positions(STARTS, S), lambda t: t) if apart else None
    found = slice_by_slice(lengths, kernels, scores, documents, with_sinks=with_sinks, again=again)
    starts = STARTS if apart else ([0], [0])
    expected = written_out(scores, starts, with_sinks=with_sinks)
    for mine, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("lengths", [(12, 12), (4, 8, 12)], ids=str)
def test_slices_by_cudnn_are_whole_samples(
    lengths: tuple[int, ...], with_sinks: bool, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice's keys are views of a buffer; a stand-in takes the place of cuDNN."""
    pytest.importorskip("triton")
    parts = import_module("megatron.kernels.cuda.attention_parts")
    cudnn = Cudnn()
    monkeypatch.setattr(parts, "_aten", cudnn.aten)
    kernels: Any = of_a_gpu(CPU, torch.bfloat16)
    kernels._has_cudnn, kernels._attends_partly = True, lambda _: True
    kernels._attends_in_window = lambda *_: True
    dtype = torch.bfloat16
    found = slice_by_slice(
        lengths, kernels, PLAIN, None, with_sinks=with_sinks, again=again, dtype=dtype
    )
    expected = written_out(PLAIN, ([0], [0]), with_sinks=with_sinks)
    for mine, whole in zip(found, expected, strict=True):
        assert relative_error(mine, whole) < 2e-2
    backward = [keys for way, keys, is_causal in cudnn.calls if way == "backward" and not is_causal]
    ends = SequenceSlice.of_lengths(lengths)
    assert backward == [part.first for part in reversed(ends) if part.first]


def test_attention_in_a_window_is_given_no_key_before_it() -> None:
    """And no slice reads the keys of a later one, which are not there yet."""
    given = []

    class Watched(ReferenceKernels):
        def causal_attention(self, q_basd: Tensor, k_bgsd: Tensor, *args, **kwargs) -> Tensor:  # type: ignore[no-untyped-def]
            given.append((q_basd.shape[2], k_bgsd.shape[2]))
            return super().causal_attention(q_basd, k_bgsd, *args, **kwargs)

    for window, expected in (3, [(8, 8), (8, 11), (8, 11)]), (None, [(8, 8), (8, 16), (8, 24)]):
        given.clear()
        slice_by_slice((8, 8, 8), Watched(), Scores(window=window), None, with_sinks=False)
        assert given == expected


def test_slices_follow_one_another() -> None:
    parts = SequenceSlice.of_lengths((2, 6))
    assert parts == (SequenceSlice(0, 2, 8), SequenceSlice(2, 8, 8))
    assert [part.share(4) for part in parts] == [1, 3]
