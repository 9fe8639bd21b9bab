"""The image has what setup.py asks for, and starts commands that exist."""

import re
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
    installed = re.search(r"pip install --no-cache-dir (\w[\w .-]*) \\", DOCKERFILE)
    assert installed is not None
    assert set(installed[1].split()) == wanted - OF_THE_IMAGE
    assert "--no-deps -e ." in DOCKERFILE


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
