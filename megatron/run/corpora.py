"""The corpora of a run, and the sets that it can evaluate."""

from megatron.data.named_corpora import NamedCorpora
from megatron.data.settings import CorpusSettings, DataSettings
from megatron.data.shares import EvaluationSet
from megatron.flags.groups import Flags, result_of
from megatron.run.dry_run import DryRunSettings


def corpora_of(flags: Flags) -> NamedCorpora:
    """Return the corpora that the flags name; a dry run reads no file to learn their names."""
    return NamedCorpora(flags[CorpusSettings], not flags[DryRunSettings].dry_run)


def sets_to_evaluate(flags: Flags) -> tuple[EvaluationSet, ...]:
    """Return the evaluation sets that have documents; all of them if the flags have a fault."""
    if not flags[CorpusSettings].gives_splits:
        return flags[DataSettings].split.evaluated
    paths = result_of(corpora_of(flags).own_paths)
    if paths is None:
        return ("validation", "test")
    found: list[EvaluationSet] = ["validation"] if paths.valid else []
    if paths.test:
        found.append("test")
    return tuple(found)
