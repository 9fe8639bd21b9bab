"""The work of a search is counted: how many shapes, estimates and refusals a question may take."""

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest

from megatron.parallel.settings import PipelineRankSettings
from megatron.planning.candidate import Candidate
from megatron.planning.known import NEAR, Known, Level
from megatron.planning.run_memory import Fullest
from megatron.planning.search.coarse import Coarse
from megatron.planning.search.dimensions import DIMENSIONS, PIPELINE, SLICES, UNSPLIT
from megatron.planning.search.expected import Expected
from megatron.planning.search.rough import Rough
from megatron.planning.search.runs import Runs, promise_of
from megatron.planning.search.search import ESTIMATES, LATER_ESTIMATES, Search
from megatron.run.dimension import Dimension
from megatron.run.edit import set_to
from megatron.run.line import Line, combined, opened
from megatron.schedules.limits import GIB_FLAG, PERCENT_FLAG
from megatron.simulator.costs.gpus import GIB, GPUS

H100 = GPUS["H100"]
LINE = (
    "--num-layers 61 --hidden-size 2048 --num-attention-heads 16 --swiglu --seq-length 4096 "
    "--max-position-embeddings 4096 --vocab-size 128000 --untie-embeddings-and-output-weights "
    "--normalization RMSNorm --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 "
    "--global-batch-size 1920 --train-iters 1 --lr 1 --bf16 --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather --dry-run --dry-run-gpu H100"
)
MIXTURE = ["--num-experts", "64", "--moe-router-topk", "4", "--moe-grouped-gemm"]


@dataclass
class InventedRuns(Runs):
    """Runs whose figures cost nothing: whoever computes more again is slower, and holds less.

    Attributes:
        refused: a word that makes no run.
        larger: context ranks whose whole plans fit no GPU, though plans of few microbatches fit.
        microbatches: of every run.
        asked: how often bounds and estimates were asked for.
    """

    refused: str = ""
    larger: str = ""
    microbatches: int = 10**6
    asked: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__(H100)

    def candidate(self, line: Line) -> Candidate:
        chunks = int(line.given.get("--num-virtual-stages-per-pipeline-rank", ("1",))[0])
        ranks = line.flags[PipelineRankSettings].size
        request = SimpleNamespace(ranks=ranks, units=self.microbatches, chunks=chunks)
        return cast(Candidate, SimpleNamespace(shared_states=GIB, request=request))

    def bound(self, line: Line) -> Known:
        self.asked["bound"] += 1
        return self._invented("bound", line)

    def estimate(self, line: Line) -> Known:
        self.asked["estimate"] += 1
        if line.fault or (self.refused and self.refused in line.edited_words):
            self.asked["refused"] += 1
            raise ValueError(line.fault or f"{self.refused}: refused")
        return self._invented("estimate", line)

    def plan(self, line: Line) -> tuple[Known, Candidate]:
        known = self._invented("plan", line)
        if self.larger in line.given["--context-parallel-size"]:
            known = known._replace(held=Fullest(0, 80 * GIB, 20 * GIB), fits=False)
        return known, self.candidate(line)

    def _invented(self, level: Level, line: Line) -> Known:
        again = sum("recompute" in option for option in line.given)
        seconds = float(line.given["--global-batch-size"][0]) / line.world_size
        held = Fullest(0, (20 + 20 / (1 + again)) * GIB, 20 * GIB)
        return Known(level, seconds * (1 + again / 50), held, fits=True)


def line(ranks: int, *more: str) -> Line:
    return Line.of([*LINE.split(), *more], ranks)


@pytest.mark.parametrize(("ranks", "more"), [(64, []), (1024, MIXTURE), (4096, MIXTURE)])
def test_every_shape_and_every_choice_is_counted_once(ranks: int, more: list[str]) -> None:
    asked, runs = line(ranks, *more), InventedRuns()
    dimensions = opened(DIMENSIONS, asked)
    early = [own.at_first for own in dimensions]
    shapes = combined(asked, [own for own in early if own.kind == "shape"])
    factors = [own for own in dimensions if own.kind == "factor" or own.counted]
    # of a factor: all its choices, and the line beside which they are judged
    most = sum(1 + max(len(own.choices(one.flags)) for one in shapes) + 3 for own in factors)
    coarse = Coarse(asked, early, runs, {})
    coarse.count()
    coarse.dimensions = dimensions
    coarse.count([rough.choices for rough in coarse.first()[-1:]])
    shared = 2 if more else 0  # beside one shape: ranks that share an expert, twice
    assert len(shapes) <= runs.asked["bound"] <= len(shapes) + shared + most


@pytest.mark.parametrize("refused", ["", "zb-v", "vocab-2"])
def test_refused_combinations_take_little_work(refused: str) -> None:
    asked, runs = line(64), InventedRuns(refused=refused)
    found = Search(H100, DIMENSIONS, runs=runs).run(asked)
    assert found.taken is not None
    assert found.combinations > 500
    assert runs.asked["estimate"] - runs.asked["refused"] <= ESTIMATES + LATER_ESTIMATES
    stages = {own.choices[DIMENSIONS.index(PIPELINE)] for own in found.ways}
    orders = 6 * len(stages) + 60  # stand-ins beside all stages, and all orders of the best
    assert runs.asked["refused"] <= 8 * SLICES.stand_ins * orders


@dataclass
class MisjudgedRuns(InventedRuns):
    """Runs of which those with later choices of a dimension seem fast and are slow.

    Attributes:
        option: a flag of the dimension.
        usual: its values in first choices.
    """

    option: str = ""
    usual: tuple[str, ...] = ("1", "allgather")

    def _invented(self, level: Level, line: Line) -> Known:
        known = super()._invented(level, line)
        (value,) = line.given.get(self.option, self.usual[:1])
        if value in self.usual:
            return known
        return known._replace(seconds=known.seconds * (0.8 if level == "bound" else 1.2))


@pytest.mark.parametrize(
    "dimension", [own for own in DIMENSIONS if own.later], ids=lambda own: own.name
)
def test_a_later_dimension_makes_no_answer_worse(dimension: Dimension) -> None:
    """Whatever later choices seem to save, all that is found without them is found beside them."""
    narrow = ["--context-parallel-size", "1", "--main-grads-dtype", "fp32", "--vocab-recompute"]
    asked, (option, *_) = line(16, *MIXTURE, *narrow), dimension.options
    firsts = [own.at_first for own in DIMENSIONS]
    before = Search(H100, firsts, runs=MisjudgedRuns(option=option)).run(asked)
    found = Search(H100, DIMENSIONS, runs=MisjudgedRuns(option=option)).run(asked)
    looked_at = {way.line.key for way in (*found.ways, *found.too_large)}
    assert before.taken is not None
    assert found.taken is not None
    assert {way.line.key for way in (*before.ways, *before.too_large)} <= looked_at
    assert found.taken.known.seconds * (1 - NEAR) <= before.taken.known.seconds
    assert len(found.ways) > len(before.ways)


def test_estimates_that_are_left_are_made_if_no_whole_plan_fits() -> None:
    def made(larger: str) -> int:
        whole = "--recompute-granularity", "full", "--recompute-method", "uniform"
        rest = ["--vocab-parallel", "vocab-2", "--context-parallel-size", "1"]
        asked = line(64, *whole, *rest, "--num-seq-splits", "1", "--tp-comm-overlap")
        runs = InventedRuns(larger=larger, microbatches=8)
        found = Search(H100, DIMENSIONS, 24, runs=runs).run(asked)
        assert (found.taken is None) == bool(larger)
        return runs.asked["estimate"] - runs.asked["refused"]

    assert made(larger="") < made(larger="1") == 24


def test_layers_that_do_not_divide_can_be_compared_with_a_whole_vocabulary() -> None:
    """``redis`` spreads layers itself, so it is refused beside a schedule that spreads them."""
    asked = line(64)
    dimensions = opened(UNSPLIT, asked)
    coarse = Coarse(asked, dimensions, InventedRuns(), {})
    coarse.count()
    rough = [own for own in coarse.first() if own.ordering[0] != 1]
    faults = {
        asked.edited(tuple(edit for own in each.choices for edit in own)).fault
        for each in {own.ordering: own for own in rough}.values()
    }
    assert rough
    assert faults == {""}


def test_micro_batches_are_counted_where_replicas_have_them() -> None:
    """Without stages 9 x 8 replicas have no equal shares of 512 samples; 8 of 9 stages have."""
    asked = line(72, "--global-batch-size", "512", "--num-layers", "63")
    coarse = Coarse(asked, opened(DIMENSIONS, asked), InventedRuns(), {})
    coarse.count()
    stages = {own.ordering[0] for own in coarse.first()}
    assert 9 in stages


@pytest.mark.parametrize("gib", [20, 40, 79])
@pytest.mark.parametrize("share", [False, True])
def test_rough_counts_heed_a_limit_by_memory_where_plans_do(gib: int, share: bool) -> None:
    """zb-v fills a limit, and is passed over if it holds more; 1F1B knows no limit."""

    def rough(*limit: str) -> dict[str, Rough]:
        sizes = "--tensor-model-parallel-size", "1", "--context-parallel-size", "1"
        given = line(4, *sizes, "--micro-batch-size", "1", "--vocab-parallel", "none", *limit)
        coarse = Coarse(given, (PIPELINE, names), InventedRuns(), {})
        coarse.count()
        four = [own for own in coarse.first() if own.ordering[0] == 4]
        return {own.choices[1][0].words[-1]: own for own in four}

    names = Dimension(
        "schedule",
        "order",
        ("--pipeline-schedule",),
        lambda flags: [(set_to("--pipeline-schedule", name),) for name in ("zb-v", "1f1b")],
        stand_ins=2,
    )
    given = f"{100 * gib * GIB / H100.memory:g}" if share else str(gib)
    free, limited = rough(), rough(PERCENT_FLAG if share else GIB_FLAG, given)
    assert limited["1f1b"] == free["1f1b"]
    own, plain = limited["zb-v"], free["zb-v"]
    assert own.room == pytest.approx(min(gib * GIB, plain.room), rel=1e-5)
    assert own.seconds == plain.seconds
    # the invented figures: 5.75 GiB that stay, and 5 GiB for each of 4 microbatches in flight
    assert plain.peak == pytest.approx(25.75 * GIB)
    assert own.peak == pytest.approx(max(plain.peak, own.room), rel=1e-5)
    fits = Expected().first(own.ordering, [own]) is not None
    assert fits == (gib > 25.75)


def test_no_recomputation_lessens_activations_that_wait_for_w() -> None:
    def waiting(schedule: str) -> float:
        sizes = set_to("--pipeline-model-parallel-size", 4), set_to("--micro-batch-size", 1)
        return promise_of(line(4).edited((*sizes, set_to("--pipeline-schedule", schedule)))).waiting

    assert waiting("1f1b") == waiting("interleaved") == 0
    assert waiting("zb-h1") > 0
    asked, runs = line(4), Runs(H100)
    coarse = Coarse(asked, [own.at_first for own in opened(DIMENSIONS, asked)], runs, {})
    coarse.count()
    full = ("--recompute-granularity", ("full",))
    four = [own for own in coarse.first() if own.ordering[0] == 4]
    again = [own for own in four if full in {tuple(edit) for one in own.choices for edit in one}]
    split = next(own for own in again if own.choices[-2][0].values == ("zb-h1",))
    one = asked.edited(tuple(edit for own in split.choices for edit in own))
    assert split.peak > 0.5 * runs.estimate(one).held.peak
