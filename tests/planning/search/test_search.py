"""The search finds what trying everything finds, and takes nothing that its own table dominates."""

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from megatron.parallel.settings import PipelineRankSettings
from megatron.planning.asked.question import question_of
from megatron.planning.known import NEAR
from megatron.planning.launch_line import launch_line
from megatron.planning.propose import propose
from megatron.planning.search import dimensions
from megatron.planning.search.coarse import Coarse
from megatron.planning.search.dimensions import (
    DIMENSIONS,
    EXPERT_TENSOR,
    EXPERTS,
    MEMORY,
    MICRO_BATCH,
    PAIRS,
    PIPELINE,
    SCHEDULE,
    SLICES,
    TENSOR,
    UNSPLIT,
    VOCABULARY,
    last_resorts,
    taking,
)
from megatron.planning.search.runs import Runs, has_chosen_pairs, promise_of
from megatron.planning.search.search import Search
from megatron.planning.search.ways import Found
from megatron.run.command_line import judged
from megatron.run.edit import Edit, left_out, set_to
from megatron.run.line import Line, opened
from megatron.schedules.catalogue import OPTION_FLAGS
from megatron.schedules.catalogue import SCHEDULES as ALL_SCHEDULES
from megatron.schedules.costs import Costs
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.simulator.costs.gpus import GIB, GPUS
from megatron.simulator.simulate import simulate

H100 = GPUS["H100"]
LINE = (
    "--num-layers 16 --hidden-size 2048 --num-attention-heads 16 --swiglu --seq-length 4096 "
    "--max-position-embeddings 4096 --vocab-size 128000 --untie-embeddings-and-output-weights "
    "--normalization RMSNorm --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 "
    "--global-batch-size 32 --train-iters 1 --lr 1 --bf16 --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather --dry-run --dry-run-gpu H100"
)
WORDS = LINE.split()
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
SCHEDULES = SCHEDULE._replace(
    choices=lambda flags: [
        (set_to("--pipeline-schedule", name),)
        for name in (
            ["1f1b"] if flags[PipelineRankSettings].size == 1 else ["zb-v", "1f1b", "v-min"]
        )
    ]
)
SMALL = (TENSOR, PIPELINE, MICRO_BATCH, MEMORY, SCHEDULES, VOCABULARY)


def line(*more: str) -> Line:
    return Line.of([*WORDS, *more], 4)


def asked_words() -> list[str]:
    """Return the words of the line that the command plan takes."""
    followed = LINE.replace(" --dry-run-gpu H100", "").replace(" --dry-run", "")
    return followed.replace(" --train-iters 1 --lr 1", "").split()


@cache
def searched(memory: float) -> Found:
    return Search(replace(H100, memory=memory * GIB), SMALL).run(line())


def seconds_of_all(memory: float) -> list[float]:
    """Return the estimated seconds of every combination that fits, of all choices but memory's."""
    gpu = replace(H100, memory=memory * GIB)
    runs, lines = Runs(gpu), [line()]
    for dimension in (TENSOR, PIPELINE, MICRO_BATCH, SCHEDULES, VOCABULARY):
        lines = [one.edited(own) for one in lines for own in dimension.choices(one.flags)]
    found = []
    for one in lines:
        if not one.fault:
            known = runs.estimate(one)
            found += [known.seconds] * known.fits
    return found


@pytest.mark.full
def test_nothing_that_was_not_looked_at_is_faster() -> None:
    found = searched(80)
    assert found.taken is not None
    assert found.ways[0].known.seconds <= 1.01 * min(seconds_of_all(80))


@pytest.mark.parametrize("memory", [80, 24])
def test_no_plan_is_taken_that_the_table_dominates(memory: float) -> None:
    found = searched(memory)
    assert found.taken is not None
    assert found.taken.known.fits
    taken = found.taken.known
    for way in found.ways:
        near = way.known.seconds * (1 - NEAR) <= found.ways[0].known.seconds
        price = last_resorts(way.line), way.known.held.peak
        assert not (near and price < (last_resorts(found.taken.line), taken.held.peak))
    assert taken.seconds * (1 - NEAR) <= found.ways[0].known.seconds


def test_the_same_question_has_the_same_answer() -> None:
    again = Search(replace(H100, memory=24 * GIB), SMALL).run(line())
    before = searched(24)
    assert [(way.line.key, way.known) for way in again.ways] == [
        (way.line.key, way.known) for way in before.ways
    ]


def test_less_memory_makes_no_faster_run() -> None:
    much, little = searched(80), searched(24)
    assert much.ways[0].known.seconds <= little.ways[0].known.seconds * 1.001
    assert little.taken is not None
    assert little.taken.known.held.peak < 24 * GIB


def test_flags_are_those_of_a_reading_whatever_was_edited_before() -> None:
    """Lines share the groups of flags that are alike, and no rule is asked."""
    edits = (set_to("--micro-batch-size", 2), left_out("--swiglu"), set_to("--num-layers", 8))
    lines = [line(), *(line().edited((edit,)) for edit in edits), line().edited(edits)]
    for one in (*lines, *lines):
        assert one.flags == judged(one.given, one.world_size).flags


def test_what_the_line_gives_is_not_searched() -> None:
    given = line("--pipeline-model-parallel-size", "2", "--vocab-parallel", "vocab-1")
    found = Search(H100, SMALL, estimates=6).run(given)
    for way in (*found.ways, *found.too_large):
        assert way.line.given["--pipeline-model-parallel-size"] == ("2",)
        assert way.line.given["--vocab-parallel"] == ("vocab-1",)
    names = {own.name for own in opened(SMALL, given)}
    assert names == {own.name for own in SMALL} - {"pipeline ranks", "vocabulary"}


@pytest.mark.parametrize(
    ("words", "closed"),
    [
        ("--use-interlaced-schedule", {"vocabulary"}),
        ("--enable-layer-redistribution", {"vocabulary"}),
        ("--zero-bubble-v-schedule", {"schedule"}),
        ("--num-layers-per-virtual-pipeline-stage 2", {"schedule"}),
        ("--main-grads-dtype fp32", set()),
        ("--num-seq-splits 2", {"slices"}),
        ("--seq-split-strategy uniform", set()),
    ],
)
def test_every_way_to_ask_for_a_property_closes_it(words: str, closed: set[str]) -> None:
    given = line(*words.split())
    assert {own.name for own in DIMENSIONS} - {own.name for own in opened(DIMENSIONS, given)} == (
        closed
    )


def test_a_way_to_hold_less_that_the_line_decides_is_left_as_it_is() -> None:
    def words(*given: str) -> list[tuple[str, ...]]:
        start = line(*given)
        return [start.edited(own).edited_words for own in MEMORY.choices(start.flags)]

    assert any("bf16" in own and "--vocab-recompute" in own for own in words())
    wide = words("--main-grads-dtype", "fp32", "--use-precision-aware-optimizer")
    assert not any("bf16" in own for own in wide)
    assert any("full" in own for own in wide)
    again = words("--recompute-granularity", "full", "--recompute-method", "uniform")
    assert not any("--recompute-granularity" in own for own in again)
    assert len(set(again)) == len(again) > 1


@pytest.mark.parametrize("given", [(), ("--vocab-parallel", "vocab-1")])
def test_the_job_without_a_split_vocabulary_is_no_straw_man(given: tuple[str, ...]) -> None:
    """It is as good as the taken way with its vocabulary whole, whatever treatment is asked for."""
    sizes = ("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "4")
    words = [*asked_words(), "--gpus", "4xH100", *sizes, *given]
    answer = propose(question_of(words, None))
    assert answer.taken.splits_vocabulary
    assert answer.unsplit is not None
    assert not answer.unsplit.splits_vocabulary
    runs = Runs(H100)
    taken = Line.of([*WORDS, *sizes, *given, *answer.taken.words], 4)
    for name in ("redis", "none"):
        whole = runs.estimate(taken.edited((set_to("--vocab-parallel", name),)))
        assert not whole.fits or answer.unsplit.seconds <= 1.02 * whole.seconds


def test_auto_is_what_the_search_does_and_the_proposed_line_says_what_it_chose() -> None:
    plan = "--micro-batch-size 4 --pipeline-schedule 1f1b --vocab-parallel none --vocab-recompute"
    sizes = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4"
    given = [*asked_words(), "--gpus", "4xH100", *sizes.split(), *plan.split()]
    words = [*given, "--use-precision-aware-optimizer", "--main-grads-dtype", "fp32"]
    autos = ("--num-seq-splits", "--recompute-granularity", "--cp-comm-type")
    plain = propose(question_of(words, None))
    asked = propose(question_of([*words, *(w for own in autos for w in (own, "auto"))], None))
    assert asked.taken.words == plain.taken.words
    assert "auto" not in launch_line(asked.question, asked.taken.words).split()


def test_a_property_that_is_not_searched_is_not_left_to_the_search() -> None:
    words = [*asked_words(), "--gpus", "4xH100", "--cpu-offload", "--offload-chunk-num", "auto"]
    with pytest.raises(ValueError, match=r"--offload-chunk-num auto: .* leave both flags out"):
        propose(question_of(words, None))


LONG = (
    *line().edited((left_out("--seq-length"), left_out("--max-position-embeddings"))).words,
    *("--seq-length", "65536", "--max-position-embeddings", "65536", "--global-batch-size", "4"),
)
"""Few and long samples."""


def test_slices_are_taken_where_a_dry_run_of_each_number_says_so() -> None:
    """Four microbatches idle for three of 1F1B with four stages; in n slices, for 3 / n."""
    placed = ("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "4")
    recomputed = ("--recompute-activations", "--recompute-modules", "layernorm", "mlp")
    given = Line.of([*LONG, *placed, *recomputed, "--pipeline-schedule", "1f1b"], 4)
    found = Search(H100, (MICRO_BATCH, SLICES, VOCABULARY)).run(given)
    assert found.taken is not None
    runs, one = Runs(H100), given.edited((set_to("--micro-batch-size", 1),))
    by_hand = {
        number: runs.plan(
            one.edited(
                (
                    set_to("--vocab-parallel", "vocab-2"),
                    set_to("--num-seq-splits", number),
                    set_to("--seq-split-strategy", "balanced"),
                )
            )
        )[0]
        for number in (1, 2, 4, 8)
    }
    fitting = [known.seconds for known in by_hand.values() if known.fits]
    assert found.taken.known.seconds <= min(fitting) / (1 - NEAR)
    assert by_hand[1].seconds > 1.1 * min(fitting)
    assert int(found.taken.line.given["--num-seq-splits"][0]) in (4, 8)


@pytest.mark.parametrize("ranks", [1, 4])
def test_pairs_are_taken_where_a_dry_run_of_both_says_so(ranks: int) -> None:
    """Four tensor-parallel ranks wait for each other, and one rank waits for nobody."""
    sizes = ("--tensor-model-parallel-size", str(ranks), "--sequence-parallel")
    rest = ("--pipeline-model-parallel-size", "1", "--micro-batch-size", "1")
    given = Line.of([*line().words, *sizes, *rest, "--pipeline-schedule", "1f1b"], ranks)
    found = Search(H100, (PAIRS,)).run(given)
    assert found.taken is not None
    assert ("--tp-comm-overlap" in found.taken.line.given) == (ranks > 1)
    runs, joined = Runs(H100), given.edited((Edit("--tp-comm-overlap"),))
    apart, pairs = (runs.plan(one)[0].seconds for one in (given, joined))
    assert found.taken.known.seconds == pytest.approx(min(apart, pairs))
    assert (pairs < 0.97 * apart) == (ranks > 1)


def test_no_slices_go_through_a_ring() -> None:
    """A rule refuses them, so a rough count that ranks them wastes the search."""
    given = Line.of([*LONG, "--context-parallel-size", "2"], 4)
    coarse = Coarse(given, opened(DIMENSIONS, given), Runs(H100), {})
    coarse.count()
    seen = set[tuple[str, bool]]()
    for rough in coarse.first():
        words = [word for choice in rough.choices for edit in choice for word in edit.words]
        exchange = words[words.index("--cp-comm-type") + 1]
        seen.add((exchange, "--num-seq-splits" in words))
    assert ("p2p", True) not in seen
    assert {("p2p", False), ("a2a", False), ("a2a", True)} <= seen


def test_experts_are_whole_or_shared_as_a_dry_run_of_each_says() -> None:
    mixture = ["--num-experts", "4", "--moe-router-topk", "2", "--moe-grouped-gemm"]
    given = line(*mixture, "--tensor-model-parallel-size", "2", "--sequence-parallel")
    given = given.edited(
        (
            set_to("--pipeline-model-parallel-size", 1),
            set_to("--micro-batch-size", 1),
            set_to("--moe-token-dispatcher-type", "alltoall"),
        )
    )
    found = Search(H100, (EXPERT_TENSOR, EXPERTS)).run(given)
    runs, by_hand = Runs(H100), {}
    for shared, experts in [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)]:
        own = (
            set_to("--expert-tensor-parallel-size", shared),
            set_to("--expert-model-parallel-size", experts),
        )
        by_hand[shared, experts] = runs.plan(given.edited(own))[0]
    assert found.taken is not None
    fastest = min(known.seconds for known in by_hand.values() if known.fits)
    assert found.taken.known.seconds * (1 - NEAR) <= fastest
    assert len({known.held.peak for known in by_hand.values()}) > 2


@pytest.mark.parametrize("shared", [None, 1, 2])
def test_what_a_user_says_of_shared_experts_leaves_expert_ranks_open(shared: int | None) -> None:
    more = [] if shared is None else ["--expert-tensor-parallel-size", str(shared)]
    mixture = ["--num-experts", "4", "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    given = line(*mixture, *more)
    assert {EXPERT_TENSOR, EXPERTS} - {*opened(DIMENSIONS, given)} == (
        set() if shared is None else {EXPERT_TENSOR}
    )
    sizes = {own[0].values for own in EXPERTS.choices(given.flags)}
    assert sizes == ({("4",), ("2",), ("1",)} if shared == 1 else {("2",), ("1",)})
    chosen = {own[0].values for own in EXPERT_TENSOR.choices(given.flags)}
    assert chosen == {("1",), ("2",)}


def page_example(title: str) -> str:
    """Return the code in a section of docs/extending.md."""
    page = (Path(__file__).parents[3] / "docs" / "extending.md").read_text("utf-8")
    section = page.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return "\n".join(row[4:] for row in section.split("\n") if row.startswith("    ") or not row)


def test_the_dimension_of_the_page_on_extending_takes_what_a_dry_run_of_each_choice_says() -> None:
    names = dict(vars(dimensions))
    exec(page_example("Add a dimension of the search"), names)
    given = line("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "4")
    given = given.edited((set_to("--micro-batch-size", 4), set_to("--pipeline-schedule", "1f1b")))
    given = given.edited((set_to("--vocab-parallel", "vocab-2"),))
    small = replace(H100, memory=24 * GIB)
    runs = Runs(small)
    by_hand = [runs.plan(given.edited(own))[0] for own in names["_parts_again"](given.flags)]
    assert {known.fits for known in by_hand} == {False, True}
    found = Search(small, (names["PARTS_AGAIN"],)).run(given)
    assert found.taken is not None
    fastest = min(known.seconds for known in by_hand if known.fits)
    assert found.taken.known.seconds * (1 - NEAR) <= fastest


def test_a_model_that_cannot_run_is_refused_with_the_reason() -> None:
    wrong = line("--num-query-groups", "3", "--group-query-attention")
    with pytest.raises(ValueError, match="--num-query-groups 3"):
        Search(H100, SMALL).run(wrong)


def test_nothing_fits_into_no_memory() -> None:
    found = Search(replace(H100, memory=2 * GIB), SMALL, estimates=4).run(line())
    assert found.taken is None
    assert not found.ways


def test_rough_figures_are_near_those_of_plans() -> None:
    runs, small = Runs(H100), line()
    coarse = Coarse(small, SMALL, runs, {})
    coarse.count()
    ratios = []
    for rough in coarse.first()[::23]:
        one = small.edited(tuple(edit for choice in rough.choices for edit in choice))
        if not one.fault:
            known = runs.estimate(one)
            ratios.append((known.seconds / rough.seconds, known.held.peak / rough.peak))
    assert len(ratios) > 5
    assert all(0.75 < time < 1.35 and 0.6 < memory < 1.9 for time, memory in ratios), ratios


def test_all_choices_of_all_dimensions_can_be_read() -> None:
    mixture = ["--num-experts", "8", "--moe-router-topk", "2", "--moe-grouped-gemm"]
    for start in (line(), line(*mixture)):
        placed = start.edited(
            (set_to("--pipeline-model-parallel-size", 2), set_to("--micro-batch-size", 1))
        )
        for dimension in {*DIMENSIONS, *UNSPLIT}:
            faults = [placed.edited(own).fault for own in dimension.choices(placed.flags)]
            assert not all(faults), (dimension.name, faults)


def test_microbatches_that_schedules_promise() -> None:
    def held(schedule: str, treatment: str, stages: int) -> float:
        return promise_of(
            line().edited(
                (
                    set_to("--pipeline-model-parallel-size", stages),
                    set_to("--micro-batch-size", 1),
                    set_to("--pipeline-schedule", schedule),
                    set_to("--vocab-parallel", treatment),
                )
            )
        ).held

    assert held("1f1b", "none", 4) == 4
    assert held("1f1b", "vocab-2", 4) == 5  # one barrier holds one more
    assert held("1f1b", "vocab-1", 4) == 6
    assert held("gpipe", "none", 4) == 32  # all microbatches of the only replica
    assert held("1f1b", "none", 2) == 2


@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-2p", "zb-v", "dualpipe-v", "v-half"]
)
@pytest.mark.parametrize("microbatches", [1, 2, 4, 8, 16])
def test_the_promised_time_of_few_microbatches_is_near_the_simulated(
    schedule: str, microbatches: int
) -> None:
    """F, B and W of a microbatch take a third each on each of 8 ranks, and messages no time."""
    words = LINE.replace("--global-batch-size 32", f"--global-batch-size {microbatches}").split()
    placed = Line.of(words, 8).edited(
        (
            set_to("--pipeline-model-parallel-size", 8),
            set_to("--micro-batch-size", 1),
            set_to("--pipeline-schedule", schedule),
        )
    )
    plan = make_plan(schedule, "none", 8, microbatches)
    third = 1 / (3 * plan.chunks)
    costs = Costs({"F": third, "B": third, "W": third})
    simulated = max(span.end for span in simulate(lower(plan, costs), costs).spans)
    assert 0.69 <= (microbatches + promise_of(placed).bubble) / simulated <= 1.001


@pytest.mark.parametrize(("slices", "barriers"), [(2, 0), (8, 0), (8, 1)])
def test_slices_hold_and_idle_less_as_published(slices: int, barriers: int) -> None:
    """1F1B of p stages holds (n + p - 1 + barriers) / n, and idles for (p - 1) / n."""
    placed = line().edited(
        (
            set_to("--pipeline-model-parallel-size", 4),
            set_to("--micro-batch-size", 1),
            set_to("--pipeline-schedule", "1f1b"),
            set_to("--vocab-parallel", ["none", "vocab-2"][barriers]),
            set_to("--num-seq-splits", slices),
        )
    )
    promise = promise_of(placed)
    assert (promise.held, promise.bubble) == ((slices + 3 + barriers) / slices, 3 / slices)
    assert not promise.waiting


def test_every_dimension_has_flags_of_its_own() -> None:
    for one, other in product(DIMENSIONS, DIMENSIONS):
        if one is not other:
            assert set(one.options).isdisjoint(other.options)


def test_edits_of_a_dimension_stay_within_its_flags() -> None:
    placed = line().edited(
        (set_to("--pipeline-model-parallel-size", 2), set_to("--micro-batch-size", 1))
    )
    for dimension in DIMENSIONS:
        for choice in dimension.choices(placed.flags):
            assert {edit.option for edit in choice} <= set(dimension.options)
    assert left_out("--vocab-recompute").words == ()


def test_slices_and_pairs_are_tried_together_only_where_the_user_names_one() -> None:
    shared = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
    sized = [*LONG, *shared, "--pipeline-model-parallel-size", "2"]
    given, joined = Line.of(sized, 4), Edit("--tp-comm-overlap")
    cut = set_to("--num-seq-splits", 2)
    assert (
        len(SLICES.choices(given.flags)) > len(SLICES.choices(given.edited((joined,)).flags)) == 1
    )
    assert len(PAIRS.choices(given.flags)) > len(PAIRS.choices(given.edited((cut,)).flags)) == 1
    assert len(SLICES.choices(Line.of([*sized, *joined.words], 4).flags)) > 1
    assert len(PAIRS.choices(Line.of([*sized, *cut.words], 4).flags)) > 1


def test_groups_that_the_user_names_leave_the_schedules_that_have_them() -> None:
    grouped = line(GROUP, "2")
    sizes = {size: set_to("--pipeline-model-parallel-size", size) for size in (1, 2, 4)}
    names = {
        size: {
            dict(own)["--pipeline-schedule"]
            for own in SCHEDULE.choices(grouped.edited((edit,)).flags)
        }
        for size, edit in sizes.items()
    }
    assert names == {1: set(), 2: {("interleaved",)}, 4: set()}
    small = promise_of(grouped.edited((sizes[4], set_to("--pipeline-schedule", "interleaved"))))
    assert small.held > 1, "a rule refuses it, and the rough count does not break off"
    wider = (TENSOR, PIPELINE, MICRO_BATCH, MEMORY, SCHEDULE, VOCABULARY)
    found = Search(replace(H100, memory=80 * GIB), wider).run(grouped)
    assert found.taken is not None
    assert found.taken.line.given["--pipeline-schedule"] == ("interleaved",)
    assert {way.line.given["--pipeline-model-parallel-size"] for way in found.ways} == {("2",)}


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_an_edit_of_the_schedule_drops_the_options_that_no_rule_lets_it_have(name: str) -> None:
    sizes = ("--pipeline-model-parallel-size", "2", "--micro-batch-size", "1")
    chunks = ("--pipeline-schedule", "interleaved", "--num-virtual-stages-per-pipeline-rank", "4")
    given = line(*sizes, *chunks, GROUP, "2")
    assert not given.fault
    taken = given.edited(taking(name))
    assert not taken.fault
    dropped = {option for option in OPTION_FLAGS if option in given.given} - taken.given.keys()
    for option in dropped:
        again = taken.edited((set_to(option, *given.given[option]),))
        assert again.fault.startswith(option), "no rule refuses it"


def test_large_plans_with_pairs_are_the_users_alone() -> None:
    """The search passes over pairs that take long to plan, and never over the user's own."""
    shared = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
    sizes = ("--pipeline-model-parallel-size", "16", "--num-layers", "128")
    rest = ("--micro-batch-size", "1", "--global-batch-size", "512")
    chunks = ("--num-virtual-stages-per-pipeline-rank", "8")
    words = [*line().words, *shared, *sizes, *rest, "--pipeline-schedule", "interleaved", *chunks]
    with pytest.raises(ValueError, match="give --tp-comm-overlap"):
        Runs(H100).estimate(Line.of(words, 32).edited((Edit("--tp-comm-overlap"),)))
    assert not has_chosen_pairs(Line.of([*words, "--tp-comm-overlap"], 32))
