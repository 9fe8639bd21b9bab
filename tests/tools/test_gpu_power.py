"""A GPU's power and clock beside every section of its report, by a stand-in of ``nvidia-smi``."""

import json
import time
from pathlib import Path

import pytest

from tools import gpu_report
from tools.gpu_report import PARTS, Part, main, run_part
from tools.gpu_sections.power import PowerLog, in_words

SAYS = r"""#!/bin/sh
echo "$@" > "{arguments}"
for line in "80.00, 345, 700.00, 31" "610.50, 1755, 700.00, 58" "[N/A], 1, 700.00, 58" \
    "690.50, 1605, 700.00, 64"; do echo "$line"; done
exec sleep 600
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put an ``nvidia-smi`` before all others that gives four readings; return its arguments."""
    folder, arguments = tmp_path / "bin", tmp_path / "arguments"
    folder.mkdir()
    script = folder / "nvidia-smi"
    script.write_text(SAYS.format(arguments=arguments))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    return arguments


def read(log: PowerLog, number: int) -> None:
    """Wait until the log has so many readings."""
    until = time.monotonic() + 60
    while len(log.readings) < number and time.monotonic() < until:
        time.sleep(0.01)


def test_readings_are_those_of_the_driver(driver: Path) -> None:
    with PowerLog() as log:
        read(log, 3)
    assert [(own.watts, own.megahertz) for own in log.readings] == [
        (80.0, 345.0),
        (610.5, 1755.0),
        (690.5, 1605.0),
    ]
    asked = driver.read_text()
    assert "power.draw,clocks.sm" in asked
    assert "--id=3" in asked
    assert in_words(log.readings) == (
        "Power while busy (2 of 3 readings): 650 W in the mean, 690 W at most of 700 W that it may "
        "draw, at most 64 degrees Celsius. Clock of the multiprocessors: 1680 MHz in the mean, "
        "1605 to 1755."
    )


def test_a_machine_without_the_tool_says_so() -> None:
    with PowerLog("no-such-tool-of-a-driver") as log:
        pass
    assert log.readings == []
    assert "not known, because nvidia-smi" in in_words(log.readings)


def test_every_section_of_a_gpu_has_its_power(
    driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a section that fails: here there is no GPU."""

    def alone(name: str, part: Part, device: str, seconds: float) -> gpu_report.Told:
        time.sleep(0.5)
        return gpu_report.Told(part.title, ["a line"], {}, 1.0, failed=name == "links")

    monkeypatch.setattr(gpu_report, "_run_alone", alone)
    with pytest.raises(SystemExit, match="1"):
        main(["--out", str(tmp_path / "report"), "--only", "machine", "links"])
    found = json.loads((tmp_path / "report/report.json").read_text())
    text = (tmp_path / "report/report.md").read_text()
    assert text.count("Power while busy") == 2
    for name in ("machine", "links"):
        assert [own[1] for own in found[name]["power"]] == [80.0, 610.5, 690.5]
    assert run_part("machine", PARTS["machine"], "cpu", 1.0).power is None
