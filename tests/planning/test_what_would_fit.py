"""Advice ends when its time is up, says so, and names the number that decides."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from command_lines import with_flags
from planning.test_dry_run import config, few

from megatron.planning.candidate import Candidate
from megatron.planning.dry_run import dry_run
from megatron.planning.forecast_run import forecast_run
from megatron.planning.run_plan import asked, make_run_plan
from megatron.planning.search.nearby import Nearby
from megatron.planning.search.search import Search
from megatron.planning.what_would_fit import ALTERNATIVES, what_would_fit
from megatron.run.command_line import parse
from megatron.run.edit import set_to
from megatron.run.precision import NARROW_SUMS
from megatron.run.run_config import RunConfig
from megatron.schedules.search.watch import Watch
from megatron.schedules.settings import PlanSettings
from megatron.simulator.costs.gpus import GIB, GPUS, USABLE, Gpu, gpu

BASE = (
    "--pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 64 --num-attention-heads 8 "
    "--seq-length 1024 --micro-batch-size 2 --global-batch-size 8 --train-iters 10 --lr 1e-3 "
    "--tokenizer-type NullTokenizer --vocab-size 999 --mock-data --bf16 --attention-dropout 0 "
    "--device cpu --pipeline-schedule 1f1b"
)


def run_of(flags: str = "", ranks: int = 2) -> RunConfig:
    return parse(with_flags(BASE.split(), flags.split()), ranks, speak=False)


def ticking(step: float) -> Iterator[float]:
    """A clock that goes on by ``step`` seconds whenever it is asked."""
    now = 0.0
    while True:
        yield now
        now += step


def advised(run: RunConfig, gpu: Gpu, watch: Watch) -> str:
    return what_would_fit(run, gpu, forecast_run(run, make_run_plan(run), gpu).fullest, watch)


def named(text: str) -> list[str]:
    """The flags of every run that the advice names."""
    return re.findall(r"^  (--.*?): [\d.]+ [GMK]iB, ", text, re.MULTILINE)


def candidate_of(run: RunConfig) -> Candidate:
    [found] = asked(run)
    return found


def test_a_cut_search_says_how_much_it_has_looked_at() -> None:
    run = few(config(2, "none", "gpipe"))
    text = advised(run, gpu("A100-40GB"), Watch().counting(2.0))
    [(plans, of)] = re.findall(
        r"^the search ended after work of about 2 s, with (\d+) plans? of ([\d,]+) combinations "
        r"\(--advice-seconds N gives more time\)$",
        text,
        re.MULTILINE,
    )
    assert 0 < int(plans) < int(of.replace(",", ""))


def test_the_same_question_has_the_same_answer_on_a_slower_machine() -> None:
    run = few(config(2, "none", "gpipe"))
    texts = set()
    for step in (0.0, 1000.0):
        clock = ticking(step)
        watch = Watch(clock=lambda clock=clock: next(clock)).counting(3.0)  # type: ignore[misc]
        texts.add(advised(run, gpu("A100-40GB"), watch))
    assert len(texts) == 1


def test_without_time_nothing_is_tried_and_nothing_said_to_be_impossible() -> None:
    run = config(vocabulary="none", schedule="gpipe")
    planning = PlanSettings(advice_seconds=0.0)
    run = replace(run, parallel=replace(run.parallel, planning=planning))
    text = "\n\n".join(dry_run(run, gpu("RTX4090")))
    assert "nothing nearby fits" not in text, "it was not looked for"
    assert "no run that fits was found in work of about 0 s: the run itself holds" in text
    assert "the search ended after work of about 0 s, with 0 plans of " in text


def test_the_number_that_decides_is_named() -> None:
    """On a GPU with the named bytes, and no more, the named run is the one that fits."""
    run = few(config(4, "vocab-2", "1f1b"))
    small = replace(gpu("A100"), memory=9 * GIB)
    text = advised(run, small, Watch())
    assert "nothing nearby fits either" in text
    [(words, held)] = re.findall(r"the smallest of .* plans is (--.*): it holds ([\d.]+) GiB", text)
    [room] = re.findall(r"tensors can use ([\d.]+) GiB of A100", text)
    outside = small.usable - float(room) * GIB
    assert 0 < outside < 0.5 * GIB, "four ranks have few communicators"
    assert float(held) > float(room)
    enough = replace(
        small, memory=((float(held) + 0.1) * GIB + outside) / USABLE
    )  # held is rounded
    assert words in named(advised(run, enough, Watch()))


def test_a_run_without_a_command_line_has_no_advice() -> None:
    run = replace(few(config(2, "none", "gpipe")), given={})
    assert advised(run, gpu("A100"), Watch()).startswith("a run without a command line has no")


def test_plans_of_fewer_microbatches_are_said() -> None:
    run = run_of("--global-batch-size 64 --num-layers 8")
    own = candidate_of(run.on(gpu("H100"))).least_memory
    less = replace(gpu("H100"), memory=(own.peak + own.outside) / USABLE)
    text = advised(run, less, Watch())
    assert "what would fit, the fastest first:\n" in text
    assert len(named(text)) == ALTERNATIVES
    speeds = [float(own) for own in re.findall(r", ([\d.]+) samples/s", text)]
    assert speeds == sorted(speeds, reverse=True)
    assert re.search(r"plans have [\d or]+ microbatches: the interval of their steady", text)


@pytest.mark.parametrize(
    "own",
    [
        "",
        "--enable-vocab-parallel --recompute-activations",
        "--num-virtual-stages-per-pipeline-rank 2 --pipeline-schedule interleaved",
        "--vocab-parallel vocab-1 --decoder-first-pipeline-num-layers 1",
        "--pipeline-schedule zb-auto --zero-bubble-max-pending-backward 2",
        "--batch-size-steps 0:4 8:8",
        "--fp8-format hybrid --no-fp8-wgrad",
        "--num-experts 4 --swiglu",
        "--pipeline-schedule interleaved --num-layers-per-virtual-pipeline-stage 1",
        "--decoder-first-pipeline-num-layers 1",
        "--pipeline-schedule v-half --zero-bubble-v-schedule "
        "--zero-bubble-v-schedule-mem-setup half",
        "--layer-distribution cost --recompute-granularity full --recompute-method uniform "
        "--recompute-ahead 1",
    ],
)
def test_the_flags_of_an_advice_make_the_run_that_was_counted(own: str) -> None:
    """Beside the flags of the run, and without those that the advice leaves out."""
    run = run_of(own)
    nearby = Nearby.of(run)
    found = Search(gpu("H100"), nearby.dimensions, estimates=6).look(nearby.line, ALTERNATIVES)
    assert found.ways
    for way in found.ways:
        words, _, dropped = nearby.words(way.line).partition("without ")
        kept = {option: own for option, own in run.given.items() if option not in dropped.split()}
        line = [word for option, values in kept.items() for word in (option, *values)]
        made = parse(with_flags([*line, "--dry-run"], words.split()), 2, speak=False)
        counted = way.line.run(None)
        parallel = replace(made.parallel, gpu=None)
        assert parallel == counted.parallel, words
        train = replace(
            made.train, rampup=counted.train.rampup, train_iters=counted.train.train_iters
        )
        assert train == counted.train, words
        assert made.model == counted.model


@pytest.mark.parametrize(
    ("own", "schedule", "words"),
    [
        ("--decoder-first-pipeline-num-layers 1", "1f1b", "--decoder-first-pipeline-num-layers"),
        ("--layer-distribution 3,1", "1f1b", "--layer-distribution"),
        (
            "--pipeline-schedule v-half --zero-bubble-v-schedule "
            "--zero-bubble-v-schedule-mem-setup half",
            "v-half",
            "",
        ),
    ],
)
def test_flags_that_make_way_are_named_beside_the_same_schedule_too(
    own: str, schedule: str, words: str
) -> None:
    """All but those that stand for the schedule's name."""
    nearby = Nearby.of(run_of(own))
    same = set_to("--pipeline-schedule", schedule), set_to("--vocab-parallel", "none")
    assert nearby.words(nearby.line.edited(same)) == (words and f"without {words}")


def test_groups_of_microbatches_make_way() -> None:
    """Else a rule would refuse every other schedule."""
    group = "--microbatch-group-size-per-virtual-pipeline-stage"
    nearby = Nearby.of(run_of(f"--pipeline-schedule interleaved {group} 8"))
    other = nearby.line.edited((set_to("--pipeline-schedule", "1f1b"),))
    assert not other.fault
    assert nearby.words(other).endswith(f"without --vocab-parallel {group}")


def test_products_in_8_bits_may_make_way() -> None:
    eight = Nearby.of(run_of("--fp8-format hybrid --no-fp8-wgrad"))
    same = set_to("--pipeline-schedule", "1f1b"), set_to("--vocab-parallel", "none")
    [kept, dropped] = (
        eight.line.edited((*same, *choice))
        for own in eight.dimensions
        if own.name == "8 bits"
        for choice in own.choices(eight.line.flags)
    )
    assert eight.words(kept) == ""
    assert eight.words(dropped) == "without --fp8-format --no-fp8-wgrad"


def test_on_one_rank_no_schedule_but_1f1b_is_named() -> None:
    """One rank has no bubble, and 1F1B holds one microbatch, the least."""
    run = run_of("--pipeline-model-parallel-size 1 --pipeline-schedule gpipe", 1)
    nearby = Nearby.of(run)
    found = Search(gpu("H100"), nearby.dimensions).look(nearby.line, ALTERNATIVES)
    words = [nearby.words(way.line) for way in found.ways]
    assert all("--pipeline-schedule 1f1b" in own for own in words)
    assert not any("--vocab-parallel" in own for own in words)


def test_sums_in_bf16_are_named_with_their_price() -> None:
    """On a GPU that lacks room for a quarter of the gradients and computes all layers again."""
    again = "--recompute-granularity full --recompute-method uniform --vocab-recompute"
    flags = f"--pipeline-model-parallel-size 1 --hidden-size 1024 --micro-batch-size 1 {again}"
    run = run_of(flags, 1).on(gpu("H100"))
    whole = candidate_of(run).forecast
    assert whole is not None
    gradients = 4 * whole.memories[0].count.parameters.all
    held = whole.fullest.peak + whole.fullest.outside
    less = replace(gpu("H100"), memory=(held - gradients / 4) / USABLE)
    told = what_would_fit(run, less, whole.fullest, Watch())
    assert any(NARROW_SUMS in words for words in named(told))
    assert "rounds every sum of gradients" in told


@pytest.mark.parametrize(
    ("own", "kept"),
    [
        ("--vocab-recompute", "--vocab-recompute"),
        (NARROW_SUMS, "--main-grads-dtype"),
        ("--recompute-granularity full --recompute-method uniform", "--recompute-granularity"),
    ],
)
def test_what_the_run_does_already_is_not_taken_back(own: str, kept: str) -> None:
    nearby = Nearby.of(run_of(own))
    found = Search(gpu("H100"), nearby.dimensions, estimates=6).look(nearby.line, ALTERNATIVES)
    assert all(kept in way.line.given for way in found.ways)
    assert not any(kept in nearby.words(way.line) for way in found.ways)


def test_larger_gpus_are_named_if_nothing_fits() -> None:
    run = few(config(2, "vocab-2", "1f1b"))
    text = advised(run, replace(gpu("RTX4090"), memory=20.0), Watch())
    [held] = [float(own) for own in re.findall(r": it holds ([\d.]+) GiB", text)]
    [larger] = re.findall(r"GPUs with that much memory \(([^)]+)\)", text)
    roomy = {name for name, own in GPUS.items() if own.usable / GIB >= held + 0.5}
    assert roomy <= {*larger.split(" or ")}
