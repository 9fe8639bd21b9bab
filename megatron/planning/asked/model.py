"""The model that a plan is asked for: from Hugging Face's ``config.json`` to words of flags.

No weights are needed, and no tensor is read.
"""

from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path

from megatron.checkpoint.foreign.families import family_of
from megatron.checkpoint.foreign.fields import Fields
from megatron.checkpoint.foreign.hugging_face import CONFIG
from megatron.config.model_words import model_flags
from megatron.model.config import ModelConfig


@dataclass(frozen=True)
class AskedModel:
    """A model by the flags of ``pretrain_gpt.py`` that make it.

    Attributes:
        words: the flags with their values, such as ``("--num-layers", "32", ...)``, with
            ``--vocab-size``.
        model: the same model as the import of its weights would give.
        origin: the file that tells of the model.
    """

    words: tuple[str, ...]
    model: ModelConfig = field(repr=False)
    origin: Path


def model_of(path: Path, seq_length: int | None = None) -> AskedModel:
    """Return the model of a ``config.json``.

    Args:
        path: the file, or the folder that has it.
        seq_length: tokens of a training sample; ``None``: as many as the model has positions.

    Raises:
        ForeignError: there is no such file, it is damaged, or this program has no such model. The
            message names the field and the way out, as that of the import does.
    """
    origin = path / CONFIG if path.is_dir() else path
    config = Fields.read(origin)
    model = family_of(config).model_of(config, seq_length)
    flags = model_flags(asdict(model))
    words = chain.from_iterable([option, *values] for option, values in flags.items())
    return AskedModel((*words, "--vocab-size", str(model.vocab_size)), model, origin)
