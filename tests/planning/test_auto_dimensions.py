"""``auto`` of slices, recomputation and offload: the fastest run that fits is what trains."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from io import StringIO
from itertools import chain, repeat
from typing import Any, cast

import pytest
import torch
from command_lines import with_flags
from harness.marks import full
from harness.precisions import precision
from harness.still_watch import still_watch
from torch.distributed import HashStore

from megatron.data.tokenizers.null import NullTokenizer
from megatron.data.tokenizers.settings import TokenizerSettings
from megatron.planning.candidate import Candidate
from megatron.planning.dry_run import dry_run
from megatron.planning.known import NEAR
from megatron.planning.race import chosen
from megatron.planning.run_plan import all_compared, asked, make_run_plan, only_rank_0_plans
from megatron.planning.settled import settled
from megatron.run import vocabulary
from megatron.run.command_line import parse
from megatron.run.run_config import RunConfig
from megatron.schedules.search.watch import Watch
from megatron.simulator.costs.gpus import USABLE, gpu
from megatron.training import prepare
from megatron.training.agreement import run_digests
from megatron.training.prepare import shared_plan
from megatron.training.rendezvous import Rendezvous

BASE = (
    "--pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 1024 --num-attention-heads 8 "
    "--seq-length 4096 --micro-batch-size 1 --global-batch-size 4 --train-iters 10 --lr 1e-3 "
    "--tokenizer-type NullTokenizer --vocab-size 999 --mock-data --bf16 --attention-dropout 0 "
    "--hidden-dropout 0 --device cpu --vocab-parallel vocab-2"
)

SLICES = "--num-seq-splits auto"
AGAIN = "--recompute-granularity auto"
HOST = "--cpu-offload --offload-chunk-num auto"
EACH = (SLICES, AGAIN, HOST)


def run(flags: str, ranks: int = 2) -> RunConfig:
    return parse(with_flags(BASE.split(), flags.split()), ranks)


def with_gpus(config: RunConfig, memory: float | None = None) -> RunConfig:
    """The run on H100s, perhaps on some of which tensors and communicators use so many bytes."""
    own = gpu("H100") if memory is None else replace(gpu("H100"), memory=memory / USABLE)
    return config.on(own)


def needed(candidate: Candidate) -> float:
    """Bytes of the fullest rank, with those of its communicators."""
    assert candidate.forecast is not None
    return candidate.forecast.fullest.peak + candidate.forecast.fullest.outside


def named(words: tuple[str, ...]) -> str:
    """The flags of an alternative: other words say that nothing is asked for."""
    return " ".join(own for own in words if own.startswith("--"))


def test_an_alternative_is_the_run_that_its_flags_name() -> None:
    opened = run(" ".join((*EACH, "--pipeline-schedule interleaved", "--vocab-parallel auto")))
    assert len(opened.alternatives) == 5 * 4 * 4 * 3
    changes = [own.changes for own in opened.alternatives]
    assert changes == sorted(changes)
    assert changes[:6] == [0] * 5 + [1], "treatments alone change nothing"
    for own in opened.alternatives[::13]:
        plain = run(f"--pipeline-schedule interleaved {named(own.taken)}")
        taken = opened.taking(own)
        assert (taken.parallel, taken.train) == (plain.parallel, plain.train), own.taken
        assert replace(taken, taken=(), changes=0, notes=plain.notes) == plain


def test_every_treatment_has_a_change_before_the_next_change() -> None:
    opened = run(f"{AGAIN} {SLICES} --vocab-parallel auto --pipeline-schedule 1f1b")
    treatments = [own.taken[0] for own in opened.alternatives[:5]]
    assert len(set(treatments)) == 5
    changes = [own.taken[1:] for own in opened.alternatives[::5]]
    assert [own.taken for own in opened.alternatives] == [
        (treatment, *change) for change in changes for treatment in treatments
    ]
    whole, kept = "--num-seq-splits 1", "no recomputation"
    assert [slices for _, slices in changes[:4]] == [whole] * 4, "first the earlier dimension"
    assert [again for again, _ in changes[4:7]] == [kept] * 3
    assert all(again != kept and slices != whole for again, slices in changes[7:])


def test_named_parts_and_methods_are_those_that_auto_compares() -> None:
    flags = f"{AGAIN} --recompute-modules layernorm mlp --recompute-method block"
    opened = run(f"{flags} --recompute-num-layers 2")
    assert not any("changes nothing" in note for note in opened.notes)
    assert [own.taken[0] for own in opened.alternatives] == [
        "no recomputation",
        "--recompute-granularity selective --recompute-modules layernorm mlp",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
    ]


@pytest.mark.parametrize(
    ("flags", "modules"),
    [
        ("--swiglu", ["layernorm mlp_act", "mlp"]),
        ("--squared-relu", ["layernorm", "mlp"]),
        ("--swiglu --num-experts 4", ["layernorm mlp_act moe_act", "mlp moe"]),
    ],
)
def test_parts_that_auto_compares_are_those_of_the_model(flags: str, modules: list[str]) -> None:
    words = [own.taken[0] for own in run(f"{AGAIN} {flags}").alternatives]
    of_parts = "--recompute-granularity selective --recompute-modules"
    assert words[1:-1] == [f"{of_parts} {names}" for names in modules]


def test_chunks_of_no_host_are_noted() -> None:
    opened = run("--offload-chunk-num auto")
    assert opened.alternatives == ()
    assert "--offload-chunk-num auto changes nothing without --cpu-offload" in opened.notes


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--num-seq-splits 0", "--num-seq-splits 0: give auto, or a whole number, at least 1"),
        ("--num-seq-splits some", "--num-seq-splits some: give auto, or a whole number"),
        (f"{AGAIN} --recompute-modules wings", "--recompute-modules wings: no part of a layer"),
        (f"{AGAIN} --recompute-ahead 2", "--recompute-ahead 2 moves whole layers"),
        (
            f"{SLICES} --measured-costs costs.json",
            "--measured-costs costs.json belongs to one run, and --num-seq-splits auto compares",
        ),
    ],
)
def test_what_auto_cannot_compare_is_refused(flags: str, told: str) -> None:
    with pytest.raises(ValueError, match="--") as caught:
        run(flags)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        f"{SLICES} --pipeline-schedule 1f1b",
        f"{AGAIN} --pipeline-schedule 1f1b",
        f"{HOST} --num-virtual-stages-per-pipeline-rank 4 --num-layers 8 --global-batch-size 8 "
        "--host-bandwidth 200",  # so that a passing chunk leaves and comes back in time
        full(f"{SLICES} {AGAIN} {HOST} --pipeline-schedule interleaved", id="all"),
    ],
)
def test_the_fastest_that_fits_is_taken(flags: str) -> None:
    opened = run(flags)
    every = asked(with_gpus(opened))
    memory = (min(map(needed, every)) + max(map(needed, every))) / 2
    fitting = [each for each in every if needed(each) <= memory]
    assert 0 < len(fitting) < len(every)
    taken = chosen(asked(with_gpus(opened, memory)))
    assert taken.fits
    assert taken.time * (1 - NEAR) <= min(each.time for each in fitting)


def test_what_was_taken_is_what_trains_on_every_rank() -> None:
    """As if its flags had been given; ranks read it with the plan of rank 0."""
    opened = with_gpus(run(f"{SLICES} {AGAIN} --pipeline-schedule 1f1b"), 2.2e9)
    assert only_rank_0_plans(opened)
    found = make_run_plan(opened)
    assert shared_plan(Rendezvous(HashStore(), 0, 1), found) == found
    own = settled(opened, found)
    plain = run(f"--pipeline-schedule 1f1b {named(found.taken)}")
    assert replace(own.parallel, gpu=None) == plain.parallel
    assert (own.train, own.alternatives, own.taken) == (plain.train, (), found.taken)
    assert found.plan.slices == own.parallel.slices.num_seq_splits
    assert own.notes[-1] == f"auto takes {', '.join(found.taken)}"
    assert make_run_plan(own) == found


@pytest.mark.parametrize("own", [f"{SLICES} --num-layers 8", "--num-layers 8"])
def test_ranks_with_other_command_lines_are_told_by_their_digests(own: str) -> None:
    opened = with_gpus(run(f"{AGAIN} --pipeline-schedule 1f1b"))
    found = asked(opened)[0].run_plan
    other = with_gpus(run(f"{own} --pipeline-schedule 1f1b"))
    assert settled(other, found) == other
    assert run_digests(other, found) != run_digests(settled(opened, found), found)


def test_a_rank_reads_its_data_anew_for_other_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own search was cut, and rank 0 has taken another number of slices."""
    opened = with_gpus(run(f"{SLICES} --pipeline-schedule 1f1b"))
    whole, halves = (each.run_plan for each in asked(opened)[:2])

    def read(config: RunConfig, *of_rank: object) -> str:
        return f"data of {config.parallel.slices.num_seq_splits}"

    monkeypatch.setattr(prepare, "_opened", read)
    monkeypatch.setattr(prepare, "data_digests", lambda train, data: {"training data": data})
    own = settled(opened, whole)
    data = cast("Any", "data that is open")
    ready = prepare.Prepared(opened, own, own.parallel.grid, whole, data, {})
    job = Rendezvous(HashStore(), 0, 1)
    assert prepare._having_taken(ready, whole, job).data == data
    found = prepare._having_taken(ready, halves, job)
    assert found.config.parallel.slices.num_seq_splits == 2
    assert found.digests["training data"] == "data of 2"
    assert found.data == cast("Any", "data of 2")


def test_flops_compare_treatments_only() -> None:
    opened = run(f"{SLICES} {AGAIN} --vocab-parallel auto --pipeline-schedule 1f1b")
    words = [each.config.taken for each in asked(opened)]
    assert {own[0] for own in words} == {own.taken[0] for own in opened.alternatives}
    assert {own[1:] for own in words} == {("no recomputation", "--num-seq-splits 1")}
    assert not only_rank_0_plans(opened)
    note = settled(opened, make_run_plan(opened)).notes[-1]
    assert "to compare more than treatments" in note
    wide = replace(opened, train=replace(opened.train, precision=precision(torch.float32)))
    assert len(asked(with_gpus(wide))) == len(words)


def ticking() -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        now += 1.0


def test_what_the_time_does_not_suffice_for_is_said() -> None:
    """Alternatives are looked at for half of the time if one of them may fit."""
    opened = run(f"{SLICES} --pipeline-schedule 1f1b")
    clock = ticking()
    found = all_compared(with_gpus(opened), watch=Watch(5.0, clock=lambda: next(clock)))
    tried, untried = [", ".join(each.config.taken) for each in found.candidates], found.untried
    assert 1 <= len(tried) < len(opened.alternatives)
    assert [*tried, *untried] == [", ".join(own.taken) for own in opened.alternatives]


def late() -> Watch:
    """A watch over 1,000 s of which 600 have passed since it and its half began."""
    return Watch(1000.0, clock=partial(next, chain((0.0, 0.0), repeat(600.0))))


def test_alternatives_are_looked_at_for_all_of_the_time_until_one_can_fit() -> None:
    opened = run(f"{SLICES} --pipeline-schedule 1f1b")
    every = asked(with_gpus(opened))
    small = with_gpus(
        opened,
        1.001 * min(each.least_memory.peak + each.least_memory.outside for each in every),
    )
    found = all_compared(small, watch=late())
    assert found.candidates[-1].can_fit, "half of the time is up, and it went on"
    assert not any(each.can_fit for each in found.candidates[:-1])
    without = all_compared(small, watch=Watch(0.0))
    assert not any(each.can_fit for each in without.candidates)
    assert len(without.candidates) + len(without.untried) == len(every)
    assert without.untried, "without time the search for one that can fit ends"


def test_a_dry_run_names_the_alternatives_that_it_did_not_bound() -> None:
    opened = run(f"{SLICES} --pipeline-schedule 1f1b")
    least = min(asked(with_gpus(opened)), key=lambda each: each.least_memory.peak)
    small = replace(gpu("H100"), memory=least.least_memory.peak / USABLE)
    told = "\n".join(dry_run(opened, small, watch=Watch(0.0)))
    assert "it can never fit" not in told
    assert "not looked at (--search-seconds N gives more time): " in told


def test_alternatives_are_looked_at_while_time_is_left_until_a_plan_fits() -> None:
    """The first can fit by its bound, and its plan does not; a later one does."""
    opened = run(f"{AGAIN} --pipeline-schedule 1f1b --pipeline-model-parallel-size 4", 4)
    every = asked(with_gpus(opened))
    whole, parts, *_ = every
    assert needed(parts) < needed(whole)
    small = with_gpus(opened, (needed(parts) + needed(whole)) / 2)
    assert all_compared(small, watch=late()).candidates[0].can_fit
    told = StringIO()
    found = all_compared(small, watch=Watch(40.0, told, clock=partial(next, ticking())))
    taken = found.choose()
    assert taken.config.taken == parts.config.taken
    assert taken.fits
    nothing = all_compared(with_gpus(opened, 0.99 * min(map(needed, every))), watch=late())
    assert nothing.candidates[-1].can_fit
    assert not nothing.choose().fits
    assert nothing.untried == [], "all are looked at before one is taken that does not fit"


def test_a_choice_ends_with_its_time_and_names_what_it_did_not_look_at() -> None:
    opened = run(f"{AGAIN} --pipeline-schedule 1f1b --pipeline-model-parallel-size 4", 4)
    whole, *others = asked(with_gpus(opened))
    small, told = with_gpus(opened, 0.99 * needed(whole)), StringIO()
    found = all_compared(small, watch=Watch(0.0, told, clock=partial(next, ticking())))
    taken = found.choose()
    assert taken.config.taken == whole.config.taken
    assert not taken.fits
    assert found.untried == [", ".join(each.config.taken) for each in others]
    assert f"3 alternatives of auto not looked at: {'; '.join(found.untried)}" in told.getvalue()
    bounded = all_compared(small, seconds=0.0)
    assert not bounded.choose(0.0).fits
    assert len(bounded.untried) == len(others), "seconds limit a watch that has no limit"


def test_an_alternative_that_exceeds_the_limit_is_left_out() -> None:
    flags = "--pipeline-schedule 1f1b --zero-bubble-max-pending-backward 2"
    opened = with_gpus(run(f"{SLICES} {flags}"))
    whole, *_ = every = asked(opened)
    assert whole.in_flight > 2
    taken = chosen(every)
    assert taken.in_flight <= 2
    plain = run(f"{flags} {named(taken.config.taken)}")
    assert taken.run_plan.plan == make_run_plan(with_gpus(plain)).plan
    with pytest.raises(ValueError, match=r"2 is too few .* the least is 3, with 1f1b with vocab-2"):
        make_run_plan(with_gpus(run(f"{AGAIN} {flags}")))


def test_the_table_the_choice_and_its_words_agree() -> None:
    report = "\n\n".join(
        dry_run(with_gpus(run(f"{SLICES} --pipeline-schedule 1f1b")), gpu("H100"), still_watch())
    )
    [head] = [line for line in report.splitlines() if line.startswith("schedule 1f1b takes")]
    rows = [line for line in report.splitlines() if line.startswith("1f1b   ")]
    assert len(rows) == 4
    [words] = [own for own in ("1", "2", "4", "8") if f"--num-seq-splits {own}" in rows[0]]
    assert f"with --num-seq-splits {words}" in head
    seconds = [float(row.split()[2]) for row in rows]
    assert seconds[0] * (1 - NEAR) <= min(seconds) * 1.001


def test_no_ring_passes_on_the_keys_of_slices() -> None:
    """Exchanges and slices are chosen together, and rules leave out what does not go together."""
    opened = run(f"{SLICES} --context-parallel-size 2 --cp-comm-type auto", 4)
    exchanges = defaultdict[int, set[str]](set)
    for own in opened.alternatives:
        exchanges[own.parallel.slices.num_seq_splits].add(own.parallel.context.exchange)
    kept = {"all_gather", "a2a"}
    assert exchanges == {1: {*kept, "p2p"}, 2: kept, 4: kept, 8: kept}
    found = with_gpus(opened)
    plan = make_run_plan(found)
    assert settled(found, plan).notes[-1] == f"auto takes {', '.join(plan.taken)}"


def test_all_ways_read_the_tokenizer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[TokenizerSettings]()

    def noted(config: TokenizerSettings) -> NullTokenizer:
        read.append(config)
        return NullTokenizer(config.vocab_size or 0)

    monkeypatch.setattr(vocabulary, "build_tokenizer", noted)
    vocabulary._read.cache_clear()
    opened = run(f"{AGAIN} --vocab-parallel auto --vocab-size 997")
    assert len(opened.alternatives) > 10
    assert len(read) == 1
    vocabulary._read.cache_clear()
