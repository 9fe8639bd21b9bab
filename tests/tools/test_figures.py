"""Every figure of a page names its source, which has it; tools/figures.py finds them.

Each command that a mark names is parsed by its own program, which then stops.
"""

import importlib
import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest
from harness.marks import full

import megatron.flags.command as command_module
from megatron.flags.command import reading
from megatron.run.command_line import parse
from tools.figures import ROOT, commands, faults, main
from tools.pages.blocks import Figure, blocks, numbers_in

HELD: Final = (
    "README.md",
    "docs/benchmarks/tests.md",
    "docs/choosing-a-schedule.md",
    "docs/clusters.md",
    "docs/coming-from.md",
    "docs/data.md",
    "docs/dry-run.md",
    "docs/eight-bits.md",
    "docs/experts.md",
    "docs/data-options.md",
    "docs/explorer.md",
    "docs/extending.md",
    "docs/from-text-to-model.md",
    "docs/glossary.md",
    "docs/gpus.md",
    "docs/how-it-works.md",
    "docs/hugging-face.md",
    "docs/index.md",
    "docs/latent-attention.md",
    "docs/library.md",
    "docs/long-sequences.md",
    "docs/metrics.md",
    "docs/offload.md",
    "docs/recipes.md",
    "docs/predictions.md",
    "docs/recomputation.md",
    "docs/running.md",
    "docs/schedules.md",
)
"""Pages whose figures all name a source."""

NOT_HELD: Final[Mapping[str, str]] = {
    "LOG.md": "it is the record of what was measured, with its commands, and a source of others",
    "flags.md": "tools/flags_page.py writes it from the declarations, and a test holds it current",
    "launch-lines.md": "tools/launch_lines_page.py writes it, and a test holds it current",
}
"""Pages of docs/ whose figures need no mark, or none yet, with the reason."""


@pytest.mark.parametrize("page", HELD)
def test_every_figure_of_a_page_names_its_source(page: str) -> None:
    assert not faults(ROOT / page), "python -m tools.figures --help says which marks there are"


def test_every_page_is_held_or_has_a_reason_why_not() -> None:
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    apart = {f"docs/{name}" for name in NOT_HELD}
    assert pages <= {*HELD, *apart}
    assert not apart & set(HELD)
    assert all(len(reason.split()) > 5 for reason in NOT_HELD.values())


class _ParsedError(Exception):
    """The words of a command were read without a mistake."""


def _reading_and_stop(*words: Any) -> NoReturn:
    """Read as tools do; then stop the command, which would run for long."""
    mistakes = reading(*words).mistakes
    assert not mistakes, mistakes
    raise _ParsedError


def parsed(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the program of a command read its words, and stop it there."""
    program, *words = shlex.split(command)
    assert program == "python", command
    if words[:2] == ["-m", "pytest"]:
        assert (ROOT / words[2].partition("::")[0]).is_file(), command
        return
    if words[0] == "pretrain_gpt.py":
        parse(words[1:], 1, speak=False)
        return
    name = words[1] if words[0] == "-m" else words[0].removesuffix(".py").replace("/", ".")
    module = importlib.import_module(name)
    given = words[1 + (words[0] == "-m") :]
    assert 'if __name__ == "__main__":' in inspect.getsource(module), command
    if given:
        monkeypatch.setattr(command_module, "reading", _reading_and_stop)
        monkeypatch.setattr(sys, "argv", [name, *given])
        with pytest.raises(_ParsedError):
            module.main(*[given] * len(inspect.signature(module.main).parameters))


MADE: Final = {one for page in HELD for one in commands(ROOT / page)}
COMMANDS: Final = sorted({command for command, _ in MADE})
PRINTED: Final = sorted(
    (command, tuple(sorted(figures, key=lambda own: own.text)))
    for command, figures in MADE
    if figures
)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_beside_figures_is_read_by_its_program(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    parsed(command, monkeypatch)


@pytest.mark.parametrize(
    ("command", "figures"),
    [one if "tools/simulate.py" in one[0] else full(*one) for one in PRINTED],
)
def test_a_command_prints_the_figures_that_its_mark_names(
    command: str, figures: tuple[Figure, ...]
) -> None:
    program, *words = shlex.split(command)
    assert program == "python"
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    numbers = numbers_in(done.stdout)
    assert not [own for own in figures if not own.is_among(numbers)], done.stdout


def test_a_command_with_a_flag_that_is_gone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="gone"):
        parsed("python tools/simulate.py --gone 3", monkeypatch)
    with pytest.raises(ModuleNotFoundError):
        parsed("python tools/gone.py", monkeypatch)


SOURCE: Final = (
    "| time, ms |\n|--:|\n| 21,326 |\n\nIdle 4.9%, 1.59x, 0.1234567 s, 2.5e-03, 3,072 MiB.\n"
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It took 21.3 s.", True),
        ("It took 21.4 s.", False),
        ("It was 1.59 times as fast, with 4.9 % idle.", True),
        ("It was 1.6 times as fast.", True),
        ("It was 1.69 times as fast.", False),
        ("It took 0.12 s.", False),  # of a number so long that it could be any
        ("It took 0.12346 s, 123.46 ms.", True),
        ("It took 4.9 s.", False),  # the source has 4.9 %
        ("It held 3.0 GiB, 3,072 MiB.", True),
        ("It held 3.0 GB.", False),
        ("The losses agree to 2.5e-3.", True),
        ("The losses agree to 2.4e-3.", False),
        ("It took 4.9 to 21.4 s.", False),
        ("| a | b |\n|---|---|\n| x | 1.59 |", True),
        ("| a | b |\n|---|---|\n| x | 1.58 |", False),
        ("| a | b |\n|---|---|\n| x | PyTorch 2.8 or older |", True),
        ("`--seconds 3.7 s` and [a link](page-3.7-s.md), on 2026-11-26, p = 8, section 4.1.", True),
    ],
)
def test_a_figure_must_be_in_its_file(text: str, found: bool, tmp_path: Path) -> None:
    (tmp_path / "report.md").write_text(SOURCE)
    page = tmp_path / "page.md"
    gap = "\n" if text.startswith("|") else ""
    page.write_text(f"# Title\n\n{text}\n{gap}<!-- from: report.md -->\n")
    assert (faults(page) == []) == found


def test_a_figure_without_a_mark_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("It took 3 s.\n\nNothing.\n\n    code takes 4 s\n\n* 5 %\n* 58 layouts\n")
    assert [fault.split(":")[1] for fault in faults(page)] == ["1", "7"]
    assert "58 layouts" in faults(page)[1]


@pytest.mark.parametrize(
    ("mark", "fault"),
    [
        ("from: gone.md", "no file gone.md"),
        ("from: empty.md", "empty.md has no number"),
        ("figures: so", "'so' is no reason"),
        ("figures 9: a limit of the code", "9 of the mark is no figure here"),
        ("figures 3: a limit of the code", ""),
        ("run 3: python tools/simulate.py", ""),
        ("run 4: python tools/simulate.py", "4 of the mark is no figure here"),
        ("figures: a limit of the code", ""),
        ("from: long.md", "long.md is long"),
        ("from: long.md#part", ""),
        ("from: long.md#other", "no source"),
    ],
)
def test_what_a_mark_says_is_checked(mark: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "empty.md").write_text("nothing\n")
    (tmp_path / "long.md").write_text("# Part, first\n\n3 s\n\n# Other\n\n" + "4 s\n" * 30_000)
    page = tmp_path / "page.md"
    page.write_text(f"It took 3 s.\n<!-- {mark} -->\n")
    found = faults(page)
    assert (not found) if not fault else any(fault in one for one in found)


def test_parts_that_tools_write_are_run_and_blocks_know_their_lines() -> None:
    text = (
        "a\n\n<!-- t.py: begin -->\n| a | b |\n|---|---|\n| x | 1.5 |\n<!-- t.py: end -->\n\n2 s\n"
    )
    found = blocks(text)
    assert [(own.line, own.tool) for own in found] == [(1, ""), (3, "t.py"), (9, "")]
    assert found[-1].figures == [Figure("2", "s")]


def test_the_coverage_is_told_page_by_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("3 s and 4 s\n<!-- run: python tools/figures.py -->\n\n5 %\n")
    main(["--pages", str(page), "--lacking"])
    *_, row, fault = capsys.readouterr().out.splitlines()
    assert row == "| page.md | 3 | 0 | 2 | 0 | 1 |"
    assert fault == "page.md:4: no source: 5 %"


def test_what_redis_could_not_go_below_follows_from_the_passes() -> None:
    """README: 32 microbatches of the output layer alone, on the rank that has it."""
    report = json.loads(
        (ROOT / "docs/benchmarks/2026-11-26-two-cores/report.json").read_text(encoding="utf-8")
    )
    [whole] = [
        row
        for row in report["rows"]
        if (row["vocab_size"], row["schedule"], row["treatment"]) == (256_000, "1f1b", "none")
    ]
    (first_f, last_f), (first_b, last_b) = (whole["pass_ms"][kind] for kind in ("F", "B"))
    bound = 32 * (last_f - first_f + last_b - first_b) / 1000
    said = re.search(
        r"could not have taken less\s+than ([\d.]+) s", (ROOT / "README.md").read_text()
    )
    assert said is not None
    assert float(said[1]) == pytest.approx(bound, abs=0.05)


def test_the_layouts_of_the_gpu_are_those_of_its_record() -> None:
    """Counts of README, clusters.md, gpus.md and the report, of the report's raw record."""
    folder = ROOT / "docs/benchmarks/2026-11-26-h200-layouts"
    record = json.loads((folder / "report.json").read_text(encoding="utf-8"))["features"]
    rows = [line.split("|")[1:-1] for line in record["lines"] if line.startswith("| ")][2:]
    ranks = [int(row[2]) for row in rows]
    assert {row[5].strip() for row in rows} == {"yes"}
    alone, two = ranks.count(1), ranks.count(2)
    assert len(ranks) == alone + two == len(record["values"]["differences"])
    readme, clusters = ((ROOT / name).read_text() for name in ("README.md", "docs/clusters.md"))
    counts = f"{len(ranks)} combinations of model and flags ({alone} with one rank, {two} with two)"
    assert counts in " ".join(readme.split())
    assert f"in {two} layouts" in clusters
    assert f"{len(ranks)} layouts" in (ROOT / "docs/gpus.md").read_text()
    report = (folder / "report.md").read_text()
    assert f"has {len(ranks)} layouts: {alone} of one rank and {two} of two" in report


def test_whole_runs_of_the_tests_name_commits_of_this_repository() -> None:
    page = (ROOT / "docs/benchmarks/tests.md").read_text()
    rows = re.findall(r"^\| (\d{4}-\d\d-\d\d) \| ([0-9a-f]{7,40}) \|", page, re.MULTILINE)
    assert rows
    for _, commit in rows:
        git = ["git", "-C", str(ROOT), "merge-base", "--is-ancestor", commit, "HEAD"]
        done = subprocess.run(git, capture_output=True, text=True, check=False)
        if done.returncode == 128:
            pytest.skip(f"git does not know {commit} here: {done.stderr.strip()}")
        assert done.returncode == 0, commit
