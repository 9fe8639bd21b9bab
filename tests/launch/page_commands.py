"""Runs the commands of a page of the documentation, as a reader would."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PATIENCE: Final = 180
"""Seconds for a block of commands."""


def blocks(page: Path) -> list[str]:
    """The blocks of commands of a page, in its order."""
    return re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def run_page(name: str, folder: Path) -> dict[str, str]:
    """Run the commands of ``docs/NAME`` where a reader's files are.

    Args:
        name: of the page.
        folder: gets links to what a reader has in the repository.

    Returns:
        What each block prints, in their order.
    """
    for own in ("docs", "tools", "pretrain_gpt.py"):
        (folder / own).symlink_to(ROOT / own)
    found = blocks(ROOT / "docs" / name)
    printed = {block: _run(block, folder) for block in found}
    assert len(printed) == len(found), "two blocks are the same"
    return printed


def _run(commands: str, folder: Path) -> str:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
    return done.stdout
