"""The rules about what layers are made of."""

from collections.abc import Iterator
from typing import Final

from megatron.config.corpus_flags import CorpusFlags
from megatron.config.declare import Flags, Rule, options_of
from megatron.config.flags import ModelFlags
from megatron.config.layer_fields import no_rope_pattern, window_pattern
from megatron.config.layer_flags import LayerFlags
from megatron.config.layer_patterns import parse_window


def _window(flags: Flags) -> Iterator[str]:
    try:
        parse_window(flags[LayerFlags].window_size)
    except ValueError as error:
        yield str(error)


def _window_layers(flags: Flags) -> Iterator[str]:
    try:
        window_pattern(flags)
    except ValueError as error:
        yield str(error)


def _unrotated_layers(flags: Flags) -> Iterator[str]:
    try:
        no_rope_pattern(flags)
    except ValueError as error:
        yield str(error)


def _predicted_tokens(flags: Flags) -> Iterator[str]:
    depths, length = flags[LayerFlags].mtp_num_layers, flags[ModelFlags].seq_length
    if not depths:
        return
    given = f"--mtp-num-layers {depths}"
    if depths >= length:
        yield (
            f"{given} predicts tokens behind the end of every sample, which has --seq-length "
            f"{length}: lower it"
        )
    for option, value in options_of(CorpusFlags, flags[CorpusFlags]):
        if value and option in ("--reset-attention-mask", "--reset-position-ids"):
            yield (
                f"{given} with {option}: the tokens that follow may be of another document, and "
                "its layers see the whole sample: leave one of them out"
            )
    if flags[ModelFlags].position_embedding_type == "learned_absolute":
        yield (
            f"{given} with --position-embedding-type learned_absolute needs the table of the first "
            "stage on the last one too: use rope, alibi or none"
        )
    if flags[LayerFlags].embed_layernorm:
        yield (
            f"{given} with --embed-layernorm needs the norm of the first stage on the last one "
            "too: leave one of them out"
        )


def _wide_window(flags: Flags) -> Iterator[str]:
    words, length = flags[LayerFlags].window_size, flags[ModelFlags].seq_length
    if words is None or list(_window(flags)) or flags[LayerFlags].rotary_base_local is not None:
        return
    if (parse_window(words) or 0) >= length - 1:
        yield f"--window-size {words} changes nothing: a sample has {length} tokens"


LAYER_RULES: Final[tuple[Rule, ...]] = (
    _window,
    _window_layers,
    _unrotated_layers,
    _predicted_tokens,
)
"""The rules about the flags of layers; see ``megatron.config.rules``."""

LAYER_NOTES: Final[tuple[Rule, ...]] = (_wide_window,)
"""The rules about flags of layers that change nothing beside the others."""
