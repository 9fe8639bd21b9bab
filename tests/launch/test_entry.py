"""Commands where what they need is missing: the last line says what to do."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("pretrain_gpt.py", "tools/checkpoint.py", "tools/sample_data.py")
TOOLS = (
    "benchmark",
    "checkpoint_benchmark",
    "emulate",
    "flags_page",
    "launch_lines_page",
    "replicas_at_scale",
)


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        *((script, arguments) for script in SCRIPTS for arguments in ([], ["--help"])),
        *((f"tools/{tool}.py", ["--help"]) for tool in TOOLS),
    ],
    ids=str,
)
def test_without_the_environment_one_line_says_what_makes_it(
    script: str, arguments: list[str]
) -> None:
    """As with a Python that has its standard library alone."""
    command = [sys.executable, "-S", "-E", str(ROOT / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert " has no module " in line
    assert "bash tools/setup_venv.sh makes" in line
    assert (ROOT / "tools/setup_venv.sh").is_file()
    assert "source .venv/bin/activate" in line


def test_a_fault_of_the_project_itself_keeps_its_traceback() -> None:
    """As where a file of it was not copied: no environment would help."""
    code = (
        "import runpy, sys; sys.modules['megatron.run.command_line'] = None; "
        f"runpy.run_path({str(ROOT / 'pretrain_gpt.py')!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ModuleNotFoundError: import of megatron.run.command_line halted" in done.stderr
