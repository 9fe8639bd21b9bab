"""``--use-checkpoint-args``: the model's flags come from the checkpoint that a run loads.

A flag of the checkpoint is used if the command line leaves the flag out. A flag of the command line
also replaces flags of the checkpoint that it excludes: --softmax-scale replaces
--query-pre-attn-scalar, for instance. If the weights of the checkpoint do not fit the flags of the
command line, the run says so when it loads the weights.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from megatron.checkpoint import folder
from megatron.checkpoint.common import COMMON, read_common
from megatron.checkpoint.folder import DamagedError
from megatron.checkpoint.saved_model import read_model
from megatron.flags.conditions import alternatives
from megatron.flags.declare import Declaration
from megatron.flags.words import SortedWords
from megatron.model.settings import ModelSettings

USE: Final = "--use-checkpoint-args"


def add_saved_model(words: SortedWords, declared: Mapping[str, Declaration]) -> None:
    """Add the flags of the saved model, with a note; or a mistake, if no checkpoint tells them."""
    if USE not in words.given or "--load" not in words.given:
        return
    root, step = Path(words.given["--load"][0]), words.given.get("--ckpt-step", [""])[0]
    try:
        where, model = _model_in(root, step)
    except DamagedError as error:
        words.mistakes.append(f"{USE}: {error}; give the flags of the model")
        return
    if where is None or model is None:
        words.notes.append(f"{USE} changes nothing: {root} has no checkpoint yet")
        return
    given = set(words.given)
    added = {
        option: values
        for option, values in model.flags().items()
        if option not in given and not _is_excluded(option, given, declared)
    }
    words.given.update(added)
    shown = " ".join(" ".join([option, *values]) for option, values in added.items())
    words.notes.append(f"{USE} is read as {shown or 'what is given anyway'}, from {where}")


def _is_excluded(option: str, given: Collection[str], declared: Mapping[str, Declaration]) -> bool:
    """Return whether a flag excludes a given flag, or a given flag excludes it."""

    def excluded_by(one: str) -> set[str]:
        facts = declared[one].facts if one in declared else None
        conditions = alternatives(facts.excludes) if facts else ()
        return {condition.split()[0] for condition in conditions}

    def spells(one: str) -> str | None:
        return declared[one].name if one in declared and declared[one].spelling else None

    own = spells(option)
    others = (one for one in given if option in excluded_by(one) or (own and own == spells(one)))
    return not excluded_by(option).isdisjoint(given) or any(others)


def _model_in(root: Path, step: str) -> tuple[Path | None, ModelSettings | None]:
    """Return the newest checkpoint that holds its model, and the model; ``None``: there is none.

    ``step`` names the checkpoint of an iteration instead.

    Raises:
        DamagedError: there are checkpoints, but none holds its model.
    """
    found = [int(step)] if step.isdigit() else folder.candidates(root)
    problem = None
    for iteration in found:
        where = folder.folder_of(root, iteration)
        problem = folder.problem_of(where, [COMMON])
        model = None if problem else read_common(where).get("model")
        if isinstance(model, dict):
            try:
                return where, read_model(model, passes_over_unknown=True)
            except (TypeError, ValueError) as error:
                raise DamagedError(f"{where} {error}") from error
    if found:
        raise DamagedError(problem or f"no checkpoint in {root} tells its model")
    return None, None
