"""Prompts of a run: their tokens, and the faults that are told before ranks meet."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from correctness.short_runs import Job, Layout
from reference.plain_gpt import GPTOptions

from megatron.data.tokenizers.settings import TokenizerSettings
from megatron.run.generate import GenerateSettings
from megatron.run.run_config import RunConfig
from megatron.training.open_prompts import MOST_PROMPTS, Prompts, open_prompts

NULL = TokenizerSettings("NullTokenizer", vocab_size=60)


def config_of(tokenizer: TokenizerSettings = NULL, **flags: Any) -> RunConfig:
    config = Job(GPTOptions(vocab_size=61), sequence=12).config(Layout(1, "none"))
    given = {"generate_interval": 2, "generate_max_new_tokens": 4, **flags}
    return replace(
        config,
        data=replace(config.data, tokenizer=tokenizer),
        log=replace(config.log, generate=GenerateSettings(**given)),
    )


def prompts_of(tokenizer: TokenizerSettings = NULL, **flags: Any) -> Prompts:
    found = open_prompts(config_of(tokenizer, **flags))
    assert found is not None
    return found


def test_prompts_of_flags_come_before_those_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(b"\xef\xbb\xbf7 8\r\n\n \n9")
    found = prompts_of(generate_prompt=("1 2", "3"), generate_prompts_file=file)
    assert found.tokens == ((1, 2), (3,), (7, 8), (9,))
    assert found.texts == ("1 2", "3", "7 8", "9")
    assert found.words.end == 60


@pytest.mark.parametrize("tokenizer", [NULL, TokenizerSettings(vocab_size=61)])
def test_without_prompts_a_text_begins_behind_a_document(tokenizer: TokenizerSettings) -> None:
    """Without a tokenizer the last id ends a document in the data, and ends no text."""
    found = prompts_of(tokenizer)
    assert found.tokens == ((60,),)
    assert found.texts == ("",)
    assert found.words.end == (60 if tokenizer == NULL else None)


def test_there_are_none_without_texts_and_without_training() -> None:
    config = config_of()
    assert open_prompts(config_of(generate_interval=None)) is None
    assert open_prompts(replace(config, train=replace(config.train, skip_train=True))) is None


@pytest.mark.parametrize(
    ("prompts", "fault"),
    [
        (("1", ""), "--generate-prompt: prompt 2 has no tokens"),
        (("1 2 3 4 5 6 7 8 9",), "prompt 1, .* has 9 tokens.*12 of --seq-length: shorten"),
        (("once",), "--generate-prompt: 'once' does not hold token ids"),
        (("61",), "--generate-prompt: .*the ids 61..61 are not all from 0 to 60, the last id"),
        (("1",) * (MOST_PROMPTS + 1), "^--generate-prompt: 1,001 prompts.* 1,000 .*give fewer"),
    ],
)
def test_faulty_prompts_name_the_flag(prompts: tuple[str, ...], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        prompts_of(generate_prompt=prompts)


@pytest.mark.parametrize("prompts", [(), ("1",)])
@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"\n \n", ": there is no prompt in it; give another file"),
        (b"\xff\x00", " is no text: byte 1 of it is 0xff .a file of prompts is UTF-8"),
        (b"1\n\n2 three\n", ", line 3: '2 three' does not hold token ids"),
        (b"1\n61\n", ", line 2: '61' does not .*from 0 to 60"),
        (b"1\n" + b"2 " * 9, ", line 2: prompt [23], .* has 9 tokens.*--seq-length: shorten"),
        (b"1\n" * (MOST_PROMPTS + 1), "[^:]*: 1,00[12] prompts, .*give fewer"),
        (None, " cannot be read .No such file or directory.: give another file"),
    ],
)
def test_faults_of_a_file_name_it_and_the_line(
    tmp_path: Path, prompts: tuple[str, ...], content: bytes | None, fault: str
) -> None:
    file = tmp_path / "prompts"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=f"^--generate-prompts-file {file}{fault}"):
        prompts_of(generate_prompt=prompts, generate_prompts_file=file)


def test_as_many_prompts_as_allowed_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("1 2\n" * (MOST_PROMPTS - 1))
    found = prompts_of(generate_prompt=("3",), generate_prompts_file=file)
    assert found.tokens == ((3,), *[(1, 2)] * (MOST_PROMPTS - 1))


def test_a_line_ends_where_the_file_ends_it(tmp_path: Path) -> None:
    """Other characters that end a line in Unicode belong to the prompt."""
    file = tmp_path / "prompts"
    file.write_text("1\x0c2\u20283\n4\n", encoding="utf-8")
    assert prompts_of(generate_prompts_file=file).tokens == ((1, 2, 3), (4,))
