"""From a configuration that is plain data to a training: TOML of torchtitan, YAML of others.

A YAML file has the arguments of Megatron-LM under their own names, as Megatron-Bridge's and NeMo's
do, or flags as keys (``--num-layers: 32``), as the model zoo of mixtures does. Names of NeMo with
other words are translated by a table; a key that no flag has is told.
"""

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from megatron.foreign.launches import Launch, Ranks
from megatron.foreign.page import Source
from megatron.foreign.torchtitan import Translation, is_torchtitan, translated
from megatron.foreign.values import Hole, Holes
from megatron.run.foreign.answers import ANSWERS
from megatron.run.topics import DECLARED

_MOST_KEYS: Final = 5_000
"""Keys of the largest configuration; an alias in YAML may stand for any number of them."""

_DEEPEST: Final = 20

_INTERPOLATED: Final = re.compile(r"\$\{([A-Za-z_]\w*)\}")

_NAMES: Final = {
    "num_moe_experts": "--num-experts",
    "layernorm_epsilon": "--norm-epsilon",
    "activations_checkpoint_granularity": "--recompute-granularity",
    "activations_checkpoint_method": "--recompute-method",
    "activations_checkpoint_num_layers": "--recompute-num-layers",
    "sequence_length": "--seq-length",
    "max_steps": "--train-iters",
    "gradient_clip_val": "--clip-grad",
    "val_check_interval": "--eval-interval",
    "limit_val_batches": "--eval-iters",
    "log_every_n_steps": "--log-interval",
    "splits_string": "--split",
    "data_prefix": "--data-path",
    "warmup_steps": "--lr-warmup-iters",
    "tokenizer.type": "--tokenizer-type",
    "tokenizer.model": "--tokenizer-model",
    "tokenizer.vocab_file": "--vocab-file",
    "tokenizer.merge_file": "--merge-file",
}
"""Keys with another name than their flag."""

_WHEN: Final[Mapping[tuple[str, object], tuple[str, ...]]] = {
    ("share_embeddings_and_output_weights", False): ("--untie-embeddings-and-output-weights",),
    ("share_embeddings_and_output_weights", True): (),
    ("add_bias_linear", False): ("--disable-bias-linear",),
    ("add_bias_linear", True): (),
    ("gated_linear_unit", True): ("--swiglu",),
    ("gated_linear_unit", False): (),
    ("grad_reduce_in_fp32", True): ("--accumulate-allreduce-grads-in-fp32",),
    ("grad_reduce_in_fp32", False): ("--grad-reduce-in-bf16",),
    ("mixed_precision", "bf16_mixed"): ("--bf16",),
    ("mixed_precision", "fp16_mixed"): ("--fp16",),
    ("precision", "bf16"): ("--bf16",),
    ("precision", "bf16-mixed"): ("--bf16",),
    ("precision", "16"): ("--fp16",),
    ("precision", 16): ("--fp16",),
    ("precision", "16-mixed"): ("--fp16",),
    ("sched.name", "CosineAnnealing"): ("--lr-decay-style", "cosine"),
    ("optim.name", "distributed_fused_adam"): (
        *("--optimizer", "adam", "--use-distributed-optimizer"),
        *("--overlap-grad-reduce", "--overlap-param-gather"),
    ),
    ("optim.name", "fused_adam"): ("--optimizer", "adam"),
}
"""Keys with a value, and the flags that say the same; a key of two names is within a section."""

_ACTIVATIONS: Final[Mapping[tuple[str, bool], tuple[str, ...]]] = {
    ("silu", True): ("--swiglu",),
    ("gelu", True): ("--geglu",),
    ("quick_gelu", True): ("--quick-geglu",),
    ("gelu", False): (),
    ("relu", False): ("--relu",),
    ("squared_relu", False): ("--squared-relu",),
}
"""The function of an MLP and whether it is a gate, and the flags that say the same."""

_DTYPES: Final = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}

_OTHER_SECTIONS: Final = frozenset(
    {
        *("ENV_VARS", "run", "exp_manager", "profiling", "nsys_profile", "hydra", "defaults"),
        *("_target_", "straggler", "ft", "inprocess_restart", "checkpoint_callback_params"),
    }
)
"""Sections that say nothing of a training."""


class Named(str):
    """The name of a function or of an object, in the place of a value."""

    def __repr__(self) -> str:
        return str(self)


def read_config(
    path: Path, text: str, given: Mapping[str, str], *, has_model: bool
) -> tuple[Source, tuple[Launch, ...]]:
    """Return the training of a configuration.

    Args:
        path: the file, by whose ending TOML is told from YAML.
        text: its text.
        given: values of variables that it names as ``${NAME}``.
        has_model: whether the user tells the sizes of the model.

    Raises:
        ValueError: the file is damaged, of another kind, or needs a package that is not there.
    """
    is_toml = path.suffix.lower() == ".toml"
    table = _toml(text) if is_toml else _yaml(text)
    if not isinstance(table, Mapping):
        raise ValueError("there are no keys in it: give the configuration of a training")
    holes = Holes()
    if is_toml and not is_torchtitan(table):
        raise ValueError(
            "a TOML file is read as one of torchtitan, with the sections [model] and [training]; "
            "give such a file, or a launch script"
        )
    found = translated(table, has_model=has_model) if is_toml else flags_of_keys(table)
    if not is_toml and len([w for w in found.words if w.startswith("--")]) < 2:
        raise ValueError("no key in it is a flag of Megatron-LM: give the file of a training")
    notes = list(found.notes)
    if found.left:
        notes.append(f"not translated: {', '.join(found.left)}")
    words = tuple(_filled(word, given, holes) for word in found.words)
    program = "a configuration of torchtitan" if is_toml else "a configuration with flags"
    launch = Launch(0, "torchrun", found.ranks, program, words)
    return Source(str(path), holes, tuple(notes)), (launch,)


def _toml(text: str) -> Any:
    """Return the table of a TOML file.

    Raises:
        ValueError: the file is damaged, or this Python reads no TOML.
    """
    try:
        tomllib = importlib.import_module("tomllib")
    except ModuleNotFoundError:
        raise ValueError("Python reads TOML from version 3.11 on: take a newer Python") from None
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("tables are nested too deeply") from None


def _yaml(text: str) -> Any:
    """Return the data of a YAML file, of which nothing but plain values is built.

    Raises:
        ValueError: the file is damaged, or the package that reads YAML is not there.
    """
    try:
        yaml = importlib.import_module("yaml")
    except ModuleNotFoundError:
        raise ValueError("a YAML file needs the package PyYAML: pip install pyyaml") from None
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        first = str(error).split("\n")[0] or "nested too deeply"
        raise ValueError(f"is no YAML that can be read: {first}") from None


def flags_of_keys(table: Mapping[Any, Any]) -> Translation:
    """Return the flags of keys, in sections or without."""
    found = Translation()
    trainer = table.get("trainer")
    if isinstance(trainer, Mapping):
        found.ranks = Ranks(_count(trainer.get("num_nodes")), _count(trainer.get("devices")))
    seen: dict[str, list[str]] = {}
    table = {**table, "model": _with_activation(table["model"])} if "model" in table else table
    for keys, value in _leaves(table):
        words = _words(keys, value)
        if words is None:
            found.left.append(f"{'.'.join(keys)} = {value!r}")
        elif words and seen.get(words[0]) != words:
            seen[words[0]] = words
            found.words += words
    return found


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _leaves(table: Mapping[Any, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the keys of every value, in order.

    Raises:
        ValueError: there are too many.
    """
    count, waiting = 0, list[tuple[tuple[str, ...], Any]]([((), table)])
    while waiting:
        keys, value = waiting.pop()
        count += 1
        if count > _MOST_KEYS or len(keys) > _DEEPEST:
            raise ValueError(f"more than {_MOST_KEYS:,} keys, or {_DEEPEST} levels of them: cut it")
        if isinstance(value, Mapping) and (name := _name_of(value)) is not None:
            yield keys, name
        elif isinstance(value, Mapping):
            own = [((*keys, str(name)), inner) for name, inner in value.items()]
            waiting += reversed([leaf for leaf in own if leaf[0][-1] not in _OTHER_SECTIONS])
        else:
            yield keys, value


def _name_of(value: Mapping[Any, Any]) -> str | None:
    """Return the name that stands for an object of Python; ``None``: the values are a section.

    ``ConfigContainer.to_yaml`` of Megatron-Bridge writes a function or a type of numbers as
    ``_target_`` with ``_call_: false``, a member of an enumeration with its ``_name_``, and a
    function with arguments with ``_partial_``.
    """
    target = value.get("_target_")
    if not isinstance(target, str):
        return None
    if isinstance(value.get("_name_"), str) and "_args_" in value:
        return str(value["_name_"])
    if value.get("_call_") is False or value.get("_partial_") is True:
        return _DTYPES.get(target) or Named(target)
    return None


def _with_activation(model: Any) -> Any:
    """Return the section of a model with the flag of its activation in place of two keys."""
    if not isinstance(model, Mapping):
        return model
    function = model.get("activation_func")
    name = _name_of(function) if isinstance(function, Mapping) else function
    if not isinstance(name, Named):
        return model
    words = _ACTIVATIONS.get((name.rpartition(".")[2], model.get("gated_linear_unit") is True))
    if words is None:
        return {**model, "activation_func": name}
    own = {n: v for n, v in model.items() if n not in ("activation_func", "gated_linear_unit")}
    return own | dict.fromkeys(words, True)


def _words(keys: tuple[str, ...], value: Any) -> list[str] | None:
    """Return the flag of a key; empty: it needs none; ``None``: there is no such flag."""
    key, within = keys[-1], ".".join(keys[-2:])
    if value is None or key in ("devices", "num_nodes"):
        return []
    for name in (within, key):
        if isinstance(value, (bool, str, int)) and (name, value) in _WHEN:
            return list(_WHEN[name, value])
    if isinstance(value, Named):
        return None
    if key == "betas" and isinstance(value, list) and len(value) == 2:
        return ["--adam-beta1", str(value[0]), "--adam-beta2", str(value[1])]
    if key.startswith("--"):
        return _flag(key, value)
    option = _NAMES.get(within) or _NAMES.get(key) or f"--{key.replace('_', '-')}"
    if value is False:
        negated = f"--no-{option[2:]}"
        if _is_known(negated):
            return [negated]
    return _flag(option, value) if _is_known(option) else ([] if value is False else None)


def _is_known(option: str) -> bool:
    return option in DECLARED or option in ANSWERS.exact


def _flag(option: str, value: Any) -> list[str]:
    """Return a flag with its value."""
    if isinstance(value, bool):
        return [option] if value else []
    if isinstance(value, list):
        several = option in DECLARED and DECLARED[option].takes_several
        return [option, *map(str, value)] if several else [option, _joined(value)]
    return [option, str(value)]


def _joined(values: Sequence[object]) -> str:
    return "[" + ",".join(map(str, values)) + "]"


def _filled(word: str, given: Mapping[str, str], holes: Holes) -> str:
    """Return a word with the values of ``${NAME}``; one that is not known is a hole."""
    word = word.replace("\0", "")
    if word in given:
        return given[word]
    if "${" in _INTERPOLATED.sub("", word):  # a function, or a key of the file
        return holes.mark(Hole(word, "", 0))

    def value(found: re.Match[str]) -> str:
        name = found[1]
        return given[name] if name in given else holes.mark(Hole(f"${{{name}}}", name, 0))

    return _INTERPOLATED.sub(value, word)
