"""Text that the model writes during training: settings and rules."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatron.data.settings import DataSettings, DocumentSettings
from megatron.flags.declare import flag
from megatron.flags.groups import Flags
from megatron.flags.ranges import COUNT, INTERVAL, NOT_NEGATIVE, PERCENT, Range
from megatron.flags.rules import notes, refuses
from megatron.model.settings import ShapeSettings

_ON: Final = "--generate-interval"
_DRAWS: Final = "--generate-temperature"


def _prompt(text: str) -> str:
    if not text.strip():
        raise ValueError("an empty prompt; without one, a text begins behind the end of a document")
    if text.startswith("-"):
        raise ValueError("no prompt begins with '-'; put it into --generate-prompts-file")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            "the prompt has bytes that are no UTF-8; put it into --generate-prompts-file, as UTF-8"
        ) from error
    return text


@dataclass(frozen=True)
class GenerateSettings:
    """Text that the model writes during training."""

    # fmt: off
    generate_interval: int | None = flag(None,
        "Iterations between texts that the model writes, in the log and in all records. Training "
        "stands still meanwhile, and computes the same as without texts.", INTERVAL, unset="never",
        idle_with="--skip-train")
    generate_prompt: tuple[str, ...] = flag((),
        "Prompts, each in quotes, from which texts go on; without a tokenizer, token ids with "
        "blanks between them.", unset="the end of a document", metavar="TEXT ...", reads=_prompt,
        idle_without=_ON)
    generate_prompts_file: Path | None = flag(None, "File with a further prompt in every line.",
        unset="none", idle_without=_ON)
    generate_max_new_tokens: int = flag(32,
        "Tokens of a text behind its prompt; the end of a document ends it earlier. Each token "
        "costs a forward of all layers.", COUNT, idle_without=_ON)
    generate_temperature: float = flag(0.0,
        "Number that divides the logits before a token is drawn; 0: the likeliest token is taken.",
        Range(1e-3, 1000, or_zero=True), idle_without=_ON)
    generate_top_k: int = flag(0, "Draw from so many of the likeliest tokens; 0: from all.",
        NOT_NEGATIVE, idle_without=_DRAWS)
    generate_top_p: float = flag(1.0,
        "Draw from the fewest likeliest tokens that have this probability together.", PERCENT,
        idle_without=_DRAWS)
    # fmt: on


@refuses
def _room_for_a_prompt(flags: Flags) -> Iterator[str]:
    """Refuse texts that leave no room for a prompt in a sample."""
    own, length = flags[GenerateSettings], flags[ShapeSettings].seq_length
    if own.generate_interval is not None and own.generate_max_new_tokens >= length:
        yield (
            f"--generate-max-new-tokens {own.generate_max_new_tokens} leaves no room for a prompt "
            f"in the {length} tokens of --seq-length: lower it"
        )


@notes
def _begins_untrained(flags: Flags) -> Iterator[str]:
    """Note that texts without a prompt begin where a model is not trained to go on."""
    own = flags[GenerateSettings]
    has_prompts = own.generate_prompt or own.generate_prompts_file is not None
    if own.generate_interval is None or has_prompts:
        return
    begins = "texts without a prompt begin behind the end of a document"
    if flags[DataSettings].eod_mask_loss:
        yield f"--eod-mask-loss: {begins}, where no token is trained: give --generate-prompt"
    if flags[DocumentSettings].reset_attention_mask:
        yield (
            f"--reset-attention-mask: {begins}, which no document sees in training: give "
            "--generate-prompt"
        )
