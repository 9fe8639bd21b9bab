"""The model that a plan is asked for: from Hugging Face's ``config.json`` to words of flags.

No weights are needed, and no tensor is read. So a file may say that its weights are quantised,
which only an import would have to undo.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Final

from megatron.checkpoint.foreign.families import family_of
from megatron.checkpoint.foreign.fields import Fields
from megatron.checkpoint.foreign.hugging_face import CONFIG
from megatron.checkpoint.foreign.layouts import ForeignError
from megatron.model.settings import ModelSettings

OF_WEIGHTS: Final = "quantization_config"
"""A field that tells of the weights beside the file, and nothing of the model."""

OR_FLAGS: Final = "give the model's flags (--num-layers N ...) in place of --model"
"""The way out for a model that no reader knows."""


@dataclass(frozen=True)
class AskedModel:
    """A model by the flags of ``pretrain_gpt.py`` that make it.

    Attributes:
        flags: the flags, each with the words behind it; ``--vocab-size`` is the last one.
        model: the same model as the import of its weights would give.
        origin: the file that tells of the model.
        notes: differences between the file and the model that its user should know.
    """

    flags: Mapping[str, Sequence[str]]
    model: ModelSettings = field(repr=False)
    origin: Path
    notes: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """The words that make the model, such as ``("--num-layers", "32", ...)``."""
        return self.words_without(())

    def words_without(self, options: Collection[str]) -> tuple[str, ...]:
        """Return the words, without those of some flags."""
        own = ([name, *words] for name, words in self.flags.items() if name not in options)
        return tuple(chain.from_iterable(own))


def model_of(path: Path, seq_length: int | None = None) -> AskedModel:
    """Return the model of a ``config.json``.

    Args:
        path: the file, or the folder that has it.
        seq_length: tokens of a training sample; ``None``: as many as the model has positions.

    Raises:
        ForeignError: there is no such file, it is damaged, or this program has no such model. The
            message names the field, in the words of the import, and the way out.
    """
    if not path.exists():
        raise ForeignError(
            f"{path}: there is no such file or folder. Give the folder of a model in Hugging "
            f"Face's form, or its {CONFIG}; a model's page has the file, and no weights are "
            f"needed. Or {OR_FLAGS}"
        )
    origin = path / CONFIG if path.is_dir() else path
    config, notes = _without_weights(Fields.read(origin))
    try:
        model = family_of(config).model_of(config, seq_length)
    except ForeignError as error:
        raise ForeignError(f"{error}; or {OR_FLAGS}") from error
    flags = {**model.flags(), "--vocab-size": [str(model.vocab_size)]}
    return AskedModel(flags, model, origin, notes)


def _without_weights(config: Fields) -> tuple[Fields, tuple[str, ...]]:
    """Return the fields without those of the weights, and a note if there are any."""
    if OF_WEIGHTS not in config:
        return config, ()
    kept = {name: value for name, value in config.all.items() if name != OF_WEIGHTS}
    note = (
        f"{config.origin}: the weights are quantised ({OF_WEIGHTS}); the plan is of a training in "
        "16 bits that begins with random weights, if no flag asks for 8 bits"
    )
    return Fields(kept, config.origin), (note,)
