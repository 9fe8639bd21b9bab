"""Bytes of a model: every parameter once, everything on the rank that has it."""

from dataclasses import replace

import pytest
from harness.marks import full

from megatron.schedules.catalogue import SCHEDULES
from megatron.schedules.lower import Start, lower
from megatron.schedules.make_plan import make_plan
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.model_bytes import (
    FP16_PARAMETER,
    FP32_GRADIENT_PARAMETER,
    LogitBytes,
    model_sizes,
)
from megatron.simulator.costs.peak_bytes import peak_bytes
from megatron.simulator.costs.shape import Shape, TensorSplit

SHAPE = Shape(64, 4, 16, 1000)
PARAMETERS = 10 * 12 * 64**2 + 2 * 64 * 1000
LINE = ((0, 0), (1, 0), (2, 0))
V_SHAPE = ((0, 0), (1, 0), (1, 1), (0, 1))
NO_LOGITS = LogitBytes(0, 0)


@pytest.mark.parametrize("treatment", ["none", "redis", "vocab-1", "vocab-2", "interlaced"])
@pytest.mark.parametrize(("stages", "layers"), [(LINE, [3, 4, 3]), (V_SHAPE, [2, 3, 4, 1])])
@pytest.mark.parametrize("per_parameter", [FP16_PARAMETER, FP32_GRADIENT_PARAMETER])
def test_every_parameter_counts_once(
    treatment: str, stages: tuple[tuple[int, int], ...], layers: list[int], per_parameter: int
) -> None:
    sizes = model_sizes(
        SHAPE, stages, layers, TREATMENTS[treatment], per_parameter=per_parameter, logit=NO_LOGITS
    )
    assert not isinstance(sizes.static, float)
    assert sum(sizes.static) == pytest.approx(per_parameter * PARAMETERS)


@pytest.mark.parametrize("treatment", ["none", "vocab-1", "vocab-2"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_ranks_share_all_matrices(treatment: str, sequence_parallel: bool) -> None:
    split = replace(SHAPE, tensor=TensorSplit(4, sequence_parallel))
    sizes = model_sizes(split, LINE, [3, 4, 3], TREATMENTS[treatment], logit=NO_LOGITS)
    assert not isinstance(sizes.static, float)
    assert 4 * sum(sizes.static) == pytest.approx(FP16_PARAMETER * PARAMETERS)


@pytest.mark.parametrize(
    ("stages", "treatment", "copies"),
    [(LINE, "vocab-2", 1), (LINE, "none", 2), (V_SHAPE, "none", 1), (V_SHAPE, "naive", 1)],
)
def test_a_tied_matrix_has_a_copy_where_it_is_needed(
    stages: tuple[tuple[int, int], ...], treatment: str, copies: int
) -> None:
    layers = [0] * len(stages)
    sizes = model_sizes(SHAPE, stages, layers, TREATMENTS[treatment], logit=NO_LOGITS, tied=True)
    assert not isinstance(sizes.static, float)
    assert sum(sizes.static) == pytest.approx(FP16_PARAMETER * copies * 64 * 1000)


@pytest.mark.parametrize("treatment", ["none", "vocab-2"])
def test_biases_and_norms_are_where_their_layers_are(treatment: str) -> None:
    """Split over the stages as the layers, whatever becomes of the vocabulary."""
    layers = [3, 5, 2]
    bare, full = (
        model_sizes(replace(SHAPE, vector_parameters=count), LINE, layers, TREATMENTS[treatment])
        for count in (0, 70)
    )
    assert not isinstance(bare.static, float)
    assert not isinstance(full.static, float)
    more = [b - a for a, b in zip(bare.static, full.static, strict=True)]
    assert more == [FP16_PARAMETER * 70 * count for count in layers]
    assert full.activation == bare.activation


def test_peaks_by_hand() -> None:
    """1F1B on 3 ranks holds 3, 2 and 1 microbatches; the last rank the logits of its own."""
    x, layer, stage = 2 * 16 * 64, 34 * 16 * 64, 16 * 12 * 64**2
    embedding, logits = 16 * 64 * 1000, 16 * 1000
    plan = make_plan("1f1b", "none", 3, 8)
    sizes = model_sizes(SHAPE, LINE, [3, 4, 3], TREATMENTS["none"])
    assert peak_bytes(plan, sizes) == [
        3 * stage + embedding + 3 * 3 * layer,
        4 * stage + 2 * 4 * layer,
        3 * stage + embedding + 3 * layer + 2 * x + (4 + 4) * logits,
    ]


def test_vocabulary_parallelism_levels_the_parameters() -> None:
    sizes = model_sizes(SHAPE, LINE, [4, 4, 4], TREATMENTS["vocab-2"])
    assert not isinstance(sizes.static, float)
    assert len(set(sizes.static)) == 1
    assert sizes.exponentials == pytest.approx(2 * 16 * 64 + 4 * 16 * 1000 / 3)
    assert sizes.embedding == [2 * 16 * 64, 0, 0]


QUICK = "1f1b", "interleaved", "zb-v", "v-half"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", [name if name in QUICK else full(name) for name in SCHEDULES])
def test_no_more_early_input_gradients_than_are_counted(schedule: str) -> None:
    """S waits for C0, and of all collectives one runs after another.

    So what S has left is gone once its C1 comes before another microbatch's C0.
    """
    for ranks, microbatches in [(2, 16), (4, 4), (6, 9)]:
        for row in lower(make_plan(schedule, "vocab-2", ranks, microbatches)).rows:
            early = 0
            for instruction in row:
                if isinstance(instruction, Start):
                    early += {"C0": 1, "C1": -1}.get(instruction.comm.kind, 0)
                    assert early <= TREATMENTS["vocab-2"].gradients_held
