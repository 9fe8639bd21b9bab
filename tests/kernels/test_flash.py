"""Attention by flash-attn: the calls that it gets, with functions of its published signatures.

The signatures are those of flash-attn 2.7 and 3 (``flash_attn/flash_attn_interface.py`` and
``hopper/flash_attn_interface.py`` of its repository). In their place here are formulas.
"""

import itertools
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernels.formulas import explicit_attention
from torch import Tensor

from megatron.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from megatron.kernels.documents import Documents
from megatron.kernels.scores import PLAIN, Scores

kernels: Any = import_module("megatron.kernels.cuda.kernels")
flash: Any = import_module("megatron.kernels.cuda.flash")

CPU = torch.device("cpu")


def attention(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> Tensor:
    """[b, s, heads, d], as the package has it, by the formula.

    Its documentation aligns the mask "to the bottom right corner": the last query is at the last
    key, and window and slopes go by these positions too.
    """
    left, right = given["window_size"]
    assert given["causal"]
    assert right in (-1, 0), "a causal window has no right side"
    slopes = given.get("alibi_slopes")
    scores = Scores(
        given["softmax_scale"],
        given["softcap"],
        None if left < 0 else left,
        () if slopes is None else tuple(slopes.tolist()),
    )
    queries, earlier = q.shape[1], k.shape[1] - q.shape[1]
    whole = torch.cat((q.new_zeros(len(q), earlier, *q.shape[2:]), q), 1)
    heads = (t.double().transpose(1, 2) for t in (whole, k, v))
    return explicit_attention(*heads, scores=scores).transpose(1, 2)[:, -queries:].to(q.dtype)


def packed(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, given: dict[str, Any]) -> Tensor:
    """[n, heads, d], one document after the other."""
    assert bounds.dtype == torch.int32
    ends = bounds.tolist()
    parts = [
        attention(q[None, begin:end], k[None, begin:end], v[None, begin:end], given)[0]
        for begin, end in itertools.pairwise(ends)
    ]
    return torch.cat(parts)


class Version2:
    """The functions of version 2; what they were given is in ``given``."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []

    def flash_attn_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> Tensor:
        self.given.append(dict(locals()))
        assert alibi_slopes is None or alibi_slopes.dtype == torch.float32
        return attention(q, k, v, self.given[-1])

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        self.given.append(dict(locals()))
        assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_k.diff().max())
        return packed(q, k, v, cu_seqlens_q, self.given[-1])


class Version3:
    """The functions of version 3, which returned statistics beside the output at first."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []

    def flash_attn_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        qv: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        sm_margin: int = 0,
        return_attn_probs: bool = False,
    ) -> tuple[Tensor, Tensor]:
        self.given.append(dict(locals()))
        return attention(q, k, v, self.given[-1]), torch.empty(0)

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        qv: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        sm_margin: int = 0,
        return_attn_probs: bool = False,
    ) -> Tensor:
        self.given.append(dict(locals()))
        return packed(q, k, v, cu_seqlens_q, self.given[-1])


def drawn(dtype: torch.dtype = torch.bfloat16, channels: int = 8) -> list[Tensor]:
    """Queries [2, 4, 9, d], keys and values [2, 2, 9, d]."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, 9, heads, channels, generator=generator).to(dtype).transpose(1, 2)
        for heads in (4, 2, 2)
    ]


SLOPES = (0.5, 0.2, 0.1, 0.02)
SCORES = [PLAIN, Scores(scale=0.7), Scores(softcap=1.5), Scores(window=0), Scores(window=3)]


def attend(version: int, stub: Any, scores: Scores, documents: Documents | None = None) -> Tensor:
    found: Tensor = flash.FlashAttention(version, stub).attend(
        *drawn(), AttentionOptions(scores, documents=documents)
    )
    return found


@pytest.mark.parametrize("stub", [Version2(), Version3()], ids=["2", "3"])
@pytest.mark.parametrize("scores", SCORES, ids=str)
def test_it_is_given_what_the_scores_are(stub: Any, scores: Scores) -> None:
    version = 2 if isinstance(stub, Version2) else 3
    expected = explicit_attention(*(t.double() for t in drawn()), scores=scores)
    got = attend(version, stub, scores)
    torch.testing.assert_close(got.double(), expected, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("stub", [Version2(), Version3()], ids=["2", "3"])
@pytest.mark.parametrize("scores", SCORES, ids=str)
@pytest.mark.parametrize("queries", [1, 4])
def test_queries_of_the_last_positions(stub: Any, scores: Scores, queries: int) -> None:
    """As a rank has them that shares the sequence: it is told of no mask, and of no offset."""
    q, k, v = drawn()
    expected = explicit_attention(*(t.double() for t in (q, k, v)), scores=scores)
    tried = flash.FlashAttention(2 if isinstance(stub, Version2) else 3, stub)
    assert tried.refusal(q[:, :, -queries:], k, AttentionOptions(scores)) is None
    got = tried.attend(q[:, :, -queries:], k, v, AttentionOptions(scores))
    assert stub.given[-1]["causal"]
    assert [len(stub.given[-1][name][0]) for name in "qkv"] == [queries, 9, 9]
    expected = expected[:, :, -queries:]
    torch.testing.assert_close(got.double(), expected, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize(("queries", "keys"), [(4, 9), (4, 4)])
def test_documents_of_which_ranks_share_the_positions_go_to_pytorch(
    queries: int, keys: int
) -> None:
    """A chunk may be as long as what it sees, and its documents are those of whole samples."""
    documents = Documents.of(torch.tensor([[0, 0, 0, 3, 3, 3, 3, 3, 8], [0] * 9]), lambda t: t)
    q, k, _ = drawn()
    q, k = q[:, :, keys - queries : keys], k[:, :, :keys]
    refusal = flash.FlashAttention(2, Version2()).refusal(
        q, k, AttentionOptions(documents=documents)
    )
    assert refusal == "documents of which ranks share the positions"
    assert not documents.are_of(q, k)


def test_version_2_has_the_slopes_of_alibi() -> None:
    scores = Scores(0.7, 1.5, 4, SLOPES)
    expected = explicit_attention(*(t.double() for t in drawn()), scores=scores)
    got = attend(2, Version2(), scores)
    torch.testing.assert_close(got.double(), expected, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("stub", [Version2(), Version3()], ids=["2", "3"])
def test_documents_are_sequences_of_their_own(stub: Any) -> None:
    first_bs = torch.tensor([[0, 0, 0, 3, 3, 3, 3, 3, 8], [0] * 9])
    documents = Documents.of(first_bs, lambda t: t)
    got = attend(2 if isinstance(stub, Version2) else 3, stub, PLAIN, documents)
    q, k, v = (t.double() for t in drawn())
    for sample, begin, end in ((0, 0, 3), (0, 3, 8), (0, 8, 9), (1, 0, 9)):
        own = (t[sample : sample + 1, :, begin:end] for t in (q, k, v))
        torch.testing.assert_close(
            got[sample : sample + 1, :, begin:end].double(),
            explicit_attention(*own),
            rtol=2**-7,
            atol=1e-2,
        )


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("stub", [Version2(), Version3()], ids=["2", "3"])
def test_gradients_are_summed_in_one_order_if_pytorch_is_asked_for_it(
    stub: Any, asked: bool
) -> None:
    torch.use_deterministic_algorithms(asked)
    try:
        attend(2 if isinstance(stub, Version2) else 3, stub, PLAIN)
    finally:
        torch.use_deterministic_algorithms(False)
    assert stub.given[-1]["deterministic"] is asked


def test_dropout_goes_to_version_2() -> None:
    stub = Version2()
    flash.FlashAttention(2, stub).attend(*drawn(), AttentionOptions(dropout=0.25))
    assert stub.given[0]["dropout_p"] == 0.25


@pytest.mark.parametrize(
    ("version", "query", "scores", "dropout", "words"),
    [
        (2, drawn(torch.float32)[0], PLAIN, 0.0, "torch.float32"),
        (3, drawn(channels=12)[0], PLAIN, 0.0, "heads of 12 channels"),
        (3, drawn()[0], PLAIN, 0.1, "dropout"),
        (3, drawn()[0], Scores(slopes_a=SLOPES), 0.0, "ALiBi"),
        (2, drawn()[0], Scores(softcap=2.0), 0.1, "dropout of scores that are capped"),
        (2, drawn()[0], Scores(slopes_a=SLOPES), 0.1, None),
        (2, drawn()[0], Scores(softcap=2.0, window=4), 0.0, None),
        (3, drawn()[0], Scores(softcap=2.0, window=4), 0.0, None),
    ],
    ids=[
        "type",
        "width",
        "dropout",
        "slopes",
        "a cap and dropout",
        "slopes and dropout of version 2",
        "a cap of version 2",
        "all of version 3",
    ],
)
def test_what_it_does_not_know_is_refused(
    version: int, query: Tensor, scores: Scores, dropout: float, words: str | None
) -> None:
    stub = Version2() if version == 2 else Version3()
    refusal = flash.FlashAttention(version, stub).refusal(
        query, query, AttentionOptions(scores, dropout)
    )
    assert refusal is None if words is None else words in refusal


def test_the_rest_goes_to_pytorch_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tried, stub = kernels.CudaKernels(CPU, torch.bfloat16), Version3()
    tried._flash = (flash.FlashAttention(3, stub),)
    scores = Scores(slopes_a=SLOPES)
    with caplog.at_level("INFO"):
        got = [tried.causal_attention(*drawn(), options=AttentionOptions(scores)) for _ in range(2)]
    assert stub.given == []
    expected = explicit_attention(*(t.double() for t in drawn()), scores=scores)
    torch.testing.assert_close(got[0].double(), expected, rtol=2**-6, atol=2e-2)
    assert [line for line in caplog.messages if "ALiBi" in line] == [
        "attention: not by flash-attn 3, which lacks ALiBi (version 2 does)"
    ]


@pytest.mark.parametrize(("major", "versions"), [(7, ()), (8, (2,)), (9, (3, 2)), (10, (2,))])
def test_versions_by_the_gpu(
    major: int, versions: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, stub in (("flash_attn", Version2()), ("flash_attn_interface", Version3())):
        monkeypatch.setitem(
            sys.modules,
            name,
            SimpleNamespace(
                flash_attn_func=stub.flash_attn_func,
                flash_attn_varlen_func=stub.flash_attn_varlen_func,
            ),
        )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    found = flash.find_flash_attention(torch.device("cuda", 0))
    assert tuple(each.version for each in found) == versions
    assert flash.find_flash_attention(CPU) == ()


@pytest.mark.parametrize(
    ("major", "cudnn", "version"),
    [(8, 91900, 2), (9, 91900, None), (9, 91000, 2), (10, 91900, None), (12, 91900, 2)],
)
def test_plain_scores_are_left_to_cudnn_where_it_is_faster(
    major: int, cudnn: int, version: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = Version2()
    functions = SimpleNamespace(
        flash_attn_func=stub.flash_attn_func, flash_attn_varlen_func=stub.flash_attn_varlen_func
    )
    monkeypatch.setitem(sys.modules, "flash_attn", functions)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    [found] = flash.find_flash_attention(torch.device("cuda", 0))
    q, k, _ = drawn()
    plain = found.refusal(q, k, PLAIN_ATTENTION)
    assert plain == (None if version else "the speed of cuDNN on this GPU")
    assert found.refusal(q, k, AttentionOptions(dropout=0.1)) is None
    assert found.refusal(q[:, :, 4:], k, PLAIN_ATTENTION) == plain, "cuDNN in two parts"
    assert found.refusal(q[:, :, 8:], k, PLAIN_ATTENTION) is None, "a single own key"
    assert found.refusal(q, k, AttentionOptions(Scores(softcap=30.0))) is None
    wide = torch.zeros(1, 1, 4, 192, dtype=torch.bfloat16)
    assert found.refusal(wide, wide, PLAIN_ATTENTION) is None
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    [found] = flash.find_flash_attention(torch.device("cuda", 0))
    assert found.refusal(q, k, PLAIN_ATTENTION) is None, "PyTorch would not take cuDNN"


def test_without_the_package_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    assert flash.find_flash_attention(torch.device("cuda", 0)) == ()
