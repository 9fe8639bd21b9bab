"""docs/reference/published_2026.csv: read as runs, predicted anew, and summed up in the docs."""

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import pytest

from megatron.model.flops import iteration_flops
from megatron.run.command_line import parse
from megatron.simulator.costs.accuracy import SHARED as SHARED_ERRORS
from megatron.simulator.costs.count import (
    Begin,
    Collective,
    Launch,
    PassCount,
    Product,
    RankCount,
    Step,
    Work,
    product,
)
from tools.predictions import shared_tables
from tools.predictions.calibrate_shared import LEFT
from tools.predictions.shared_models import model_of
from tools.predictions.shared_runs import (
    FOUR_BITS,
    HYBRID,
    NO_LAYOUT,
    SHARDED,
    UNKNOWN,
    SharedRun,
    read_shared,
)
from tools.predictions.shared_tables import (
    CLASSES,
    FAMILIES,
    LEFT_OUT,
    PREDICTED,
    PredictedRow,
    left_out_rows,
    read_predicted,
    sums,
    write_predicted,
)
from tools.predictions.shared_times import SharedPrediction, as_megatron_lm
from tools.predictions.transformer_engine import as_transformer_engine

REFERENCE = Path("docs/reference")
TABLE = REFERENCE / "published_2026.csv"
PAGE = Path("docs/predictions.md")
RUNS, WHY_NOT = read_shared(TABLE)
QUICK = (1238, 1268, 1280, 1285, 1431)
"""Rows that are quick to predict: a mixture, a pipeline, context ranks, 8 bits, and a GB200."""


def run_of(number: int) -> SharedRun:
    [found] = [run for run in RUNS if run.number == number]
    return found


def test_every_row_is_a_run_or_has_a_reason() -> None:
    assert len(RUNS) + len(WHY_NOT) == 240
    assert Counter(WHY_NOT.values()) == {
        HYBRID: 33,
        SHARDED: 18,
        NO_LAYOUT: 8,
        FOUR_BITS: 4,
        UNKNOWN: 1,
    }
    for run in RUNS:
        ranks = run.tensor * run.pipeline * run.context * run.replicas
        assert run.gpus == ranks, run
        assert run.global_batch == run.replicas * run.micro_batch * run.microbatches


FULL_ATTENTION = {"NeMo 24.07", "NeMo 24.09", "NeMo 25.02", "NeMo 25.04", "NeMo 25.07"}
"""Sources that count attention in full, and give TFLOP/s with three digits."""


@pytest.mark.parametrize(
    "number",
    [1398, 1399, 1400, 1402, 1403, 1404, 1405, 1406, 1407, 1408, 1409, 1421, 1423, 1427],
)
def test_models_have_the_flops_that_their_sources_count(number: int) -> None:
    """TFLOP/s times GPUs times seconds are the FLOPs of an iteration, all by the source."""
    run = run_of(number)
    assert run.origin in FULL_ATTENTION
    world = run.tensor * run.pipeline * run.context
    config = parse(run.flags.split(), world_size=world, speak=False)
    own = run.global_batch * iteration_flops(config.model, 1)
    assert own == pytest.approx(1e12 * run.tflops * run.gpus * run.seconds, rel=0.011)


@pytest.mark.parametrize(
    ("number", "attention"), [(1268, 1.0), (1326, 1.0), (1215, 0.5), (1217, 0.5)]
)
def test_models_have_the_mfu_that_their_sources_count(number: int, attention: float) -> None:
    """Sources of 2025 and 2026 count the causal half of attention."""
    run = run_of(number)
    world = run.tensor * run.pipeline * run.context
    model = parse(run.flags.split(), world_size=world, speak=False).model
    tokens = run.global_batch * run.seq_length
    channels = 4096  # of all heads: 32 of 128
    layers = run.model.layers
    hidden = {1268: 8192}.get(number, channels)
    left = (1 - attention) * 12 * tokens * run.seq_length * hidden * layers
    own = run.global_batch * iteration_flops(model, 1) - left
    told = run.tflops or run.mfu / 100 * run.gpu.peak_tflops
    assert own == pytest.approx(1e12 * told * run.gpus * run.seconds, rel=0.012)


def test_names_are_models() -> None:
    proxy = model_of("Llama-3.1-405B (proxy, 42 layers)")
    assert proxy is not None
    assert proxy.layers == 42
    assert "--num-layers 42 " in proxy.flags
    plain = model_of("DeepSeekV3 (w/o MTP)")
    assert plain is not None
    assert "--mtp" not in plain.flags
    assert model_of("DeepSeekV4-Flash") is None


def test_layers_are_spread_as_the_sources_spread_them() -> None:
    """DeepSeek-V3 on 16 stages: four layers each, the last has one and the further tokens'."""
    layout = "--pipeline-model-parallel-layout Etttt|(tttt|)*14tmL"
    assert layout in run_of(1104).flags
    assert "--account-for-loss-in-pipeline-split" in run_of(1034).flags


GATHER = Collective("all_gather", "tensor", 4, 1000)
SCATTER = Collective("reduce_scatter", "tensor", 4, 1000)


def names(steps: Sequence[Step]) -> list[str]:
    """Name every step, a beginning by what it begins."""
    return [
        step.name
        if isinstance(step, Launch)
        else "+".join(own.kind for own in step.collectives)
        if isinstance(step, Begin)
        else type(step).__name__
        for step in steps
    ]


def test_collectives_run_beside_products_in_the_sources_program() -> None:
    work = Work((GATHER, Launch("quantise", 8), product(4, 4, 4), Launch("clone", 8), SCATTER))
    count = RankCount({("F", 0): PassCount.of(work)})
    [(changed, times)] = as_megatron_lm(count, looks=False).passes["F", 0].parts
    assert times == 1
    assert names(changed.steps) == ["all_gather+reduce_scatter", "product", "Await"]


@pytest.mark.parametrize(("looks", "rounds"), [(True, 2), (False, 1)])
def test_scales_of_8_bits_take_no_kernels_of_their_own(looks: bool, rounds: int) -> None:
    """One kernel rounds; another one looks for the largest value if scales are of now."""
    scale = [Launch(name, 16) for name in ("zeros", "clamp", "reciprocal", "mul", "div")]
    multiplied = Launch("grouped_eight_bit_product", 99, 10, Product(4, 4, 4))
    steps = (
        scale[0], Launch("quantise", 1000), *scale[1:], Launch("quantise", 2000),
        multiplied, Launch("add_", 5000), Launch("add_", 5000),
    )  # fmt: skip
    found = as_transformer_engine(Work(steps), looks=looks)
    assert names(found.steps) == [*["quantise"] * rounds, "eight_bit_product", "add_"]
    quantised = next(step for step in reversed(found.steps) if names([step]) == ["quantise"])
    assert isinstance(quantised, Launch)
    assert quantised.bytes == 2000


def test_a_long_row_of_elementwise_kernels_is_one_kernel() -> None:
    row = [Launch("clamp", 20_000), *[Launch("mul", 30_000)] * 5, Launch("sigmoid", 20_000)]
    long, short = (as_transformer_engine(Work(tuple(own)), looks=True) for own in (row, row[:4]))
    assert long.steps == (Launch("gated", 30_000),)
    assert len(short.steps) == 4


@pytest.mark.parametrize("number", QUICK)
def test_a_row_of_the_file_is_a_new_prediction(number: int) -> None:
    """If this fails, ``tools/predictions/shared_tables.py --update`` has the figures that hold."""
    [line] = [row for row in read_predicted(REFERENCE / PREDICTED) if row.number == number]
    assert PredictedRow.of(run_of(number)).cells == line.cells


def test_this_program_takes_longer_than_the_sources() -> None:
    """It waits for collectives that the source hides."""
    found = SharedPrediction(run_of(1268))
    assert found.ours > found.source
    assert found.gap == pytest.approx(found.ours / found.source - 1)


def test_a_dry_run_says_the_errors_of_mixtures() -> None:
    """No constant was fitted to them."""
    groups: dict[str, list[PredictedRow]] = {}
    for row in read_predicted(REFERENCE / PREDICTED):
        groups.setdefault(row.kind, []).append(row)
    assert {str(kind) for kind in SHARED_ERRORS} == set(groups)
    for kind, told in SHARED_ERRORS.items():
        rows = groups[str(kind)]
        assert (told.runs, told.families) == (len(rows), len({row.family for row in rows}))
        if kind.experts:
            errors = [100 * row.error for row in rows]
            mean, signed = sum(map(abs, errors)) / len(errors), sum(errors) / len(errors)
            most: float = max(errors, key=abs)
            assert (told.mean, told.most) == (round(mean, 1), round(most, 1))
            assert told.signed == round(signed, 1)


def test_a_dry_run_says_the_errors_of_dense_families_left_out() -> None:
    """As docs/predictions.md has them: Blackwell has two generations, fitted apart."""
    page = PAGE.read_text(encoding="utf-8").splitlines()
    start = page.index(LEFT) + 2
    table = takewhile(lambda row: row.startswith("|"), page[start:])
    lines = [[cell.strip() for cell in row.strip("|").split("|")] for row in table]
    for kind, told in SHARED_ERRORS.items():
        if kind.experts:
            continue
        here = "H100" if kind.generation == "H100" else "B"
        precision = "8 bits" if kind.eight_bits else "bf16"
        own = [line for line in lines if line[0].startswith(here) and precision in line[0]]
        own = [line for line in own if line[0].endswith("dense")]
        runs = [int(line[2]) for line in own]
        means, mosts, signs = ([float(line[i].split()[0]) for line in own] for i in (3, 4, 5))
        assert sum(runs) == told.runs
        for said, cells in ((told.mean, means), (told.signed, signs)):
            weighted = sum(n * cell for n, cell in zip(runs, cells, strict=True)) / sum(runs)
            assert said == pytest.approx(weighted, abs=0.1)
        furthest: float = max(mosts, key=abs)
        assert told.most == furthest


def test_the_sums_of_the_docs_are_those_of_the_file() -> None:
    page = PAGE.read_text(encoding="utf-8").splitlines()
    rows = read_predicted(REFERENCE / PREDICTED)
    assert {row.number for row in rows} == {run.number for run in RUNS}
    for heading, lines in (
        (CLASSES, list(sums(rows))),
        (FAMILIES, list(sums(rows, families=True))),
        (LEFT_OUT, list(left_out_rows(WHY_NOT))),
    ):
        start = page.index(heading) + 2
        assert page[start : start + len(lines)] == lines


def test_a_row_survives_its_file(tmp_path: Path) -> None:
    words = ("a", "H100", "8", "t 1", "BF16", "H100, bf16, dense", "Llama 8B")
    row = PredictedRow(7, words, 10.0, 11.0, 12.1)
    write_predicted(tmp_path / "rows.csv", [row])
    assert read_predicted(tmp_path / "rows.csv") == [row]
    [line] = sums([row])
    assert line == "| H100, bf16, dense | 1 | 1 | 10.0 % | +10.0 % | +10.0 % | 10.0 % |"


def test_another_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.csv"
    file.write_text("id,model\n1,GPT\n")
    with pytest.raises(ValueError, match="is no table of published iterations"):
        read_shared(file)
    with pytest.raises(ValueError, match="is no table of predictions"):
        read_predicted(file)


def test_single_rows_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    shared_tables.main([str(REFERENCE), "--rows", "1280"])
    heading, line = capsys.readouterr().out.splitlines()
    assert heading.startswith("id,model,gpu")
    assert line.startswith("1280,Llama-3.1-8B,H100,8,")
