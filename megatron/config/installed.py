"""The rules about packages that only some flags need: each is there, or how to install it is told.

A missing package would be found by the first rank when all have met; here it is found before.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Final

from megatron.config.declare import Flags
from megatron.config.record_flags import RecordFlags

TENSORBOARD: Final = ("tensorboard", "tensorboardX")
"""Packages that write for TensorBoard; the first that is installed does it."""


def is_installed(package: str) -> bool:
    """Whether a package can be imported; a folder of records that is named so is none."""
    found = find_spec(package)
    return found is not None and found.origin is not None


def tensorboard_rule(flags: Flags) -> Iterator[str]:
    """``--tensorboard-dir`` needs a package that writes for TensorBoard."""
    if flags[RecordFlags].tensorboard_dir is not None and not any(map(is_installed, TENSORBOARD)):
        yield (
            f"--tensorboard-dir {flags[RecordFlags].tensorboard_dir}: neither "
            f"{' nor '.join(TENSORBOARD)} is installed: pip install tensorboard, or use --log-jsonl"
        )


def wandb_rule(flags: Flags) -> Iterator[str]:
    """``--wandb-project`` needs the client of Weights & Biases."""
    if flags[RecordFlags].wandb_project is not None and not is_installed("wandb"):
        yield (
            f"--wandb-project {flags[RecordFlags].wandb_project}: wandb is not installed: "
            "pip install wandb, or use --log-jsonl or --tensorboard-dir"
        )
