"""Corpora, their files, and the sets that are evaluated."""

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Final

from megatron.checkpoint.settings import CheckpointSettings
from megatron.data.fill_in_the_middle import FillTokens
from megatron.data.indexed import IndexedDataset
from megatron.data.settings import CorpusSettings, DataSettings, FillSettings
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.settings import TokenizerSettings
from megatron.flags.declare import cut
from megatron.flags.groups import Flags, declarations, faults_of, result_of
from megatron.flags.rules import notes, notes_in, refuses, refuses_in
from megatron.run.corpora import corpora_of, sets_to_evaluate
from megatron.run.deepspeed_file import DeepSpeedSettings
from megatron.run.dry_run import DryRunSettings
from megatron.run.train import TrainSettings, evaluation_batches
from megatron.run.vocabulary import Stamps, stamps_of, vocabulary

LONGEST_LINE: Final = 1000
"""Characters of the longest message that quotes a name from a file. Such a name may be anything."""


@refuses
def _data(flags: Flags) -> Iterator[str]:
    if not flags[CorpusSettings].names_data:
        if not flags[DryRunSettings].dry_run and not flags[DataSettings].mock_data:
            yield (
                "--data-path is missing: give the prefix of a .bin and .idx file, which "
                "tools/sample_data.py makes in seconds and prints, or --mock-data"
            )
    elif flags[CorpusSettings].gives_splits:
        yield from faults_of(corpora_of(flags).own_paths)
    else:
        yield from faults_of(corpora_of(flags).blend)


@refuses
def _several_corpora_at_once(flags: Flags) -> Iterator[str]:
    """Refuse ``--full-validation`` of several corpora together, shared by the splits or not."""
    own = flags[CorpusSettings]
    if not flags[DataSettings].full_validation:
        return
    named = corpora_of(flags)
    found = result_of(lambda: (named.own_paths(), named.blend()))
    if found is None:
        return
    paths, blend = found
    if paths is not None and any(len(blend) > 1 for blend in paths.valid):
        way_out = "give one prefix, or prefixes without weights and --multiple-validation-sets"
        if own.gives_weighted_splits:
            way_out = "give one corpus in each group of the validation"
        yield (
            f"--full-validation reads every corpus once, so weights mean nothing to it: {way_out}"
        )
    if len(blend) > 1 and not own.gives_splits:
        yield (
            "--full-validation reads every corpus once, so the weights of --data-path mean nothing "
            "to it: give the validation sets with --valid-data-path"
        )


@refuses
def _nothing_to_evaluate(flags: Flags) -> Iterator[str]:
    if not flags[TrainSettings].skip_train:
        return
    if not evaluation_batches(flags[TrainSettings]):
        yield "--skip-train evaluates nothing with --eval-iters 0: give a number of batches"
    if not sets_to_evaluate(flags):
        yield f"--skip-train evaluates nothing: {_why_nothing(flags)}"


def _why_nothing(flags: Flags) -> str:
    if flags[CorpusSettings].gives_splits:
        return "give the documents for it with --valid-data-path or --test-data-path"
    return (
        f"--split {flags[DataSettings].split} leaves no documents for it; give a second or third "
        "share, as in 969,30,1"
    )


@notes
def _idle_evaluation(flags: Flags) -> Iterator[str]:
    own = flags[TrainSettings]
    if own.skip_train or not evaluation_batches(own) or sets_to_evaluate(flags):
        return
    given = (
        f"--eval-iters {own.eval_iters}"
        if own.eval_interval is None
        else f"--eval-interval {own.eval_interval}"
    )
    if flags[CorpusSettings].gives_splits:
        yield (
            f"{given} changes nothing: there is nothing to validate on; give --valid-data-path too"
        )
        return
    yield (
        f"{given} changes nothing: --split {flags[DataSettings].split} leaves no "
        "documents to validate on; for an evaluation give a second share, as in 969,30,1"
    )


@refuses_in("real")
def _data_files(flags: Flags) -> Iterator[str]:
    """Open every file, so that a broken file is found before any process group exists."""
    corpora = corpora_of(flags)
    for flag, prefix in result_of(lambda: list(corpora.prefixes())) or ():
        for fault in faults_of(partial(IndexedDataset, prefix)):
            yield cut(f"{flag} {prefix}: {fault.removeprefix('--data-path: ')}", LONGEST_LINE)


@notes_in("dry")
def _files_of_a_dry_run(flags: Flags) -> Iterator[str]:
    """Note all files that only training opens: a dry run does not know whether they exist."""
    named = [
        declared.shown(value)
        for declared in declarations(CorpusSettings)
        if declared.kind is not bool and (value := getattr(flags[CorpusSettings], declared.name))
    ]
    saved, deepspeed = flags[CheckpointSettings], flags[DeepSpeedSettings].deepspeed_config
    if saved.load is not None and not saved.use_checkpoint_args:
        named.append(f"--load {saved.load}")
    if deepspeed is not None:
        named.append(f"--deepspeed-config {deepspeed}")
    if named:
        yield cut(
            f"{', '.join(named)}: not read in a dry run; training opens it, or tells why it cannot",
            LONGEST_LINE,
        )


@refuses
def _tokens_of_middles(flags: Flags) -> Iterator[str]:
    """Refuse fill-in-the-middle with a token that the tokenizer lacks."""
    fill, tokenizer = flags[FillSettings], flags[TokenizerSettings]
    if fill.fim_data and tokenizer.tokenizer_type is not None:
        yield from _faults_of_middles(fill, tokenizer, stamps_of(tokenizer))


@lru_cache(4)
def _faults_of_middles(
    fill: FillSettings, tokenizer: TokenizerSettings, stamps: Stamps
) -> tuple[str, ...]:
    built = result_of(partial(build_tokenizer, tokenizer))
    if built is None:
        return ()
    return tuple(faults_of(lambda: FillTokens.of(fill, built)))


@refuses
def _tokenizer(flags: Flags) -> Iterator[str]:
    needless = flags[DryRunSettings].dry_run or flags[DataSettings].mock_data
    if flags[TokenizerSettings].tokenizer_type is None and not (
        needless and flags[TokenizerSettings].vocab_size
    ):
        yield (
            "--tokenizer-type is missing: give GPTSentencePieceTokenizer with --tokenizer-model "
            "FILE, another type that docs/data.md lists, or NullTokenizer with --vocab-size N for "
            "data without a tokenizer; with --mock-data or --dry-run, --vocab-size N is enough"
        )
    else:
        yield from faults_of(partial(vocabulary, flags))
