"""Megatron-Core's text of a pipeline: what it means, and what is refused."""

import pytest
from command_lines import with_flags
from hypothesis import given
from hypothesis import strategies as st

from megatron.planning.run_plan import make_run_plan
from megatron.run.command_line import parse
from megatron.run.pipeline_layout import parse_layout
from megatron.run.run_config import RunConfig
from megatron.schedules.plan import Plan

BASE = (
    "--num-layers 16 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --micro-batch-size 1 "
    "--global-batch-size 8 --train-iters 20 --lr 1e-3 --mock-data --vocab-size 999 --device cpu "
    "--dry-run --bf16 --pipeline-model-parallel-size 4"
)


def run(flags: str) -> RunConfig:
    return parse(with_flags(BASE.split(), flags.split()), world_size=1)


def assert_in_order(words: str, message: str) -> None:
    """Assert that ``message`` has all words, and in this order."""
    position = 0
    for word in words.split():
        position = message.index(word, position)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("Et*2|(t*2|)*6t*2L", (2,) * 8),
        ("Ettt|(tt|)*29,ttL", (3, *[2] * 29, 2)),
        ("Et|tt|tL", (1, 2, 1)),
        ("E|t*3|L", (0, 3, 0)),
        ("EttL", (2,)),
        ("E(t|)*2|*2tL", (1, 1, 0, 0, 1)),
        ("E,t*2,|,t,L", (2, 1)),
        ("E((t|)*2t|)*2tL", (1, 1, 1, 1, 1, 1, 1)),
        ("Et*0|t*12L", (0, 12)),
        ("E()*3t|tL", (1, 1)),
        ("Et*2|t*2|mL", (2, 2, 0)),
        ("Et|tm*2L", (1, 1)),
    ],
)
def test_stages_as_megatron_core_reads_them(text: str, layers: tuple[int, ...]) -> None:
    assert parse_layout(text).layers == layers


@pytest.mark.parametrize(
    ("text", "layers", "further", "stage"),
    [
        ("Et*3|(tt|)*29,m|L", (3, *[2] * 29, 0, 0), 1, 30),
        ("Et*3|(tt|)*29mL", (3, *[2] * 29, 0), 1, 30),
        ("Et|tm*2|L", (1, 1, 0), 2, 1),
        ("Etm*3||L", (1, 0, 0), 3, 0),
        ("Et|tL", (1, 1), 0, None),
    ],
)
def test_the_stage_of_further_tokens(
    text: str, layers: tuple[int, ...], further: int, stage: int | None
) -> None:
    assert parse_layout(text) == (layers, further, stage)


@st.composite
def texts(draw: st.DrawFn) -> tuple[str, str]:
    """A layout between E and L with repetitions, and the same written out by Python."""
    short, long = "", ""
    for _ in range(draw(st.integers(0, 6))):
        letter, times = draw(st.sampled_from("t|")), draw(st.integers(0, 12))
        group, plain = f"{letter}*{times}", letter * times
        if draw(st.booleans()):
            repeat, rest = draw(st.integers(0, 4)), draw(st.sampled_from(["", "t", "|", "t|"]))
            group, plain = f"({group}{rest})*{repeat}", (plain + rest) * repeat
        short, long = short + group + draw(st.sampled_from(["", ","])), long + plain
    return f"E{short}L", f"E{long}L"


@given(texts())
def test_repetitions_are_those_of_python(both: tuple[str, str]) -> None:
    short, long = both
    assert parse_layout(short) == parse_layout(long)
    assert parse_layout(long).layers == tuple(stage.count("t") for stage in long.split("|"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Etm|tL", "further tokens write m after the last t"),
        ("Et|mtL", "further tokens write m after the last t"),
        ("Et|m|mL", "one stage predicts all m is in 2 stages m*2"),
        ("Et|tLm", "L once, at the very end"),
        ("Et|xL", "'x' is no layer E t m L |"),
        ("tt|ttL", "E once, at the very beginning"),
        ("Ett|tt", "L once, at the very end"),
        ("Et|EtL", "E once"),
        ("Et|LtL", "L once"),
        ("tE|tL", "E once"),
        ("Et|Lt", "L once"),
        ("", "E once"),
        ("E(t|)*2(tL", "( repeats nothing write x*n or (...)*n"),
        ("Et)*2|tL", ") repeats nothing"),
        ("E*t|tL", "* repeats nothing"),
        ("Et*999999999|tL", "t*999999999 is too long lower the 999999999"),
        ("E((t*90000|)*90000)*90000L", "too long"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_way_out(text: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are checked below
        parse_layout(text)
    message = str(caught.value)
    assert message.startswith(f"--pipeline-model-parallel-layout {text}: ")
    assert_in_order(words, message)


@pytest.mark.parametrize(
    ("flags", "schedule", "chunks"),
    [
        ("Et*4|(t*4|)*2t*4L", "1f1b", 1),
        ("Et|t*3|(t*2|)*4t|t*3L", "interleaved", 2),
        ("Et|t*3|(t*2|)*4t|t*3L --pipeline-schedule zb-v", "zb-v", 2),
        ("Et|t*3|(t*2|)*4t|t*3L --pipeline-schedule hanayo", "hanayo", 2),
        ("Et|t*3|(t*2|)*4t|t*3L --num-virtual-stages-per-pipeline-rank 2", "interleaved", 2),
        ("E|t*5|t*6|t*5L --enable-zero-bubble --enable-vocab-parallel", "zb-1p", 1),
        ("Et(|t)*15L", "interleaved", 4),
        (
            "Et*6|t*6|t*4|m*2L --mtp-num-layers 2 --position-embedding-type rope",
            "1f1b",
            1,
        ),
    ],
)
def test_the_plan_has_these_stages(flags: str, schedule: str, chunks: int) -> None:
    config = run(f"--pipeline-model-parallel-layout {flags}")
    assert config.parallel.pipeline_schedule == schedule
    made = make_run_plan(config)
    assert made.plan.chunks == chunks
    assert made.layers == parse_layout(flags.split()[0]).layers


@pytest.mark.parametrize("treatment", ["none", "vocab-2"])
@pytest.mark.parametrize(
    ("text", "stage", "place"),
    [
        ("Et*8|t*8|m*2|L", 2, (2, 0)),
        ("Et*8|t*4|t*4m*2|L", 2, (2, 0)),
        ("Et*8|t*4|t*4|m*2L", 3, (3, 0)),
        ("Et*4|(t*2|)*4t*4|m*2|L", 6, (2, 1)),
    ],
)
def test_further_tokens_are_predicted_on_the_stage_with_m(
    text: str, stage: int, place: tuple[int, int], treatment: str
) -> None:
    flags = "--mtp-num-layers 2 --position-embedding-type rope --vocab-parallel"
    plan = make_run_plan(run(f"--pipeline-model-parallel-layout {text} {flags} {treatment}")).plan
    assert (plan.ahead_stage, plan.stages[stage]) == (stage, place)
    assert Plan.from_text(plan.to_text()) == plan


def test_auto_compares_the_schedules_with_these_stages() -> None:
    text = "Et|t*3|(t*2|)*4t|t*3L"
    made = make_run_plan(run(f"--pipeline-schedule auto --pipeline-model-parallel-layout {text}"))
    assert made.plan.chunks == 2
    assert made.layers == parse_layout(text).layers


@pytest.mark.parametrize("treatment", ["none", "vocab-2", "interlaced"])
def test_a_split_vocabulary_is_noted(treatment: str) -> None:
    flags = "--pipeline-model-parallel-layout Et*4|(t*4|)*2t*4L --vocab-parallel"
    notes = [note for note in run(f"{flags} {treatment}").notes if "layout" in note]
    if treatment == "none":
        assert not notes
    else:
        [note] = notes
        assert note.startswith("--pipeline-model-parallel-layout Et*4|(t*4|)*2t*4L ")
        assert f"{treatment} splits the embedding (E)" in note


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("Et*4|(t*4|)*2t*3L", "15 transformer layers --num-layers is 16 change"),
        ("Et*8|t*4|t*4L", "3 stages no multiple --pipeline-model-parallel-size 4 give"),
        ("Et*4|(t*4|)*2t*4L --pipeline-schedule zb-v", "4 stages 1 zb-v has 2 write 8 stages"),
        ("Et*4|(t*4|)*2t*4L --pipeline-schedule interleaved", "4 stages takes 2, write 8 stages"),
        ("Et*2|(t*2|)*6t*2L --pipeline-schedule zb-h1", "8 stages zb-h1 has 1 write 4 stages"),
        (
            "Et*2|(t*2|)*6t*2L --num-virtual-stages-per-pipeline-rank 4",
            "8 stages --num-virtual-stages-per-pipeline-rank 4 leave",
        ),
        (
            "Et*2|(t*2|)*6t*2L --num-layers-per-virtual-pipeline-stage 2",
            "--num-layers-per-virtual-pipeline-stage 2 Et*2|(t*2|)*6t*2L give one",
        ),
        ("Et*4|(t*4|)*2t*4L --layer-distribution remainder", "remainder both give one"),
        ("Et*4|(t*4|)*2t*4L --decoder-last-pipeline-num-layers 4", "num-layers 4 both give one"),
        ("Et*4|(t*4|)*2t*4L --vocab-parallel redis", "redis Et*4|(t*4|)*2t*4L both give one"),
        ("Et*4|(t*4|)*2t*4", "L once, at the very end"),
        ("Et*4|(t*4|)*2t*4mL", "m 1 times --mtp-num-layers is 0 change one"),
    ],
)
def test_what_does_not_fit_is_told_once_with_the_way_out(flags: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are checked below
        run(f"--pipeline-model-parallel-layout {flags}")
    [message] = str(caught.value).splitlines()
    assert_in_order(words, message)


def test_a_rank_without_anything_to_train_names_the_layout() -> None:
    config = run("--pipeline-model-parallel-layout Et*8||t*4|t*4L")
    with pytest.raises(ValueError, match=r"layout Et\*8\|\|t\*4\|t\*4L leaves rank 1 without"):
        make_run_plan(config)


STANDALONE = "--standalone-embedding-stage"


def test_an_embedding_alone_on_the_first_stage_is_a_layout() -> None:
    """Megatron's older flag makes the stages of a layout that begins with ``E|``."""
    found = run(f"--num-layers 15 {STANDALONE}")
    wanted = run("--num-layers 15 --pipeline-model-parallel-layout E|t*5|t*5|t*5L")
    assert f"{STANDALONE} is read as --decoder-first-pipeline-num-layers 0" in found.notes
    alone, written = make_run_plan(found), make_run_plan(wanted)
    assert alone.layers == written.layers == (0, 5, 5, 5)
    assert alone.plan == written.plan


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--vocab-parallel vocab-2", f"{STANDALONE} embedding split over all ranks leave it out"),
        ("--enable-vocab-parallel", f"{STANDALONE} embedding split over all ranks leave it out"),
        ("--use-interlaced-schedule", f"{STANDALONE} embedding split over all ranks leave it out"),
        ("--vocab-parallel redis", "--vocab-parallel redis -first-pipeline-num-layers 0 give one"),
        ("--num-virtual-stages-per-pipeline-rank 2", "-layers 0 interleaved --layer-distribution"),
        ("--decoder-first-pipeline-num-layers 2", f"{STANDALONE} contradicts -layers 2 give one"),
    ],
)
def test_an_embedding_alone_is_refused_where_another_flag_places_it(flags: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are checked below
        run(f"--num-layers 15 {flags} {STANDALONE}")
    assert_in_order(words, str(caught.value))
