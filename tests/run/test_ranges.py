"""Every number of every flag has a range that its meaning allows, and numbers outside are told."""

import math
import time

import pytest
from run.extremes import NUMBERS, RUN, beside, extremes, line_with, takes_whole

from megatron.flags.declare import Declaration
from megatron.flags.ranges import COUNT, DEPTH, LARGEST, Range, up_to
from megatron.run import records
from megatron.run.command_line import parse
from megatron.simulator.costs.redistribute import MOST_LAYERS

SECONDS = 2.0
"""CPU time in which a command line is judged; far more than it takes."""

NONSENSE = (
    "--fp16 --loss-scale 1e-30",
    "--fp16 --initial-loss-scale 1e60",
    "--optimizer muon --muon-num-ns-steps 1000000000",
    "--bf16 --fp8-format hybrid --fp8-amax-history-len 1000000000000",
    "--cpu-offload --offload-chunk-num 99",
    "--num-experts 4 --disable-bias-linear --moe-expert-capacity-factor 1e-9",
    "--num-experts 4 --disable-bias-linear --moe-router-topk-scaling-factor 1e30",
    "--num-experts 4 --disable-bias-linear --moe-aux-loss-coeff 1e38",
    "--mtp-num-layers 1 --mtp-loss-scaling-factor 1e30",
    "--rope-type yarn --rotary-scaling-factor 1e30",
    "--softmax-scale 1e38",
    "--bf16 --fp8-format hybrid --fp8-margin 60",
    "--bf16 --fp8-format hybrid --fp8-margin 1024",
    "--rotary-seq-len-interpolation-factor 1000000000000",
    "--eval-interval 5 --eval-iters 1000000000000",
)
"""Command lines that end with a number without a meaning."""


@pytest.mark.parametrize("flags", NONSENSE, ids=lambda flags: flags.split()[-2])
def test_a_number_without_a_meaning_is_refused_with_flag_value_and_way_out(flags: str) -> None:
    option, value = flags.split()[-2:]
    with pytest.raises(ValueError, match=option) as told:
        parse([*RUN.split(), *flags.split()], 1, speak=False)
    [line] = str(told.value).splitlines()
    word, _, rest = line.partition(" ")
    given, _, way_out = rest.replace(" is more", ": is more").partition(": ")
    assert word == option
    assert float(given) == float(value)
    assert "must be at least" in way_out or "leave it out" in way_out


@pytest.mark.parametrize(
    "flags",
    [
        "--fp16 --min-loss-scale 0.5",
        "--fp16 --loss-scale 0.5",
        "--exit-duration-in-mins 1000000",
        "--search-seconds 1e9",
        "--lr-decay-iters 1000000000000",
        "--profile --profile-step-end 1000000000000",
        "--tensorboard-dir curves --tensorboard-queue-size 1000000000000",
        "--zero-bubble-max-pending-backward 10000000000",
        "--adam-beta2 0.9999999",
        "--hang-seconds 0.5",
    ],
)
def test_a_number_that_means_never_or_nearly_always_is_taken(
    flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "is_installed", lambda _: True)  # a package that tests may lack
    parse([*RUN.split(), *flags.split()], 1, speak=False)


def test_every_number_has_a_range_with_two_ends() -> None:
    without = {own.option for own in NUMBERS if own.facts.range is None and not own.facts.reads}
    assert not without
    for own in NUMBERS:
        if (allowed := own.facts.range) is not None:
            assert -math.inf < allowed.least < allowed.most < math.inf
            assert takes_whole(own) or allowed.most < LARGEST, f"{own.option} has no upper end"


def test_a_range_in_words_says_what_it_contains() -> None:
    off = Range(0.01, 1e6, or_zero=True)
    assert off.words == "0, or at least 0.01 and at most 1,000,000"
    assert [off.contains(x) for x in (0, 0.001, 0.01, 1e6, 2e6, math.nan)] == [
        True, False, True, True, False, False,
    ]  # fmt: skip
    assert up_to(1 << 16).words == "at least 1 and at most 65,536"
    assert Range(0, LARGEST).words == "at least 0"
    assert COUNT.contains(1)
    assert not COUNT.contains(0)
    assert DEPTH.most == MOST_LAYERS, "the planner's own limit"


@pytest.mark.parametrize("declared", NUMBERS, ids=lambda own: own.option)
def test_an_extreme_is_refused_by_its_flag_or_lies_in_the_range(declared: Declaration) -> None:
    """Nothing but a ``ValueError`` comes out, and soon; within the range, rules may refuse."""
    allowed, option = declared.facts.range, declared.option
    for word in extremes(declared):
        begin = time.process_time()
        try:
            parse(line_with(option, word), 1, speak=False)
            lines = []
        except ValueError as error:
            lines = str(error).splitlines()
        assert time.process_time() - begin < SECONDS, f"{option} {word}"
        shown = int(word) if takes_whole(declared) else float(word)
        if allowed is not None and not allowed.contains(shown) and shown != declared.default:
            own = [line for line in lines if line.startswith(f"{declared.shown(shown)}: must be ")]
            assert own or _means_another_flag(option, word), f"{option} {word}: {lines}"


@pytest.mark.parametrize("number", ["1000000000001", "9" * 18, "9" * 200])
@pytest.mark.parametrize(
    "flags",
    ["--rampup-batch-size 1 1 {}", "--batch-size-steps 0:1 {}:2", "--batch-size-steps 0:{}"],
)
def test_numbers_in_words_have_ranges_too(flags: str, number: str) -> None:
    given = flags.format(number)
    with pytest.raises(ValueError, match=given) as told:
        parse([*RUN.split(), *given.split()], 1, speak=False)
    assert str(told.value) == f"{given}: must be at least 0 and at most 1,000,000,000,000"


def _means_another_flag(option: str, word: str) -> bool:
    """Return whether Megatron gives a number outside of the range a meaning of its own."""
    return (option, word) == ("--eval-iters", "-1")


@pytest.mark.parametrize("declared", NUMBERS, ids=lambda own: own.option)
def test_some_number_of_the_range_is_accepted_where_the_flag_has_its_effect(
    declared: Declaration,
) -> None:
    """So the extremes of the test above stand on command lines that are right without them."""
    told: list[str] = []
    for word in ("1", "2", "4", "8", "0.5", "16", "64", "1000", "0", "10", "20"):
        try:
            config = parse(line_with(declared.option, word), 1, speak=False)
        except ValueError as error:
            told.append(f"{word}: {error}")
            continue
        idle = any(own.startswith(f"{declared.option} {word} changes") for own in config.notes)
        if not (idle and beside(declared.option)):
            return
        told += config.notes
    pytest.fail("\n".join(told))
