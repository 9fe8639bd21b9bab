"""The image has what setup.py asks for, and starts commands that exist."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
DOCKERFILE: Final = (ROOT / "Dockerfile").read_text()

OF_THE_IMAGE: Final = {"torch", "numpy"}
"""What NVIDIA builds itself, and pip must not replace."""


def test_it_installs_what_setup_asks_for_and_the_image_lacks() -> None:
    listed = re.search(r"install_requires=\[(.*?)\]", (ROOT / "setup.py").read_text(), re.DOTALL)
    assert listed is not None
    wanted = set(re.findall(r'"([\w.-]+)>=', listed[1]))
    installed = re.search(r"pip --python \S+ install --no-cache-dir (\w[\w .-]*) \\", DOCKERFILE)
    assert installed is not None
    assert set(installed[1].split()) == wanted - OF_THE_IMAGE
    assert "--no-deps -e ." in DOCKERFILE
    tests = re.search(r'"(pytest>=[\d.]+)"', (ROOT / "setup.py").read_text())
    assert tests is not None
    assert f"'{tests[1]}' hypothesis" in DOCKERFILE, "as tests/kernels and tests/conftest.py need"


def commands() -> str:
    """The commands that build the image, of one line each."""
    lines = DOCKERFILE.replace("\\\n", " ").splitlines()
    return "\n".join(line.removeprefix("RUN ") for line in lines if line.startswith("RUN "))


def test_its_environment_starts_ranks_in_itself(tmp_path: Path) -> None:
    """With a PyTorch that lies outside of it, and without a pip, as it may be in the image."""
    home = re.search(r"WORKDIR (\S+)", DOCKERFILE)
    assert home is not None
    [make, *_] = commands().split(" && ")
    [give] = [line for line in commands().splitlines() if "torchrun" in line]
    script = f"set -e\n{make}\n{give}".replace(home[1], str(tmp_path))
    script = script.replace("python -m venv", f"{sys.executable} -m venv")
    subprocess.run(["bash", "-c", script], cwd=tmp_path, check=True)
    assert not (tmp_path / ".venv/bin/pip").exists()
    assert (tmp_path / ".venv/bin/torchrun").read_text().splitlines() == [
        "#!/bin/sh",
        f'exec {tmp_path}/.venv/bin/python -m torch.distributed.run "$@"',
    ]
    assert os.access(tmp_path / ".venv/bin/torchrun", os.X_OK)
    assert "$venv/bin/torchrun" in (ROOT / "pretrain_gpt.sh").read_text()


def test_what_it_names_is_there() -> None:
    named = re.findall(r"(?:bash|python) ([\w/]+\.(?:sh|py))", DOCKERFILE)
    assert {*named} >= {"tools/gpu_report.py", "examples/eight_h100.sh"}
    [command] = re.findall(r'CMD \["bash", "([\w.]+)"\]', DOCKERFILE)
    assert all((ROOT / name).is_file() for name in (*named, command))
    readme = (ROOT / "README.md").read_text()
    settings = re.search(r"VOCAB_PARALLEL=1 VOCAB_SIZE=\w+", readme)
    assert settings is not None
    assert settings[0] in DOCKERFILE, "as in the README"


def test_the_scripts_take_its_environment() -> None:
    home = re.search(r"WORKDIR (\S+)", DOCKERFILE)
    assert home is not None
    assert f"VENV={home[1]}/.venv" in DOCKERFILE
    assert f"PATH={home[1]}/.venv/bin:$PATH" in DOCKERFILE
