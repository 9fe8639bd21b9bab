"""The settings of corpora, of their documents, and of the samples that are made of them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from megatron.data.shares import Blend, OwnPaths, Split
from megatron.data.tokenizers.settings import TokenizerSettings
from megatron.flags.declare import flag
from megatron.flags.groups import Flags
from megatron.flags.ranges import PROBABILITY, Range
from megatron.flags.rules import notes

_SHARED: Final = "--data-path or --data-args-path or --mock-data"
_IN_A_FILE: Final = "--per-split-data-args-path"
SPLITS: Final = ("train", "valid", "test")
OWN_PATHS: Final = (
    "--train-data-path or --valid-data-path or --test-data-path or --per-split-data-args-path or "
    "--train-weighted-split-paths or --train-weighted-split-paths-path"
)
"""The flags that give every split corpora of its own, as a condition."""

_WEIGHTED: Final = f"{_SHARED} or {OWN_PATHS.partition(' or --train-weighted')[0]}"
_OWN_SETS: Final = "--valid-weighted-split-paths or --valid-weighted-split-paths-path"
_GROUP: Final = "NAME: WEIGHT START:END PREFIX, ..."
_WORKERS: Final = Range(0, 1024)
_PREFIXES: Final = "[WEIGHT] PREFIX ..."
_ON: Final = "--fim-data"


@dataclass(frozen=True)
class CorpusSettings:
    """The corpora of a run.

    The words and files that name corpora may differ from machine to machine.
    """

    # fmt: off
    data_path: tuple[str, ...] = flag((),
        "Prefix of a .bin and .idx file. Or several prefixes, with a weight before each.",
        unset="required, except with --dry-run or --mock-data", metavar=_PREFIXES)
    data_args_path: Path | None = flag(None,
        "File with the words of --data-path, for blends that are too long for a command line.",
        unset="none", excludes="--data-path or --mock-data")
    train_data_path: tuple[str, ...] = flag((),
        "As --data-path, for training alone. All documents of every corpus are read, and --split "
        "does not count.",
        unset="a share of --data-path", metavar=_PREFIXES, excludes=f"{_SHARED} or {_IN_A_FILE}")
    valid_data_path: tuple[str, ...] = flag((),
        "As --train-data-path, for the validation set.", unset="none beside --train-data-path",
        metavar=_PREFIXES, excludes=f"{_SHARED} or {_IN_A_FILE}")
    test_data_path: tuple[str, ...] = flag((),
        "As --train-data-path, for the test set.", unset="none beside --train-data-path",
        metavar=_PREFIXES, excludes=f"{_SHARED} or {_IN_A_FILE}")
    per_split_data_args_path: Path | None = flag(None,
        "JSON file with the words of --train-data-path, --valid-data-path and --test-data-path, "
        "under the names train, valid and test.",
        unset="none", excludes=_SHARED)
    multiple_validation_sets: bool = flag(False,
        "Evaluate every corpus of --valid-data-path by itself, and print a loss for each. "
        "--valid-data-path then has no weights.",
        needs=f"--valid-data-path or {_IN_A_FILE} or {_OWN_SETS}",
        lack="has no sets to tell apart", idle_with=_OWN_SETS)
    train_weighted_split_paths: tuple[str, ...] = flag((),
        "BigScience's form of --train-data-path: one word with a name, and with a share and two "
        "marks from 0 to 1 for each corpus. Documents between the two marks are read.",
        unset="none",
        metavar=_GROUP, excludes=_WEIGHTED)
    valid_weighted_split_paths: tuple[str, ...] = flag((),
        "As --train-weighted-split-paths, for the validation set. Each of several such words is a "
        "set of its own.",
        unset="none", metavar=f"{_GROUP} ...", excludes=_WEIGHTED)
    test_weighted_split_paths: tuple[str, ...] = flag((),
        "As --train-weighted-split-paths, for the test set.",
        unset="none", metavar=_GROUP, excludes=_WEIGHTED)
    train_weighted_split_paths_path: Path | None = flag(None,
        "File with the words of --train-weighted-split-paths, each in quotes.", unset="none",
        excludes=f"{_WEIGHTED} or --train-weighted-split-paths")
    valid_weighted_split_paths_path: Path | None = flag(None,
        "File with the words of --valid-weighted-split-paths, each in quotes.", unset="none",
        excludes=f"{_WEIGHTED} or --valid-weighted-split-paths")
    test_weighted_split_paths_path: Path | None = flag(None,
        "File with the words of --test-weighted-split-paths, each in quotes.", unset="none",
        excludes=f"{_WEIGHTED} or --test-weighted-split-paths")
    # fmt: on

    @property
    def gives_weighted_splits(self) -> bool:
        """Whether a flag on weighted splits is given."""
        names = (f"{split}_weighted_split_paths" for split in SPLITS)
        return any(getattr(self, f"{name}{end}") for name in names for end in ("", "_path"))

    @property
    def gives_splits(self) -> bool:
        """Whether every split has corpora of its own."""
        by_split = self.train_data_path, self.valid_data_path, self.test_data_path
        in_a_file = self.per_split_data_args_path is not None
        return any(by_split) or in_a_file or self.gives_weighted_splits

    @property
    def names_data(self) -> bool:
        """Whether any flag names corpora."""
        return bool(self.data_path or self.data_args_path) or self.gives_splits


@dataclass(frozen=True)
class DocumentSettings:
    """Documents in samples.

    Attributes:
        eod_token: id of the token that ends a document.
    """

    # fmt: off
    reset_attention_mask: bool = flag(False,
        "Keep the documents of a sample apart: a token sees no token of another document. A "
        "document ends with the tokenizer's token for it.")
    reset_position_ids: bool = flag(False,
        "Positions begin anew with every document of a sample.",
        idle_with="--position-embedding-type alibi or --position-embedding-type none")
    # fmt: on

    eod_token: int = 0


@dataclass(frozen=True)
class FillSettings:
    """Fill-in-the-middle."""

    # fmt: off
    fim_data: bool = flag(False,
        "Move the middles of documents to their ends, behind tokens that name the parts.",
        needs="--tokenizer-type HuggingFaceTokenizer", excludes="--mock-data",
        lack="names tokens such as <fim_prefix>, which a HuggingFaceTokenizer can have")
    fim_rate: float = flag(0.5, "Share of the documents in a sample.", PROBABILITY,
        idle_without=_ON)
    fim_spm_rate: float = flag(0.5,
        "Share of the --fim-rate documents whose suffix comes before their prefix.",
        PROBABILITY, idle_without=_ON)
    fim_split_sample: str | None = flag(None,
        "Token that cuts a document into fragments, such as files. Each fragment is then treated "
        "by itself.",
        unset="none", metavar="TOKEN", idle_without=_ON)
    fim_fragment_rate: float | None = flag(None,
        "Share of the fragments of a document whose middle is moved.", PROBABILITY,
        unset="--fim-rate", idle_without="--fim-split-sample")
    fim_no_prefix: str | None = flag(None,
        "Leave a text unchanged that begins with this prefix.",
        unset="none", metavar="TEXT", idle_without=_ON)
    fim_prefix_token: str = flag("<fim_prefix>", "Token before the prefix.", idle_without=_ON)
    fim_middle_token: str = flag("<fim_middle>", "Token before the middle.", idle_without=_ON)
    fim_suffix_token: str = flag("<fim_suffix>", "Token before the suffix.", idle_without=_ON)
    fim_pad_token: str = flag("<fim_pad>",
        "Token that fills up a sample that has become shorter.", idle_without=_ON)
    fim_eod_token: str | None = flag(None, "Token that ends a document.",
        unset="the tokenizer's", metavar="TOKEN", idle_without=_ON)
    # fmt: on

    @property
    def fragment_rate(self) -> float:
        """Share of the fragments of a chosen document whose middle is moved."""
        return self.fim_rate if self.fim_fragment_rate is None else self.fim_fragment_rate


@dataclass(frozen=True)
class DataSettings:
    """The samples that are made of corpora.

    Attributes:
        seq_length: tokens per sample s; each sample holds s + 1 tokens.
        seed: seed of the document and sample shuffles.
        blend: corpora that training, validation and test divide among themselves.
        own_paths: blends for every split, used in place of ``blend``.
        named_by: the flag and the prefix of every corpus, for messages.
        added_entries: entries that the tokenizer adds to ``--vocab-size``.
        prefetch: read the next global batch while the model trains on the current batch.
        resets: how the documents within a sample end, and are kept apart.
        tokenizer: the tokenizer of the corpora.
        fill: how the middles of documents are moved to their ends.
    """

    # fmt: off
    mock_data: bool = flag(False,
        "Train on made-up documents, whose tokens only count up. This needs no data and no "
        "tokenizer, only --vocab-size.", excludes="--data-path")
    split: Split = flag(Split(969, 30, 1),
        "Shares of the documents for training, validation and test.", reads=Split.of,
        writes=str, idle_with=OWN_PATHS)
    data_cache_path: Path | None = flag(None, "Folder where the indices of samples are kept.",
        unset="beside the data", idle_with="--mock-data")
    eod_mask_loss: bool = flag(False,
        "Leave out the loss of a token whose input is the end of a document. Every microbatch "
        "keeps the same weight, whatever number of its tokens counts.")
    calculate_per_token_loss: bool = flag(False,
        "Divide the loss by the counted tokens of the global batch, so that every counted token "
        "has the same weight. Otherwise the loss is the mean over the microbatches, and that of a "
        "microbatch the mean over its own counted tokens.", idle_without="--eod-mask-loss")
    full_validation: bool = flag(False,
        "Every evaluation reads the whole of the validation set, once, instead of --eval-iters.",
        excludes="--mock-data", idle_without="--eval-interval or --skip-train or --eval-iters",
        idle_with="--eval-iters 0")
    num_workers: int | None = flag(None,
        "1 or more: a thread reads the next iteration's samples during this iteration, and copies "
        "them to the GPU. 0: samples are read and copied when they are needed.",
        _WORKERS, unset="1 on GPUs, 0 on CPUs")
    # fmt: on

    seq_length: int = 1
    seed: int = 1234
    blend: Blend = ()
    own_paths: OwnPaths | None = None
    named_by: tuple[tuple[str, Path], ...] = ()
    added_entries: int = 0
    prefetch: bool = False
    resets: DocumentSettings = field(default_factory=DocumentSettings)
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    fill: FillSettings = field(default_factory=FillSettings)

    def reads_ahead(self, *, on_gpus: bool) -> bool:
        """Return whether a thread reads the next batch; by default on GPUs: their host is idle."""
        return on_gpus if self.num_workers is None else self.num_workers > 0

    def flag_of(self, prefix: Path) -> str:
        """Return the flag that names a corpus."""
        return next((flag for flag, named in self.named_by if named == prefix), "--data-path")

    @property
    def weighs_tokens_alike(self) -> bool:
        """Whether every token that counts has the same weight; otherwise every microbatch has.

        If all tokens count, the two are the same.
        """
        return self.calculate_per_token_loss or not self.eod_mask_loss

    @property
    def documents(self) -> DocumentSettings | None:
        """How the documents within a sample are kept apart; ``None``: they are not."""
        if not (self.resets.reset_attention_mask or self.resets.reset_position_ids):
            return None
        return self.resets

    @property
    def eod_token(self) -> int:
        """Id of the token that ends a document."""
        return self.resets.eod_token


@notes
def _split_of_mock_data(flags: Flags) -> Iterator[str]:
    split = flags[DataSettings].split
    if flags[DataSettings].mock_data and split != DataSettings.split:
        yield (
            f"--split {split} divides nothing: --mock-data has samples of its own for every split "
            "with a share"
        )
