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
from megatron.training.open_prompts import Prompts, open_prompts

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
    file.write_text("7 8\n\n9\n")
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
        (("61",), "--generate-prompt: "),
    ],
)
def test_faulty_prompts_name_the_flag(prompts: tuple[str, ...], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        prompts_of(generate_prompt=prompts)


def test_a_file_without_a_prompt_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("\n \n")
    with pytest.raises(ValueError, match=f"--generate-prompts-file {file}: there is no prompt"):
        prompts_of(generate_prompts_file=file)
    file.write_bytes(b"\xff\x00")
    with pytest.raises(ValueError, match=f"--generate-prompts-file {file} is no text"):
        prompts_of(generate_prompts_file=file)
