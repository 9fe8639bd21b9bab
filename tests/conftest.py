"""What every test may use: the ranks of a distributed test, and settings for slow machines."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from harness.rank_pool import RankPool

# Before torch reads it: the tests' tensors are small, and ranks share the cores as it is.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Before Triton reads it: without a GPU its programs run in its interpreter, on tensors of the CPU.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

NOT_FULL = "not full"
"""Selects the tests of a default run; see pyproject.toml."""

_SHARED_PLANS = pytest.StashKey[Path | None]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let functions be listed that run neither by default nor in CI, and the seconds of files."""
    parser.addoption(
        "--left-out",
        action="store_true",
        help="run nothing: list the test functions that neither a default run nor CI runs, and "
        "fail if one of them has no reason in .ci/left_out",
    )
    parser.addoption(
        "--slowest-files",
        type=int,
        default=0,
        metavar="N",
        help="show the seconds of the N files whose cases took longest",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Set what a full run has more of; make the folder in which processes find shared plans."""
    from harness import marks
    from harness.properties import examples
    from harness.shared_plans import open_folder  # once the coverage of our modules is counted
    from harness.slowest_files import SlowestFiles
    from harness.whole_run import say_whether_full

    full = config.option.markexpr != NOT_FULL
    say_whether_full(full=full)
    # A deadline would make a property fail because the machine is busy. CI draws the same examples
    # in every run, so that a commit which passed once passes again; other runs look for new ones.
    hypothesis.settings.register_profile(
        "tests", deadline=None, max_examples=examples(100), derandomize="CI" in os.environ
    )
    hypothesis.settings.load_profile("tests")
    config.pluginmanager.register(marks)
    config.stash[_SHARED_PLANS] = open_folder()
    if most := config.option.slowest_files:
        config.pluginmanager.register(SlowestFiles(most))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the plans."""
    from harness.shared_plans import close_folder

    if folder := config.stash.get(_SHARED_PLANS, None):
        close_folder(folder)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """List the functions that run neither by default nor in CI, if this is asked for."""
    from harness.left_out import Case, report

    if config.option.left_out:
        listed, code = report(
            Case(own.nodeid, own.get_closest_marker("full") is not None) for own in items
        )
        pytest.exit(listed, returncode=code)


@pytest.fixture(scope="session")
def ranks() -> "Iterator[RankPool]":
    """Four processes for the whole test run; ``ranks.run(fn, world_size, **kwargs)`` uses them.

    ``fn(rank, world_size, **kwargs)`` is a module-level function of the test module; it runs with
    ``torch.distributed`` initialised (gloo), and its results come back as a list by rank.
    """
    from harness.rank_pool import RankPool  # torch: not for those who only test schedules

    with RankPool(size=4) as pool:
        yield pool
