"""Import from and export to folders in Hugging Face's form: config.json and safetensors files.

"Our" names and tensors belong to this program, "their" names and tensors to Hugging Face's form.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron.checkpoint.boxed import BoxedTensor, StreamedTensor
from megatron.checkpoint.choose import read_model
from megatron.checkpoint.foreign.derived import check_tables, told_of, untied
from megatron.checkpoint.foreign.families import FAMILIES, family_for, family_of
from megatron.checkpoint.foreign.family import Family
from megatron.checkpoint.foreign.fields import Fields
from megatron.checkpoint.foreign.layouts import ForeignError, Recipe, recipes
from megatron.checkpoint.foreign.named_files import NamedFiles
from megatron.checkpoint.foreign.tensor_files import Group, TensorFiles, write_folder
from megatron.checkpoint.foreign.weights import Advance, check_finite, write_weights
from megatron.checkpoint.reading import TensorReader, read_boxes
from megatron.checkpoint.train_tensors import WEIGHT
from megatron.data.tokenizers.hugging_face import HuggingFaceTokenizer
from megatron.data.tokenizers.settings import TokenizerSettings
from megatron.model.ownership import LAYERS, WORD_EMBEDDINGS
from megatron.model.settings import ModelSettings
from megatron.native.files import read_bytes
from megatron.parallel.box import whole

CONFIG: Final = "config.json"
TYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Dtypes that an export can write, by Hugging Face's names."""

_ADAPTER: Final = "adapter_config.json"
"""A file by which ``transformers`` finds weights to add to those of a folder."""

_KEPT: Final = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Fields of ``config.json`` that our models lack, and that an export copies."""
_COPIED: Final = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    "chat_template.jinja",
)
"""Text files that belong to a model and that training does not change."""


@dataclass(frozen=True)
class ImportedModel:
    """A model in Hugging Face's form whose tensors were checked.

    Attributes:
        model: configuration of the model.
        recipes: how our tensors are made, by our names.
        files: their tensors, under the names in the recipes.
        notes: differences between the folder and the model that its user should know.
    """

    model: ModelSettings
    recipes: Mapping[str, Recipe]
    files: NamedFiles
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of the tensors to read."""
        return sum(self.files.known(n).size for r in self.recipes.values() for n in r.theirs)


def open_model(folder: Path, seq_length: int | None = None) -> ImportedModel:
    """Return a model that can be imported: all its tensors exist, in the right shapes.

    Args:
        folder: folder with ``config.json`` and safetensors files.
        seq_length: tokens per training sample; ``None``: as many as the model has positions.

    Raises:
        ForeignError: the model is damaged, or of a kind that this program does not support.
    """
    config = Fields.read(folder / CONFIG)
    if (folder / _ADAPTER).exists():
        raise ForeignError(
            f"{folder} has {_ADAPTER}, the changes of a fine-tuning beside the model: merge them "
            "into the weights (merge_and_unload of the package peft) and save that, or remove the "
            "file to import the model without them"
        )
    family = family_of(config)
    model = family.model_of(config, seq_length)
    files = NamedFiles(TensorFiles(folder), family)
    model, notes = _without_lacking_depths(model, files.names)
    _check_depth(folder, model, files.names, family)
    check_tables(model, family.tables, files.tables, files.read_table)
    model, copies, more = untied(model, family.table, files.described(), files.read)
    try:
        wanted = {
            name: recipe.among(files.names) for name, recipe in recipes(model, family.table).items()
        }
    except ValueError as error:  # the sizes in config.json contradict one another
        raise ForeignError(f"{folder / CONFIG}: {error}") from error
    shapes = {
        name: shape for recipe in wanted.values() for name, shape in recipe.their_shapes.items()
    }
    if missing := [name for name in shapes if name not in files.names]:
        raise ForeignError(f"{folder} has no tensor {missing[0]}, which its {CONFIG} asks for")
    if left := sorted(files.names - shapes.keys() - copies):
        raise ForeignError(
            f"{folder} has a tensor {left[0]}, for which a {family.name} model of its {CONFIG} has "
            "no use"
        )
    for name, shape in shapes.items():
        found = files.known(name).shape
        if found != shape:
            raise ForeignError(
                f"{files.known(name).file}: {name} has shape {list(found)}, and {CONFIG} asks for "
                f"{list(shape)}"
            )
    return ImportedModel(model, wanted, files, (*notes, *more, *told_of(model, folder)))


def _without_lacking_depths(
    model: ModelSettings, names: set[str]
) -> tuple[ModelSettings, tuple[str, ...]]:
    """Return a model without multi-token prediction if its files have nothing of it, and a note.

    ``transformers`` saves the main model alone, and its ``config.json`` still tells of the rest.
    """
    first = f"model.layers.{model.num_layers}."
    if not model.further.mtp_num_layers or any(name.startswith(first) for name in names):
        return model, ()
    note = (
        f"{CONFIG} tells of {model.further.mtp_num_layers} layers of multi-token prediction "
        "(num_nextn_predict_layers), and the files have none: the model is imported without"
    )
    return model.replaced(mtp_num_layers=0), (note,)


def _check_depth(folder: Path, model: ModelSettings, names: set[str], family: Family) -> None:
    """Refuse a wrong number of layers early, before the model is built."""
    own = family.table[f"{LAYERS}self_attention.linear_proj.weight"].names[0]
    told = model.num_layers + model.further.mtp_num_layers
    found = sum(own.format(i) in names for i in range(told + 1))
    if found != told:
        more = "more" if found > told else "not as many"
        raise ForeignError(f"{folder}: {CONFIG} tells of {told} layers, and there are {more}")


def import_model(
    opened: ImportedModel,
    root: Path,
    advance: Advance,
    *,
    not_finite: bool = False,
    tokenizer: TokenizerSettings | None = None,
) -> Path:
    """Write a checkpoint of iteration 0 with the weights of a model, in the dtypes of the files.

    Args:
        opened: the model.
        root: folder of checkpoints.
        advance: called with the number of bytes that were read since its last call.
        not_finite: whether weights may be NaN or infinite.
        tokenizer: the model's tokenizer, which the checkpoint remembers; ``None``: none.

    Returns:
        The folder of the checkpoint.

    Raises:
        ForeignError: a tensor cannot be read, or has elements that are not finite.
        SaveError: the checkpoint cannot be written.
    """
    read = partial(_joined, opened, advance, not_finite)
    streamed = {
        f"{WEIGHT}.{name}": StreamedTensor(
            recipe.shape, _type_of(opened.files, recipe), partial(read, recipe)
        )
        for name, recipe in opened.recipes.items()
    }
    return write_weights(root, opened.model, streamed, tokenizer)


def _type_of(files: NamedFiles, recipe: Recipe) -> torch.dtype:
    """Return the narrowest dtype that holds the elements of all tensors of a recipe."""
    kinds = [files.known(name).dtype for name in recipe.theirs]
    found = kinds[0]
    for kind in kinds[1:]:
        found = torch.promote_types(found, kind)
    return found


def _joined(opened: ImportedModel, advance: Advance, not_finite: bool, recipe: Recipe) -> Tensor:
    dtype = _type_of(opened.files, recipe)
    parts = {name: opened.files.read(name).to(dtype) for name in recipe.theirs}
    for name, part in parts.items():
        if not not_finite:
            check_finite(part, f"{opened.files.known(name).file}: {name}")
    tensor = recipe.join(list(parts.values()))
    advance(sum(opened.files.known(name).size for name in recipe.theirs))
    return tensor


@dataclass(frozen=True)
class Exported:
    """The content of an export.

    Attributes:
        groups: the tensors.
        texts: texts of other files by name, ``config.json`` among them.
    """

    groups: list[Group]
    texts: Mapping[str, str]

    @property
    def size(self) -> int:
        """Bytes of the tensors to write."""
        return sum(group.size for group in self.groups)

    def write(self, folder: Path, most_bytes: int) -> None:
        """Write the folder; see ``write_folder``."""
        write_folder(folder, self.groups, self.texts, most_bytes)


def plan_export(
    where: Path,
    advance: Advance,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    like: Path | None = None,
    tokenizer: Path | None = None,
) -> Exported:
    """Return the content of an export; tensors are read only when they are written.

    Args:
        where: folder of one checkpoint, which was compared with its manifest.
        advance: called with the number of bytes that were converted since its last call.
        family: name of the family; ``None``: the family of ``like``, or the first family that can
            describe the model.
        dtype: dtype of the tensors; ``None``: as in the checkpoint.
        like: folder of a model whose tokenizer and ids of special tokens are copied too.
        tokenizer: folder of a tokenizer that is copied too.

    Raises:
        ForeignError: the family cannot describe the model, or the tokenizer does not fit it.
        DamagedError: the checkpoint cannot be read.
    """
    model = read_model(where)
    kept = Fields.read(like / CONFIG) if like is not None else None
    chosen = FAMILIES[family] if family else family_of(kept) if kept else family_for(model)
    config = chosen.config_of(model)
    reader = TensorReader(where)
    groups = [
        _group(reader, name, recipe, dtype, advance)
        for name, recipe in recipes(model, chosen.table).items()
    ]
    if kept is not None:
        config |= {name: kept.any(name) for name in _KEPT if name in kept}
    if tokenizer is not None:
        config["eos_token_id"] = _end_of(tokenizer, model)
    written = dtype or _saved(reader, WORD_EMBEDDINGS).properties.dtype
    config["torch_dtype"] = str(written).removeprefix("torch.")
    texts = _texts(like) | _texts(tokenizer)
    return Exported(groups, {CONFIG: json.dumps(config, indent=2) + "\n"} | texts)


def _end_of(folder: Path, model: ModelSettings) -> int:
    """Return the end-of-document id of a tokenizer; refuse a tokenizer larger than the model's."""
    try:
        found = HuggingFaceTokenizer(TokenizerSettings("HuggingFaceTokenizer", folder))
    except ValueError as error:
        raise ForeignError(str(error)) from error
    if found.vocab_size > model.vocab_size:
        raise ForeignError(
            f"{folder} has {found.vocab_size} entries, and the model {model.vocab_size}: give the "
            "tokenizer that it was trained with"
        )
    return found.eod


def _texts(like: Path | None) -> dict[str, str]:
    found = {}
    for path in [like / name for name in _COPIED] if like is not None else []:
        try:
            found[path.name] = read_bytes(path).decode()
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise ForeignError(f"{path} cannot be read ({error})") from error
    return found


def _saved(reader: TensorReader, name: str) -> TensorStorageMetadata:
    """Return the metadata of a weight in one of our checkpoints."""
    known = reader.metadata.state_dict_metadata.get(f"{WEIGHT}.{name}")
    if not isinstance(known, TensorStorageMetadata):
        raise ForeignError(f"{reader.path} has no tensor {WEIGHT}.{name}")
    return known


def _group(
    reader: TensorReader, name: str, recipe: Recipe, dtype: torch.dtype | None, advance: Advance
) -> Group:
    """Return the group of their tensors that are made of one of our tensors."""
    known, saved = _saved(reader, name), f"{WEIGHT}.{name}"
    kind = dtype or known.properties.dtype
    if tuple(known.size) != recipe.shape:
        raise ForeignError(f"{reader.path}: {saved} has another shape than its model")
    sizes = {
        name: torch.Size(shape).numel() * kind.itemsize
        for name, shape in recipe.their_shapes.items()
    }

    def make() -> Mapping[str, Tensor]:
        ours = torch.empty(recipe.shape, dtype=kind)
        boxed = BoxedTensor(ours, recipe.shape, whole(recipe.shape))
        try:
            read_boxes({saved: boxed}, reader, reader.metadata)
        except Exception as error:  # damaged archives raise any exception
            raise ForeignError(f"{reader.path}: {saved} cannot be read ({error})") from error
        made = recipe.split(ours)
        advance(sum(sizes.values()))
        return made

    return Group(sizes, make)
