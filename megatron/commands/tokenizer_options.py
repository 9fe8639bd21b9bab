"""The tokenizer's flags of training, as options of the commands that work with text."""

import argparse
from typing import get_origin

from megatron.config.declare import Declaration
from megatron.config.groups import declarations
from megatron.config.tokenizer import TokenizerFlags, tokenizer_config
from megatron.data.tokenizers.interface import TokenizerConfig


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
    is_list = get_origin(declared.kind) is tuple
    group.add_argument(
        declared.option,
        type=str if is_list else declared.kind,
        nargs="+" if is_list else None,
        default=declared.default,
        choices=declared.choices or None,
        metavar=declared.metavar.split()[0],
        required=needed,
        help=words,
    )


def tokenizer_of(given: argparse.Namespace) -> TokenizerConfig | None:
    """Return the tokenizer that the options name; ``None``: they name none.

    Raises:
        ValueError: a number is out of range.
    """
    for declared in declarations(TokenizerFlags):
        value, allowed = getattr(given, declared.name), declared.facts.range
        if allowed and value is not None and not allowed.contains(value):
            raise ValueError(f"{declared.shown(value)}: must be {allowed.words}")
    if given.tokenizer_type is None:
        return None
    named = {each.name: getattr(given, each.name) for each in declarations(TokenizerFlags)}
    named["tokenizer_special_tokens"] = tuple(named["tokenizer_special_tokens"])
    return tokenizer_config(TokenizerFlags(**named), given.tokenizer_type)
