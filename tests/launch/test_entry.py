"""pretrain_gpt.py where what it needs is missing: the last line says what to do."""

import subprocess
import sys
from pathlib import Path

import pytest

ENTRY = Path(__file__).resolve().parents[2] / "pretrain_gpt.py"


def run_without_packages(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it with a Python that has its standard library alone."""
    command = [sys.executable, "-S", "-E", str(ENTRY), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd="/")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--dry-run"]])
def test_without_the_environment_one_line_says_what_makes_it(arguments: list[str]) -> None:
    done = run_without_packages(*arguments)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert " has no module torch: " in line
    for way_out in ("tools/setup_venv.sh", "source .venv/bin/activate"):
        assert way_out in line
        named = ENTRY.parent / "tools/setup_venv.sh"
        assert named.is_file()


def test_a_fault_of_the_project_itself_keeps_its_traceback() -> None:
    """As where a file of it was not copied: no environment would help."""
    code = (
        "import runpy, sys; sys.modules['megatron.config.command_line'] = None; "
        f"runpy.run_path({str(ENTRY)!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ModuleNotFoundError: import of megatron.config.command_line halted" in done.stderr
