"""The flags of fill-in-the-middle, as Megatron-LM's GPTFIMDataset has them."""

from dataclasses import dataclass
from typing import Final

from megatron.config.declare import Range, flag
from megatron.config.tokenizer_flags import TokenizerFlags, tokenizer_config
from megatron.data.config import FillConfig
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.interface import Tokenizer

_RATE: Final = Range("at least 0 and at most 1", lambda x: 0 <= x <= 1)
_ON: Final = "--fim-data"


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class FillFlags:
    """Fill-in-the-middle."""

    fim_data: bool = flag(False,
        "Move the middles of documents to their ends, behind tokens that name the parts.",
        needs="--tokenizer-type HuggingFaceTokenizer", excludes="--mock-data",
        lack="names tokens such as <fim_prefix>, which a HuggingFaceTokenizer can have")
    fim_rate: float = flag(0.5, "Share of the documents in a sample.", _RATE, idle_without=_ON)
    fim_spm_rate: float = flag(0.5,
        "Share among them with the suffix before the prefix.", _RATE, idle_without=_ON)
    fim_split_sample: str | None = flag(None,
        "Token that cuts a document into fragments, such as files, which are moved one by one.",
        unset="none", metavar="TOKEN", idle_without=_ON)
    fim_fragment_rate: float | None = flag(None,
        "Share of the fragments of a document that is chosen.", _RATE, unset="--fim-rate",
        idle_without="--fim-split-sample")
    fim_no_prefix: str | None = flag(None,
        "Leave a text that begins so as it is.", unset="none", metavar="TEXT", idle_without=_ON)
    fim_prefix_token: str = flag("<fim_prefix>", "Token before the prefix.", idle_without=_ON)
    fim_middle_token: str = flag("<fim_middle>", "Token before the middle.", idle_without=_ON)
    fim_suffix_token: str = flag("<fim_suffix>", "Token before the suffix.", idle_without=_ON)
    fim_pad_token: str = flag("<fim_pad>",
        "Token that fills a sample that became shorter.", idle_without=_ON)
    fim_eod_token: str | None = flag(None, "Token that ends a document.",
        unset="the tokenizer's", metavar="TOKEN", idle_without=_ON)


# fmt: on
def fill_config(flags: FillFlags, tokenizer: TokenizerFlags) -> FillConfig | None:
    """Return what is moved; ``None``: nothing.

    Raises:
        ValueError: the tokenizer cannot be read, or has no such token.
    """
    if not flags.fim_data or tokenizer.tokenizer_type is None:
        return None
    config = tokenizer_config(tokenizer, tokenizer.tokenizer_type)
    built = build_tokenizer(config)

    def id_of(name: str) -> int:
        return _id_of(getattr(flags, name), "--" + name.replace("_", "-"), built)

    return FillConfig(
        config,
        flags.fim_rate,
        flags.fim_spm_rate,
        prefix_token=id_of("fim_prefix_token"),
        middle_token=id_of("fim_middle_token"),
        suffix_token=id_of("fim_suffix_token"),
        pad_token=id_of("fim_pad_token"),
        end_token=built.eod if flags.fim_eod_token is None else id_of("fim_eod_token"),
        split_token=None if flags.fim_split_sample is None else id_of("fim_split_sample"),
        fragment_rate=(
            flags.fim_rate if flags.fim_fragment_rate is None else flags.fim_fragment_rate
        ),
        no_prefix=flags.fim_no_prefix,
    )


def _id_of(token: str, option: str, tokenizer: Tokenizer) -> int:
    ids = tokenizer.tokenize(token)
    if len(ids) != 1 or tokenizer.detokenize(ids) != token:
        raise ValueError(
            f"{option} {token}: the tokenizer has no such token; add it to its folder "
            "(tokenizer.add_special_tokens, save_pretrained), or name one that it has"
        )
    return ids[0]
