"""The tokenizer's flags of training, as options of the commands that work with text."""

import argparse
from typing import get_origin

from megatron.config.tokenizer import TokenizerFlags, tokenizer_config
from megatron.data.tokenizers.interface import TokenizerConfig
from megatron.flags.checks import value_mistakes
from megatron.flags.declare import Declaration
from megatron.flags.groups import all_declarations, declarations, filled, options_of


def add_tokenizer_options(group: "argparse._ArgumentGroup", *, required: bool) -> None:
    """Offer the flags, with the names and the help of training.

    Args:
        group: of the command's options.
        required: whether the command needs a tokenizer.
    """
    for declared in declarations(TokenizerFlags):
        _add(group, declared, needed=required and declared.name == "tokenizer_type")


def _add(group: "argparse._ArgumentGroup", declared: Declaration, *, needed: bool) -> None:
    default = "required" if needed else f"default: {declared.default_words}"
    if declared.name == "tokenizer_type" and not needed:
        default = "default: none"
    words = f"{declared.facts.help} ({default})".replace("%", "%%")
    if declared.kind is bool:
        group.add_argument(declared.option, action="store_true", help=words)
        return
    group.add_argument(
        declared.option,
        nargs="+" if get_origin(declared.kind) is tuple else None,
        metavar=declared.metavar.split()[0],
        required=needed,
        help=words,
    )


def tokenizer_of(given: argparse.Namespace) -> TokenizerConfig | None:
    """Return the tokenizer that the options name; ``None``: they name none.

    The words behind an option are read and judged as those of training's flags are.

    Raises:
        ValueError: an option has another value than the flag may have.
    """
    declared = all_declarations((TokenizerFlags,))
    words = {option: _words(getattr(given, own.name)) for option, own in declared.items()}
    asked = {option: own for option, own in words.items() if own is not None}
    for option, own in asked.items():
        if fault := declared[option].unreadable(own):
            raise ValueError(fault)
    flags = filled((TokenizerFlags,), asked)[TokenizerFlags]
    for _, mistake in value_mistakes(declared, dict(options_of(TokenizerFlags, flags))):
        raise ValueError(mistake)
    return None if flags.tokenizer_type is None else tokenizer_config(flags, flags.tokenizer_type)


def _words(given: str | list[str] | bool | None) -> list[str] | None:
    """Return the words behind an option; ``None``: it is not given."""
    if given is None or given is False:
        return None
    return [] if given is True else [given] if isinstance(given, str) else given
