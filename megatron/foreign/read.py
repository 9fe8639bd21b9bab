"""From a file to the trainings that it starts: a shell script, or a configuration."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from megatron.foreign.launches import Launch
from megatron.foreign.page import Source
from megatron.foreign.sourced import text_of
from megatron.foreign.walk import Script, read_script

_CONFIGS: Final = (".toml", ".yaml", ".yml")


def read_source(
    path: Path, given: Mapping[str, str], *, has_model: bool = False
) -> tuple[Source, tuple[Launch, ...]]:
    """Read a file; nothing of it is run.

    Args:
        path: a shell script, or with its ending .toml, .yaml or .py a configuration.
        given: values of the script's variables.
        has_model: whether the user tells the sizes of the model, which a configuration may not.

    Returns:
        How the file was read, and its trainings, one at least.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: it is no text, too large, or starts no training; or it cannot be understood.
    """
    text = text_of(path)
    try:
        if path.suffix.lower() in _CONFIGS:
            from megatron.foreign.configs import read_config

            return read_config(path, text, given, has_model=has_model)
        if path.suffix.lower() == ".py":
            from megatron.foreign.python_config import read_python

            return read_python(path, text, given, has_model=has_model)
        script = read_script(text, given, path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not script.launches:
        raise ValueError(f"{path}: {_nothing(script)}")
    source = Source(
        str(path), script.holes, script.notes, script.assumed, script.defaults, script.exported
    )
    return source, script.launches


def _nothing(script: Script) -> str:
    """Return the line on a script without a training, with the way out."""
    others = ", ".join(script.others)
    way = f"; it uses {others}: give that script" if others else ""
    return (
        "no training is started in it: no line with a program (pretrain_gpt.py) and at least two "
        f"flags of Megatron-LM, such as --num-layers and --micro-batch-size{way}"
        + "".join(f"\n{note}" for note in script.notes)
    )
