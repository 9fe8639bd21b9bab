"""Attention of the last positions by cuDNN's in two parts; PyTorch's kernel for CPUs stands in."""

from importlib import import_module
from typing import Any

import pytest
import torch
from kernels.cudnn_stand_in import Cudnn
from kernels.formulas import explicit_documents
from kernels.implementations import IMPLEMENTATIONS, Implementation, relative_error
from torch import Tensor

from megatron.kernels.attention_options import AttentionOptions
from megatron.kernels.documents import Documents
from megatron.kernels.reference.partial_attention import Attended, AttentionPart, PartView
from megatron.kernels.scores import PLAIN, Scores

pytest.importorskip("triton")
parts: Any = import_module("megatron.kernels.cuda.attention_parts")
cuda: Any = import_module("megatron.kernels.cuda.kernels")

CPU = torch.device("cpu")
SEQ, SCALE = 9, 0.4


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Cudnn:
    stand_in = Cudnn()
    monkeypatch.setattr(parts, "_aten", stand_in.aten)
    return stand_in


def kernels_with_cudnn(dtype: torch.dtype = torch.bfloat16) -> Any:
    made = cuda.CudaKernels(CPU, dtype)
    made._has_cudnn = True
    return made


def drawn(dtype: torch.dtype, seed: int, channels: int = 8) -> list[Tensor]:
    """Queries [2, 4, 9, d], keys and values [2, 2, 9, d]; tokens lie before heads."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(2, SEQ, heads, channels, generator=generator).to(dtype).transpose(1, 2)
        for heads in (4, 2, 2)
    ]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sunk", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("queries", [SEQ, 7, 2])
def test_output_and_gradients_are_those_of_the_formula(
    queries: int, sunk: bool, seed: int, cudnn: Cudnn
) -> None:
    q, k, v = drawn(torch.float32, seed)
    q = q[:, :, -queries:]
    own = [t.clone().requires_grad_() for t in (q, k, v, *[torch.randn(4)] * sunk)]
    wide = [t.detach().double().requires_grad_() for t in own]
    got = parts.seen_attention(*own[:3], own[3] if sunk else None, SCALE)
    whole = torch.cat((wide[0].new_zeros(2, 4, SEQ - queries, 8), wide[0]), 2)
    want = explicit_documents(
        whole,
        *wide[1:3],
        starts=([0], [0]),
        scores=Scores(SCALE),
        sinks=wide[3] if sunk else None,
    )[:, :, -queries:]
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    grad = torch.randn(got.shape)
    found = torch.autograd.grad(got, own, grad)
    for one, other in zip(found, torch.autograd.grad(want, wide, grad.double()), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
    sizes = [(queries, True)] + [(SEQ - queries, False)] * (queries < SEQ)
    assert cudnn.calls == [(way, *size) for way in ("forward", "backward") for size in sizes]


def test_gradients_of_keys_lie_as_keys_do(cudnn: Cudnn) -> None:
    """A slice's keys lie with tokens before heads, and so does the sum of their gradients."""
    q, k, v = (t.requires_grad_() for t in drawn(torch.bfloat16, 0))
    out = parts.seen_attention(q[:, :, 4:], k, v, None, SCALE)
    assert out.transpose(1, 2).is_contiguous()
    gradients = torch.autograd.grad(out.sum(), (k, v))
    assert all(each.transpose(1, 2).is_contiguous() for each in gradients)


@pytest.mark.parametrize(
    ("case", "calls"),
    [
        ("fewer queries", [("forward", 5, True), ("forward", 4, False)]),
        ("as many queries", []),
        ("dropout", []),
        ("a window", []),
        ("heads of 136 channels", []),
        ("a single own key", []),
        ("documents", []),
        ("sinks", [("forward", 9, True)]),
        ("sinks and a window", []),
    ],
)
def test_what_goes_to_cudnn(case: str, calls: list[tuple[str, int, bool]], cudnn: Cudnn) -> None:
    tried = kernels_with_cudnn()
    q, k, v = drawn(torch.bfloat16, 0, 136 if "136" in case else 8)
    first = {"fewer queries": 4, "heads of 136 channels": 4, "a single own key": 8}.get(case, 0)
    tried._attends_partly = lambda *_: True
    tried._attends_in_window = lambda q, k, options: options.scores.are_products
    documents = None
    if case == "documents":
        documents = Documents.of(torch.zeros(2, SEQ, dtype=torch.int64), lambda t: t)
    options = AttentionOptions(
        Scores(window=3) if "window" in case else PLAIN,
        0.1 if case == "dropout" else 0.0,
        documents,
        torch.zeros(4) if "sinks" in case else None,
    )
    tried.causal_attention(q[:, :, first:], k, v, options=options)
    assert cudnn.calls == calls


def test_parts_of_a_ring_go_to_cudnn_but_for_those_with_a_view(cudnn: Cudnn) -> None:
    tried = kernels_with_cudnn()
    q, k, v = drawn(torch.bfloat16, 0)
    plain = AttentionPart(q, k, v, False, SCALE)
    whole = tried.attend_to_part(plain)
    tried.gradients_of_part(plain, whole, torch.ones_like(whole.out_basd))
    assert cudnn.calls == [("forward", SEQ, False), ("backward", SEQ, False)]
    seen = plain._replace(view=PartView(0, 0, Scores(window=2)))
    tried.gradients_of_part(seen, tried.attend_to_part(seen), torch.ones_like(whole.out_basd))
    assert len(cudnn.calls) == 2


@pytest.mark.parametrize("later", [False, True], ids=["dense", "a part of a tensor"])
def test_queries_of_a_ring_may_have_gaps(later: bool, cudnn: Cudnn) -> None:
    """A rank's late queries are a view, and so are their outputs, logarithms and gradients."""
    q, k, v = drawn(torch.bfloat16, 0)
    part = AttentionPart(q, k, v, False, SCALE)
    whole = parts.attend(part)
    cut = slice(4 if later else 0, SEQ)
    own = part._replace(q_basd=q[:, :, cut])
    of_own = Attended(*(t[:, :, cut] for t in whole))
    got = parts.gradients(own, of_own, torch.ones_like(whole.out_basd)[:, :, cut])
    want = cuda.ReferenceKernels().gradients_of_part(
        own, of_own, torch.ones_like(whole.out_basd)[:, :, cut]
    )
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("cut", [slice(0, None), slice(3, None)], ids=["all", "late queries"])
def test_joined_parts_are_weighed_by_their_sums(kernels: Implementation, cut: slice) -> None:
    """The whole is a statistic, and perhaps a view. One query sees no key in the second part."""

    def draw(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).to(kernels.device, dtype)

    shape, wide = (2, 5, 3, 12), kernels.statistics
    out = draw(*shape, dtype=wide, seed=0).transpose(1, 2)
    log = draw(2, 3, 5, dtype=wide, seed=1)
    queries = out[:, :, cut].shape[2]
    part = draw(2, 3, queries, 12, dtype=kernels.dtype, seed=2)
    part_log = draw(2, 3, queries, dtype=wide, seed=3)
    part_log[0, 1, -1] = -torch.inf
    weights = torch.stack((log[:, :, cut], part_log)).double().softmax(0).unsqueeze(-1)
    want = weights[0] * out[:, :, cut].double() + weights[1] * part.double()
    want_log = torch.logaddexp(log[:, :, cut].double(), part_log.double())
    untouched = out[:, :, : cut.start].clone()
    whole = Attended(out[:, :, cut], log[:, :, cut])
    kernels.kernels.join_parts_(whole, Attended(part, part_log))
    torch.testing.assert_close(whole.out_basd.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(whole.log_bas.double(), want_log, rtol=1e-5, atol=1e-6)
    assert torch.equal(out[:, :, : cut.start], untouched)


@pytest.mark.parametrize(
    ("major", "cudnn_version", "found"),
    [
        (8, 91900, False),
        (9, 91900, True),
        (10, 91900, True),
        (12, 91900, False),
        (9, 91500, False),
        (9, None, False),
    ],
)
def test_cudnn_is_taken_where_it_is_the_fastest(
    major: int, cudnn_version: int | None, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn_version)
    assert parts.takes_cudnn(torch.device("cuda", 0)) == found
    assert not parts.takes_cudnn(CPU)
    with monkeypatch.context() as amd:
        amd.setattr(torch.version, "hip", "7.0")
        assert not parts.takes_cudnn(torch.device("cuda", 0))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not parts.takes_cudnn(torch.device("cuda", 0)), "PyTorch would not take cuDNN"


@pytest.mark.skipif(
    not torch.cuda.is_available() or not parts.takes_cudnn(torch.device("cuda")),
    reason="needs a GPU on which cuDNN's attention is taken",
)
@pytest.mark.parametrize("sunk", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("queries", [192, 130])
def test_cudnn_itself_attends_to_parts(queries: int, sunk: bool) -> None:
    """Its log-sum-exp is what the formulas take it for, and so is the one that it is given."""
    drawn_on = torch.Generator().manual_seed(0)
    shapes = [(2, queries, 4, 64), (2, 320, 2, 64), (2, 320, 2, 64)]
    given = [
        torch.randn(shape, generator=drawn_on).bfloat16().cuda().transpose(1, 2).requires_grad_()
        for shape in shapes
    ]
    given += [torch.randn(4, generator=drawn_on).bfloat16().cuda().requires_grad_()] * sunk
    wide = [t.detach().cpu().double().requires_grad_() for t in given]
    got = parts.seen_attention(*given[:3], given[3] if sunk else None, SCALE)
    before = wide[0].new_zeros(2, 4, 320 - queries, 64)
    want = explicit_documents(
        torch.cat((before, wide[0]), 2),
        *wide[1:3],
        starts=([0], [0]),
        scores=Scores(SCALE),
        sinks=wide[3] if sunk else None,
    )[:, :, -queries:]
    grad = torch.randn(got.shape, generator=drawn_on).bfloat16()
    found = [got, *torch.autograd.grad(got, given, grad.cuda())]
    expected = [want, *torch.autograd.grad(want, wide, grad.double())]
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one.cpu(), other) < 2e-2
