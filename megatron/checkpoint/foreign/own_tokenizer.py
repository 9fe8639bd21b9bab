"""The tokenizer beside a model of Hugging Face's form, which an import remembers."""

from dataclasses import replace
from pathlib import Path

from megatron.data.tokenizers.hugging_face import HuggingFaceTokenizer
from megatron.data.tokenizers.settings import TokenizerSettings
from megatron.model.settings import ModelSettings


def tokenizer_beside(folder: Path, model: ModelSettings) -> tuple[TokenizerSettings | None, str]:
    """Return the tokenizer of a folder, and a line about it for the user.

    Entries of the model that the tokenizer lacks are added to the vocabulary.

    Args:
        folder: folder of the model.
        model: the model.

    Returns:
        The settings; ``None``: the folder has no tokenizer, or none that this program reads, and
        the line says why. Without ``tokenizer.json`` the line is empty.
    """
    if not (folder / "tokenizer.json").is_file():
        return None, ""
    used = TokenizerSettings("HuggingFaceTokenizer", folder)
    try:
        entries = HuggingFaceTokenizer(used).vocab_size
    except ValueError as error:
        return None, f"the checkpoint has no tokenizer: {error}"
    if entries > model.vocab_size:
        return None, (
            f"the checkpoint has no tokenizer: that of {folder} has {entries} entries, and the "
            f"model {model.vocab_size}"
        )
    if entries < model.vocab_size:
        used = replace(used, vocab_size=model.vocab_size)
    return used, "the checkpoint has the folder's tokenizer: it needs no flag with --load"
