"""Weights in 8 bits are made once in an iteration: their bytes by hand, and their time."""

import re
from dataclasses import replace

import pytest
from planning.count.counting import LLAMA, counted, run_of

from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.planning.dry_run import dry_run
from megatron.planning.forecast_run import RunForecast, forecast_run
from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig
from megatron.simulator.costs.count import RankCount
from megatron.simulator.costs.gpus import gpu

MATRICES = 4
"""Linear layers of a transformer layer."""
ELEMENTS = 3 * 64 * 96 + 64 * 192 + 96 * 64
"""Numbers in them: gate, up and down of the MLP; queries, keys and values; attention's output."""
DELAYED, TENSORWISE = (
    EightBitSettings("hybrid", fp8_amax_history_len=4),
    EightBitSettings("e4m3", "tensorwise"),
)
BLOCKWISE = EightBitSettings("hybrid", "blockwise")


def narrow_run(eight_bits: EightBitSettings | None, layers: int, ranks: int = 2) -> RunConfig:
    model = replace(LLAMA, num_layers=ranks * layers)
    return run_of(model, "vocab-2", ranks, eight_bits=eight_bits)


def moved(count: RankCount) -> int:
    """Return the bytes that kernels move for what is done once."""
    own = count.once.parts
    return sum(times * sum(launch.bytes for launch in work.launches) for work, times in own)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(
    ("eight_bits", "of_element", "of_matrix"),
    [
        # read in bf16, written by rows and by columns; the scale is read, the largest one written
        (DELAYED, 2 + 1 + 1, 4 + 4),
        (replace(DELAYED, wide_weight_gradients=True), 2 + 1 + 1, 4 + 4),
        # read once more for the scale, of which a few numbers are made
        (TENSORWISE, 2 + 2 + 1 + 1, 44),
        # scales of squares, written twice: two of four matrices have 192 outputs, and two squares
        (BLOCKWISE, 2 + 1 + 1, 2 * 4 * 6 / 4),
    ],
    ids=["delayed", "wide weight gradients", "tensorwise", "blockwise"],
)
def test_every_weight_is_read_and_written_in_both_layouts(
    eight_bits: EightBitSettings, of_element: int, of_matrix: float, schedule: str, layers: int
) -> None:
    for count in counted(narrow_run(eight_bits, layers), [layers] * 2, schedule):
        assert moved(count) == layers * (ELEMENTS * of_element + MATRICES * of_matrix)
        assert (count.once.left, count.once.peak) == (0, 0), "the weights count as held"


def test_layers_that_stay_in_16_bits_make_none() -> None:
    ends = replace(DELAYED, first_last_layers_bf16=True, num_layers_at_end_in_bf16=2)
    first, last = counted(narrow_run(ends, 3), [3, 3])
    assert (moved(first), moved(last)) == (
        2 * (4 * ELEMENTS + 8 * MATRICES),
        4 * ELEMENTS + 8 * MATRICES,
    )
    assert all(moved(count) == 0 for count in counted(narrow_run(None, 3), [3, 3]))


def forecast(run: RunConfig) -> RunForecast:
    run = replace(run, parallel=replace(run.parallel, gpu=gpu("H100")))
    return forecast_run(run, make_run_plan(run), gpu("H100"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_microbatch_waits_for_the_weights_of_every_stage(ranks: int) -> None:
    found = forecast(narrow_run(DELAYED, 2, ranks)).outcome
    rates = gpu("H100").rates
    layer = MATRICES * rates.gap + rates.traffic(4 * ELEMENTS + 8 * MATRICES)
    assert found.once == pytest.approx(2 * ranks * layer)
    assert found.seconds == pytest.approx(found.schedule + found.once + found.step)
    assert forecast(narrow_run(None, 2, ranks)).outcome.once == 0


def test_a_dry_run_says_it() -> None:
    text = "\n".join(dry_run(narrow_run(DELAYED, 2), gpu("H100")))
    assert re.search(r"; weights in 8 bits [\d.]+ \S*s; optimizer's step", text)
    assert "weights in 8 bits" not in "\n".join(dry_run(narrow_run(None, 2), gpu("H100")))
