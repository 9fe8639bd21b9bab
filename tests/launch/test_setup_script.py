"""tools/setup_venv.sh installs once, again when it must, and survives interruption and company.

The script runs in a copy of the few files it reads, with a stand-in for Python that makes empty
environments, and notes what pip would have installed.
"""

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FAKE_PYTHON = """#!/bin/sh
case "$1 $2" in
  "-m venv")
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    ;;
  "-m pip")
    echo "$MEGATRON_EXTENSIONS $*" >>"$PIP_LOG"
    echo "Collecting everything"
    sleep "${PIP_SECONDS:-0}"
    touch "$(dirname "$0")/half_installed"
    [ -z "$PIP_FAILS" ] || [ "${*%-e .}" = "$*" ] || { echo "no room on this disk"; exit 1; }
    rm "$(dirname "$0")/half_installed"
    ;;
  "-m megatron.native.build") echo "compiles" >>"$PIP_LOG" ;;
  "meanwhile.py "*) echo "$*" >>"$PIP_LOG"; [ -z "$MEANWHILE_FAILS" ] || exit 1 ;;
  "--version "*) echo "Python 3.9.1" ;;
  *version_info*) [ -z "$TOO_OLD" ] ;;
esac
"""


class Checkout:
    """A copy of what the script reads, and a Python to run it with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkout"
        (self.folder / "tools").mkdir(parents=True)
        for name in ("tools/setup_venv.sh", "setup.py", "constraints.txt"):
            shutil.copy(ROOT / name, self.folder / name)
        self.python = folder / "python"
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)
        self.log = folder / "pip.log"

    @property
    def venv(self) -> Path:
        return self.folder / ".venv"

    def setup(self, *extras: str, **variables: str) -> subprocess.CompletedProcess[str]:
        variables = {"PYTHON": str(self.python), "PIP_LOG": str(self.log), **variables}
        environment = {"PATH": os.environ["PATH"], **variables}
        command = ["bash", str(self.folder / "tools/setup_venv.sh"), *extras]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    def calls(self) -> list[str]:
        """Return what was called, every call of pip with the variable that it got."""
        return self.log.read_text().splitlines() if self.log.exists() else []

    def installations(self) -> list[str]:
        """Return the arguments of every call of pip that installs this project."""
        return [call for call in self.calls() if " -e ." in call]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_the_first_call_installs_under_the_constraints_and_the_second_only_looks(
    checkout: Checkout,
) -> None:
    first, second = checkout.setup(), checkout.setup()
    assert first.stdout == second.stdout == f"{checkout.venv}\n"
    assert f"source {checkout.venv}/bin/activate" in first.stderr
    assert second.stderr == ""
    (installation,) = checkout.installations()
    assert installation.endswith("-c constraints.txt -e .")
    assert installation.startswith("apart "), "pip compiles no C++, other work does beside it"
    assert "compiles" in checkout.calls()


@pytest.mark.parametrize("name", ["setup.py", "constraints.txt"])
def test_changed_requirements_are_installed(checkout: Checkout, name: str) -> None:
    checkout.setup()
    with (checkout.folder / name).open("a") as file:
        file.write("# changed\n")
    checkout.setup()
    checkout.setup()
    assert len(checkout.installations()) == 2


def test_extras_are_added_and_cover_what_is_less(checkout: Checkout) -> None:
    checkout.setup()
    checkout.setup("test,tools")
    checkout.setup("test,tools")
    checkout.setup()
    assert [words.split()[-1] for words in checkout.installations()] == [".", ".[test,tools]"]


def test_an_interrupted_setup_is_done_again_from_the_start(checkout: Checkout) -> None:
    failed = checkout.setup(PIP_FAILS="1")
    assert failed.returncode != 0
    assert failed.stdout == ""
    assert "run the same command again" in failed.stderr
    assert f"{checkout.folder}/.cache/setup.log" in failed.stderr
    assert "no room on this disk" in failed.stderr
    assert (checkout.venv / "bin/half_installed").exists()
    again = checkout.setup()
    assert again.returncode == 0
    assert not (checkout.venv / "bin/half_installed").exists()
    assert len(checkout.installations()) == 2


def test_an_environment_whose_python_is_gone_is_made_anew(checkout: Checkout) -> None:
    checkout.setup()
    (checkout.venv / "bin/python").unlink()
    assert checkout.setup().returncode == 0
    assert (checkout.venv / "bin/python").exists()


def test_somebody_elses_environment_is_not_removed(checkout: Checkout) -> None:
    (checkout.venv / "bin").mkdir(parents=True)
    (checkout.venv / "bin/python").write_text("#!/bin/sh\nexit 1\n")
    (checkout.venv / "bin/python").chmod(0o755)
    done = checkout.setup()
    assert done.returncode != 0
    assert "was not made by this script" in done.stderr
    assert (checkout.venv / "bin/python").exists()


def test_of_two_at_once_one_installs(checkout: Checkout) -> None:
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(checkout.setup, PIP_SECONDS="0.3") for _ in range(2)]
    assert [done.result().returncode for done in both] == [0, 0]
    assert len(checkout.installations()) == 1


def test_an_old_python_is_refused(checkout: Checkout) -> None:
    refused = checkout.setup(TOO_OLD="1")
    assert refused.returncode != 0
    assert "Python 3.9.1" in refused.stderr
    assert "PYTHON=python3.12" in refused.stderr
    assert not checkout.venv.exists()


def test_no_python_is_refused(checkout: Checkout) -> None:
    refused = checkout.setup(PYTHON="python9")
    assert refused.returncode != 0
    assert "no python9" in refused.stderr


def test_an_own_environment_is_used_as_it_is(checkout: Checkout, tmp_path: Path) -> None:
    own = tmp_path / "own"
    refused = checkout.setup(VENV=str(own))
    assert refused.returncode != 0
    assert f"VENV={own}" in refused.stderr
    (own / "bin").mkdir(parents=True)
    shutil.copy(checkout.python, own / "bin/python")
    assert checkout.setup(VENV=str(own)).stdout == f"{own}\n"
    assert checkout.installations() == []


def test_pip_is_quiet_and_each_step_says_how_long_it_takes(checkout: Checkout) -> None:
    told = checkout.setup().stderr
    assert "Collecting everything" not in told
    assert "Collecting everything" in (checkout.folder / ".cache/setup.log").read_text()
    steps = re.findall(r"^([1-4])/4  .*(?:second|minute| s\b)", told, re.MULTILINE)
    assert steps == ["1", "2", "3", "4"], told
    assert "about 2 minutes" in told
    assert f"go to {checkout.folder}/.cache/setup.log" in told


def test_a_step_that_takes_long_says_what_it_does(checkout: Checkout) -> None:
    told = checkout.setup(PIP_SECONDS="1.5", TELL_EVERY="0.5").stderr
    assert re.search(r"^ +\d+ s: Collecting everything$", told, re.MULTILINE), told


def test_work_runs_beside_the_largest_packages_and_may_fail(checkout: Checkout) -> None:
    done = checkout.setup(MEANWHILE="meanwhile.py --size 8k", MEANWHILE_FAILS="1")
    assert done.returncode == 0
    assert "meanwhile.py --size 8k" in checkout.calls()
    assert "meanwhile.py runs" in done.stderr
    again = checkout.setup(MEANWHILE="meanwhile.py --size 8k")
    assert again.stderr == ""
    assert checkout.calls().count("meanwhile.py --size 8k") == 1, "only beside an installation"


def test_the_first_packages_are_all_but_the_largest() -> None:
    script = (ROOT / "tools/setup_venv.sh").read_text()
    (light,) = re.findall(r"^light=\((.*)\)$", script, re.MULTILINE)
    (required,) = re.findall(
        r"install_requires=\[(.*?)\]", (ROOT / "setup.py").read_text(), re.DOTALL
    )
    assert {*light.split(), "torch"} == set(re.findall(r'"([\w-]+)>=', required))


def test_every_requirement_is_pinned_exactly() -> None:
    """Without its pin, torch alone would draw in other gigabytes than were tested."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split(";")[0] for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if pin.count("==") != 1] == []
    pinned = {pin.split("==")[0].lower().replace("_", "-") for pin in pins}
    asked = set(re.findall(r'"([\w-]+)>=', (ROOT / "setup.py").read_text()))
    assert asked
    assert asked <= pinned
