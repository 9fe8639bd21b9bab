"""Answers are those of transformers, with and without a cache, in batches, and over ranks."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("transformers", reason="the reference: pip install transformers")

from inference.imported import (
    END,
    NEW,
    PROMPTS,
    answers_on_rank,
    imported,
    opened,
    our_answers,
)

from megatron.commands.generate_text import main
from megatron.inference.generate import answers, generate
from megatron.inference.model import LONGEST_PIECE
from megatron.inference.sampling import Sampling
from tools.conversions_table import CONFIGS, random_model

if TYPE_CHECKING:
    from harness.rank_pool import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers are none of ours

GREEDY = Sampling()


def their_answer(model: Any, prompt: list[int]) -> list[int]:
    """What transformers answers, its end included."""
    tokens = torch.tensor([prompt])
    answer = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=END,
    )
    return [int(token) for token in answer[0, len(prompt) :]]


SWITCHING = ("llama, dynamic", "phi 4 mini, longrope")
"""Families whose rotation follows the length of each text in transformers."""


@pytest.mark.parametrize("family", [name for name in CONFIGS if name not in SWITCHING])
def test_greedy_answers_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """A batch of prompts of different lengths: padding changes nothing.

    With dynamic rotation transformers turns each token by another theta, as the text grows. With
    LongRoPE it takes other divisors from one length on.
    """
    theirs = random_model(family)
    where = imported(theirs, tmp_path)
    wanted = [their_answer(theirs, prompt) for prompt in PROMPTS]
    assert our_answers(where, PROMPTS, GREEDY) == wanted
    assert len({tuple(answer) for answer in wanted}) == len(PROMPTS), "the prompts matter"


HOW = [GREEDY, Sampling(0.9), Sampling(1.3, top_k=7), Sampling(1.5, top_p=0.7, seed=5)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", HOW, ids=["greedy", "temperature", "top-k", "top-p"])
def test_answers_depend_on_neither_cache_nor_ranks(
    how: Sampling, tmp_path: Path, ranks: "RankPool"
) -> None:
    where = imported(random_model("gemma 3"), tmp_path)
    wanted = our_answers(where, PROMPTS, how)
    assert our_answers(where, PROMPTS, how, cached=False) == wanted
    for size in (2, 3):
        for found in ranks.run(answers_on_rank, size, where=where, how=how):
            assert found == wanted


def test_a_long_prompt_goes_through_in_pieces(tmp_path: Path) -> None:
    theirs = random_model("llama 3")
    where = imported(theirs, tmp_path)
    prompt = [(7 * i * i + 3 * i) % 97 + 2 for i in range(LONGEST_PIECE + 40)]
    model = opened(where, longest=len(prompt) + NEW)
    found = answers(generate(model, [prompt], GREEDY, NEW, end=END), 1)
    assert found == [their_answer(theirs, prompt)]


def test_the_command_prints_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = random_model("gpt2")
    root = imported(theirs, tmp_path).parent
    capsys.readouterr()
    words = [" ".join(map(str, prompt)) for prompt in PROMPTS]
    flags = ["--ids", "--end", str(END), "--max-new-tokens", str(NEW)]
    main([str(root), *flags, *(word for text in words for word in ("--prompt", text))])
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    wanted = [[*p, *(t for t in their_answer(theirs, p) if t != END)] for p in PROMPTS]
    assert [[int(word) for word in line] for line in shown] == wanted
    main([str(root), *flags, "--prompt", words[0]])  # streamed
    assert [int(word) for word in capsys.readouterr().out.split()] == wanted[0]


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_prompts_of_a_file_may_begin_with_a_mark_of_byte_order(
    ends: str, gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, file = ["5 17 33", "7 8"], tmp_path / "prompts"
    file.write_bytes(f"\ufeff{ends.join(lines)}{ends}".encode())
    capsys.readouterr()
    main([str(gpt2), "--ids", "--max-new-tokens", "3", "--prompts-file", str(file)])
    found = capsys.readouterr().out.splitlines()
    assert [text[: len(line)] for text, line in zip(found, lines, strict=True)] == lines


@pytest.mark.parametrize("how", ["--temperature 1", "--temperature 2 --top-k 9", "--top-p 0.9"])
def test_answers_do_not_depend_on_the_size_of_batches(
    how: str, gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Equal prompts have noise of their own, whose key is their number in the file."""
    how = how if "--temperature" in how else f"--temperature 1 {how}"
    file, lines = tmp_path / "prompts", ["5 17 33"] * 3 + ["7 8"] + ["5 17 33"] * 6
    file.write_text("\n".join(lines))
    flags = [str(gpt2), "--ids", "--max-new-tokens", "6", "--seed", "1", *how.split()]
    capsys.readouterr()
    by_size = []
    for size in (1, 3, 8, 16):
        main([*flags, "--prompts-file", str(file), "--batch-size", str(size)])
        by_size.append(capsys.readouterr().out.splitlines())
    assert by_size[1:] == by_size[:1] * 3
    assert len(set(by_size[0])) == len(lines)
    alone = [*flags, "--prompt", lines[0]]
    main(alone)
    assert capsys.readouterr().out.strip() == by_size[0][0]


def test_a_faulty_prompt_is_told_by_its_number_in_the_file(gpt2: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("5\n6\n7\n99\n")
    flags = ["--ids", "--max-new-tokens", "2", "--prompts-file", str(file), "--batch-size", "3"]
    with pytest.raises(SystemExit, match="prompt 4 has the token 99"):
        main([str(gpt2), *flags])


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (["--ids"], "give --prompt"),
        (["--prompt", "1 2"], "--tokenizer-type"),
        (["--ids", "--prompt", "1 x"], "token ids"),
        (["--ids", "--prompt", " "], "no tokens"),
        (["--ids", "--prompt", "1 99", "--max-new-tokens", "4"], "ends at 98"),
        (["--ids", "--prompt", "1", "--max-new-tokens", "64"], "64 positions"),
        (["--ids", "--prompt", "1", "--temperature", "-1"], "--temperature"),
        (["--ids", "--prompt", "1", "--top-p", "0"], "--top-p"),
        (["--ids", "--prompt", "1", "--top-k", "-2"], "--top-k"),
        (["--ids", "--prompt", "1", "--step", "5"], "no checkpoint of iteration 5"),
    ],
)
def test_mistakes_get_one_clear_error(
    flags: list[str], fault: str, gpt2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(gpt2), *flags])
    told = capsys.readouterr().err if ended.value.code == 2 else str(ended.value.code)
    assert fault in told
    assert len(told.splitlines()) == 1


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a GPT-2 of 64 positions."""
    return imported(random_model("gpt2"), tmp_path_factory.mktemp("gpt2")).parent
