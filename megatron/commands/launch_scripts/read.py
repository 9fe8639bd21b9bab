"""From a file to the trainings that it starts: a shell script, or a configuration."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from megatron.commands.launch_scripts.faults import LARGEST_FILE
from megatron.commands.launch_scripts.launches import Launch
from megatron.commands.launch_scripts.page import Source
from megatron.commands.launch_scripts.walk import Script, read_script
from megatron.native.files import FileKindError, read_bytes

_CONFIGS: Final = (".toml", ".yaml", ".yml")


def read_source(
    path: Path, given: Mapping[str, str], *, has_model: bool = False
) -> tuple[Source, tuple[Launch, ...]]:
    """Read a file; nothing of it is run.

    Args:
        path: a shell script, or with its ending .toml or .yaml a configuration.
        given: values of the script's variables.
        has_model: whether the user tells the sizes of the model, which a configuration may not.

    Returns:
        How the file was read, and its trainings, one at least.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: it is no text, too large, or starts no training; or it cannot be understood.
    """
    text = _text(path)
    try:
        if path.suffix.lower() in _CONFIGS:
            from megatron.commands.launch_scripts.configs import read_config

            return read_config(path, text, given, has_model=has_model)
        script = read_script(text, given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not script.launches:
        raise ValueError(f"{path}: {_nothing(script)}")
    source = Source(
        str(path), script.holes, script.notes, script.assumed, script.defaults, script.exported
    )
    return source, script.launches


def _text(path: Path) -> str:
    """Return the text of a file, with line ends of Unix.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no text, or too large.
    """
    try:
        content = read_bytes(path, LARGEST_FILE)
    except FileKindError as error:
        raise ValueError(
            f"{path} {error.fault}: give a launch script or a configuration"
        ) from error
    if b"\0" in content:
        raise ValueError(f"{path} is no text: there are zero bytes in it; give a launch script")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("latin-1")  # comments may be in any encoding
    return text.replace("\r\n", "\n")


def _nothing(script: Script) -> str:
    """Return the line on a script without a training, with the way out."""
    others = ", ".join(script.others)
    way = f"; it uses {others}: give that script" if others else ""
    return (
        "no training is started in it: no line with a program (pretrain_gpt.py) and at least two "
        f"flags of Megatron-LM, such as --num-layers and --micro-batch-size{way}"
        + "".join(f"\n{note}" for note in script.notes)
    )
