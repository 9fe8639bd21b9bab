"""tools/experts_page.py: the tables of docs/experts.md are those of today's code."""

import shlex

import pytest
from harness.marks import full

from megatron.run.command_line import parse
from tools.experts_page import (
    PAGE,
    TOOL,
    Rows,
    change,
    deepseek,
    fastest,
    gain,
    imbalances,
    jobs,
    layouts,
    pair_row,
    treated,
    vocabularies,
)
from tools.pages.tables import replaced
from tools.predictions.mixtures import (
    IMBALANCES,
    LAYOUTS,
    LOSS,
    PAIRED,
    PAIRED_SCHEDULES,
    QWEN_JOB,
    VOCABULARIES,
    Found,
    paired,
    predicted,
)
from tools.predictions.scenarios import DEEPSEEK, MIXTRAL, MODELS, NO_DROPOUT, Scenario

TEXT = PAGE.read_text(encoding="utf-8")
CODE = [own for own in TEXT.split("\n\n") if own.startswith("    ")]


class Predicted(dict[Scenario, Found]):
    """Predictions, each made when it is asked for."""

    def __missing__(self, job: Scenario) -> Found:
        return predicted(job)


ROWS: Rows = Predicted()


def made(seconds: float, held: float = 40.0) -> Found:
    return Found(seconds, 0.4, 0.1, held, held < 76, 5.0)


def words_of(start: str) -> list[list[str]]:
    """Return the words of all code of the page that begins with ``start``."""
    return [shlex.split(own.replace("\\\n", " ")) for own in CODE if own.strip().startswith(start)]


@pytest.mark.parametrize(
    ("place", "job"), [(0, QWEN_JOB), (1, PAIRED._replace(schedule="dualpipe-v"))]
)
def test_a_command_of_the_page_is_the_job_of_its_table(place: int, job: Scenario) -> None:
    _, _, *words = words_of("python pretrain_gpt.py --dry-run")[place]
    own, other = parse(words, 1, speak=False), job.config
    assert (own.model, own.parallel) == (other.model, other.parallel)
    assert own.train.num_microbatches == other.train.num_microbatches
    assert own.train.dtype == other.train.dtype


@pytest.mark.parametrize(
    ("name", "start"), [(MIXTRAL, "--num-layers 32"), (DEEPSEEK, "--num-layers 61")]
)
def test_the_page_has_the_flags_of_a_model(name: str, start: str) -> None:
    assert words_of(start) == [[*MODELS[name].split(), *NO_DROPOUT.split(), *LOSS.split()]]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (10.5, "5.0 % more time than t = 2"),
        (10.4, "4.0 % more time than t = 2 (a tie)"),
        (9.6, "4.0 % less time than t = 2 (a tie)"),
        (9.0, "10.0 % less time than t = 2"),
    ],
)
def test_a_difference_below_the_error_of_predictions_is_a_tie(seconds: float, words: str) -> None:
    assert change(made(seconds), made(10.0), "t = 2") == f"takes {words}"


def test_the_gain_compares_with_the_faster_whole_vocabulary() -> None:
    found = {"none": made(12.0), "redis": made(11.0), "vocab-2": made(10.0)}
    assert gain(found) == "+10.0 %"
    assert gain({**found, "vocab-2": made(10.9)}) == "+0.9 %, a tie"


def test_the_fastest_way_is_named_with_all_that_tie() -> None:
    assert fastest({"a": 1.1, "b": 1.0}) == "b is the fastest."
    tied = "b is the fastest. Less than 4.6 % slower, so a tie: c, d."
    assert fastest({"a": 1.1, "d": 1.04, "b": 1.0, "c": 1.02}) == tied


def test_memory_that_does_not_suffice_is_told() -> None:
    assert (made(1.0).memory, made(1.0, 80.0).memory) == ("40.0", "80.0, does not fit")


def test_every_job_is_of_the_gpus_that_the_page_names() -> None:
    sizes = {own.model: own.pipeline * own.tensor * own.replicas for own in jobs()[: len(LAYOUTS)]}
    assert set(sizes.values()) == {32}
    assert {own.pipeline * own.replicas for own in jobs() if own.model == DEEPSEEK} == {1024}
    assert len(jobs()) == len(set(jobs()))


@pytest.mark.parametrize(
    "part", [imbalances, *(full(own) for own in (layouts, vocabularies, deepseek))]
)
def test_a_part_of_the_page_is_a_new_prediction(part: object) -> None:
    """Else: python tools/experts_page.py --update."""
    assert callable(part)
    lines = [own for own in part(ROWS) if own.startswith("|")]
    assert "\n".join(lines) in TEXT


@pytest.mark.parametrize("schedule", ["1f1b", *(full(own) for own in PAIRED_SCHEDULES[1:])])
def test_a_row_of_pairs_is_a_new_prediction(schedule: str) -> None:
    """Else: python tools/experts_page.py --update."""
    assert pair_row(schedule, ROWS) in TEXT.splitlines()


def test_conclusions_of_the_page_hold_in_its_tables() -> None:
    """Spread experts are faster for the same t, a smaller t is faster, and so is flex."""
    table = TEXT.split(f"<!-- {TOOL}: begin -->\n")[1].split("\n\n")[0]
    cells = [row.split("|")[1:-1] for row in table.splitlines()[2:]]
    seconds = {job: float(row[6]) for job, row in zip(LAYOUTS, cells, strict=True)}
    assert [int(row[1]) for row in cells] == [job.tensor for job in LAYOUTS]
    whole, spread, two_four, two, one, _, qwen_two, qwen_whole, qwen, _, flex = seconds.values()
    assert whole > spread > two_four > two > one
    assert qwen_whole > qwen > flex
    assert qwen_two > qwen


def test_only_parts_of_the_tool_are_replaced() -> None:
    count = TEXT.count(f"<!-- {TOOL}: begin -->")
    changed = replaced(TEXT, [f"part {own}" for own in range(count)], TOOL)
    assert f"\npart {count - 1}\n<!-- {TOOL}: end -->" in changed
    old = [
        own.partition(f"\n<!-- {TOOL}: end")[0] for own in TEXT.split(f"{TOOL}: begin -->\n")[1:]
    ]
    assert replaced(changed, old, TOOL) == TEXT
    with pytest.raises(ValueError, match=f"{count} parts"):
        replaced(TEXT, ["one"], TOOL)


def test_jobs_of_a_table_differ_in_one_thing() -> None:
    *_, limited = paired("zb-v")
    assert limited is not None
    assert "18" in limited.more
    assert paired("gpipe")[2] is None
    assert [own.treatment for own in treated(*VOCABULARIES[0])] == ["none", "redis", "vocab-2"]
    assert {own._replace(more="") for own in IMBALANCES.values()} == {QWEN_JOB._replace(more="")}
