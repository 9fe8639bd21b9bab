"""Scores of texts are those of the whole softmax, for one rank and several."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="the reference: pip install transformers")

from inference.imported import TEXT, imported, opened, scored_on_rank

from megatron.commands.generate_text import main
from megatron.inference.score import perplexity, windows
from tools.conversions_table import random_model, their_logits

if TYPE_CHECKING:
    from harness.rank_pool import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers are none of ours


@given(
    count=st.integers(2, 60), longest=st.integers(2, 20), share=st.floats(0, 1, exclude_max=True)
)
def test_windows_score_every_token_but_the_first_once(
    count: int, longest: int, share: float
) -> None:
    stride = 1 + int(share * (longest - 1))
    tokens, scored = list(range(count)), []
    for row, scores in windows(tokens, longest, stride):
        assert 0 < scores < len(row) <= longest
        assert row == tokens[row[0] : row[-1] + 1]
        scored += row[-scores:]
    assert scored == tokens[1:]


def test_scores_are_those_of_the_softmax(tmp_path: Path, ranks: "RankPool") -> None:
    theirs = random_model("gemma 2")
    where = imported(theirs, tmp_path)
    log_sv = their_logits(theirs, torch.tensor([TEXT]))[0].double().log_softmax(-1)
    targets = torch.tensor(TEXT[-30:])
    wanted = log_sv[-31:-1].gather(1, targets[:, None])[:, 0]
    likeliest = (log_sv[-31:-1].argmax(1) == targets).tolist()
    for size in (1, 3):
        for log_probabilities, greedy in ranks.run(scored_on_rank, size, where=where):
            assert log_probabilities == pytest.approx(wanted.tolist(), abs=1e-4)
            assert greedy == likeliest


def test_perplexity_is_that_of_the_mean_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = random_model("llama 2")
    where = imported(theirs, tmp_path)
    log_sv = their_logits(theirs, torch.tensor([TEXT]))[0].double().log_softmax(-1)
    loss = -float(log_sv[:-1].gather(1, torch.tensor(TEXT[1:])[:, None]).mean())
    found = perplexity(opened(where), TEXT, len(TEXT), 10)
    assert found.tokens == len(TEXT) - 1
    assert found.loss == pytest.approx(loss, abs=1e-5)
    assert found.value == pytest.approx(math.exp(loss), rel=1e-4)
    (tmp_path / "text").write_text(" ".join(map(str, TEXT)))
    capsys.readouterr()
    main([str(where.parent), "--ids", "--perplexity", str(tmp_path / "text")])
    assert f"perplexity {found.value:.4f}" in capsys.readouterr().out
