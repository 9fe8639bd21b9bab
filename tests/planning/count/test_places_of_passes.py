"""Every part of a model is counted on the rank that has it, with its communications."""

from collections import Counter
from collections.abc import Iterator

import pytest
from planning.count.counting import FURTHER, LLAMA, MODEL, counted, run_of

from megatron.layers.recompute import Recomputation
from megatron.layers.vocabulary.settings import ShardSettings
from megatron.model.distribution import LayerDistribution
from megatron.model.settings import ModelSettings
from megatron.parallel.context_settings import ContextRankSettings
from megatron.parallel.settings import TensorRankSettings
from megatron.schedules.needs import CommKind
from megatron.schedules.passes import PassKind
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.count import Begin, Collective, PassCount, RankCount

X = 2 * 32 * 64
"""Bytes of an activation."""
PRODUCT = 2 * 32 * 64 * 960
"""FLOPs of one product of the whole output layer."""
LAYER = 12 * 64**2 + 13 * 64
"""Parameters of a GPT's layer: matrices, their biases and two norms."""


def collectives(count: PassCount) -> Iterator[Collective]:
    """Yield all collectives of a pass."""
    for work, times in count.parts:
        for step in work.steps:
            if isinstance(step, Collective):
                yield from [step] * times
            elif isinstance(step, Begin):
                yield from step.collectives * times


def flops(count: RankCount, kind: PassKind, chunk: int = 0) -> int:
    return count.passes[kind, chunk].flops


@pytest.mark.parametrize("schedule", ["zb-h1", "v-half"])
def test_the_whole_output_layer_is_in_the_last_stage(schedule: str) -> None:
    """It forms the input's gradient in F."""
    chunks = 2 if schedule == "v-half" else 1
    counts = counted(run_of(MODEL, "none", 2), [8 // (2 * chunks)] * 2 * chunks, schedule)
    last, other = (counts[0], counts[1]) if schedule == "v-half" else (counts[1], counts[0])
    products: dict[PassKind, int] = {"F": 2, "B": 0, "W": 1}
    for kind, number in products.items():
        more = flops(last, kind, chunks - 1) - flops(other, kind, chunks - 1)
        assert more == number * PRODUCT


@pytest.mark.parametrize(
    ("treatment", "in_s", "in_t"),
    [("vocab-2", 2, 1), ("vocab-1", 1, 2), ("naive", 1, 2), ("interlaced", 1, 2)],
)
@pytest.mark.parametrize("further", [0, 2])
def test_shards_do_the_products_of_the_output_layer(
    treatment: str, in_s: int, in_t: int, further: int
) -> None:
    """Of the next token, and of further ones."""
    model = LLAMA.replaced(mtp_num_layers=further)
    for count in counted(run_of(model, treatment, 4), [2] * 4):
        assert flops(count, "S") == in_s * (1 + further) * PRODUCT / 4
        assert flops(count, "T") == in_t * (1 + further) * PRODUCT / 4


def test_logits_that_are_not_kept_take_one_more_product() -> None:
    for treatment in ("vocab-1", "vocab-2"):
        kept, again = (
            counted(
                run_of(MODEL, treatment, 2, sizes={"vocabulary": ShardSettings(recompute)}), [4, 4]
            )[0]
            for recompute in (False, True)
        )
        assert flops(again, "S") == flops(kept, "S")
        assert flops(again, "T") == flops(kept, "T") + PRODUCT / 2


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.parametrize("shared", [1, 2])
def test_every_parameter_is_somewhere_once(treatment: str, schedule: str, shared: int) -> None:
    """Tensor-parallel ranks share matrices, and each has all norms, positions and outer biases."""
    model = MODEL.replaced(tie_embeddings=False)
    run = run_of(model, treatment, 2, sizes={"tensor": TensorRankSettings(shared)})
    stages = 4 if schedule == "zb-v" else 2
    counts = counted(run, [8 // stages] * stages, schedule)
    copied = 8 * 6 * 64 + 32 * 64 + 2 * 64  # norms and outer biases, positions, the last norm
    matrices = sum(count.parameters.matrices for count in counts)
    assert shared * matrices == 8 * 12 * 64**2 + shared * 32 * 64, "positions are a matrix too"
    whole = 8 * LAYER + 2 * 64 * 960 + 32 * 64 + 2 * 64
    assert shared * sum(own.parameters.all for own in counts) == whole + (shared - 1) * copied


@pytest.mark.parametrize(
    ("schedule", "treatment", "copies"),
    [("1f1b", "vocab-2", 1), ("1f1b", "none", 2), ("zb-v", "none", 1), ("zb-v", "naive", 1)],
)
def test_a_tied_matrix_has_a_copy_where_it_is_needed(
    schedule: str, treatment: str, copies: int
) -> None:
    counts = counted(
        run_of(MODEL, treatment, 2), [2] * 4 if schedule == "zb-v" else [4] * 2, schedule
    )
    whole = 8 * LAYER + copies * 64 * 960 + 32 * 64 + 2 * 64
    assert sum(own.parameters.all for own in counts) == whole


def test_further_tokens_are_predicted_on_the_last_stage() -> None:
    plain, further = (
        counted(run_of(model, "vocab-2", 2), [4, 4], "zb-h1") for model in (LLAMA, FURTHER)
    )
    for kind in ("F", "B", "W"):
        assert flops(further[0], kind) == flops(plain[0], kind)
        assert flops(further[1], kind) > flops(plain[1], kind)
    assert further[0].parameters == plain[0].parameters
    layer = 64 * 24 * (4 + 4 + 4) + 3 * 64 * 96 + 2 * 64
    joining = 2 * 64**2 + 3 * 64  # of two norms, and one behind the layer
    more = further[1].parameters.all - plain[1].parameters.all
    assert more == 2 * (layer + joining)


def earlier(model: ModelSettings, treatment: str, stage: int) -> list[RankCount]:
    """Count four ranks, of which one before the last one predicts further tokens."""
    spread = LayerDistribution("explicit", counts=(2, 3, 3, 0), further_stage=stage)
    return counted(run_of(model, treatment, 4, sizes={"layers": spread}), [2, 3, 3, 0], "zb-h1")


def test_further_tokens_may_be_predicted_before_the_last_stage() -> None:
    last, third = (earlier(FURTHER, "vocab-2", stage) for stage in (3, 2))
    for kind in ("F", "B", "W"):
        assert flops(last[3], kind) == flops(third[2], kind) - flops(last[2], kind) > 0
        assert flops(third[3], kind) == 0
    layers = last[3].parameters.all - third[3].parameters.all
    assert third[2].parameters.all - last[2].parameters.all == layers > 0
    # its output, [3 b, u, h], goes on to the last stage, and the gradient comes back as wide
    messages: list[tuple[int, tuple[CommKind, int]]] = [(2, ("X", 2)), (3, ("G", 3))]
    for counts, width in ((last, 1), (third, 3)):
        for sender, key in messages:
            assert [own.bytes for own in collectives(counts[sender].begun[key])] == [width * X]
        assert [own.bytes for own in collectives(counts[1].begun["X", 1])] == [X]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_stage_that_predicts_has_a_copy_of_the_embedding(stage: int, tied: bool) -> None:
    """A rank with a copy already, such as that of a tied output layer, needs no further one."""
    model = FURTHER.replaced(tie_embeddings=tied)
    spread = LayerDistribution("explicit", counts=(8, 0, 0, 0), further_stage=stage)
    whole, split = (
        counted(run_of(model, treatment, 4, sizes={"layers": spread}), [8, 0, 0, 0])
        for treatment in ("none", "vocab-2")
    )
    holders = {0, stage, *((3,) if tied else ())}
    matrices = len(holders) + (not tied)  # and the matrix of an output layer of its own
    both = (sum(own.parameters.all for own in counts) for counts in (whole, split))
    assert next(both) - next(both) == (matrices - (1 if tied else 2)) * 64 * 960


COLLECTIVES = {
    "redis": "",
    "vocab-2": "C0 C1",
    "vocab-1": "C0 C1 C2",
    "interlaced": "C0 C1 C2",
    "naive": "C0 C1 C2 C3",
}


@pytest.mark.parametrize("treatment", COLLECTIVES)
def test_communications_of_a_treatment(treatment: str) -> None:
    kinds = COLLECTIVES[treatment].split()
    for count in counted(run_of(MODEL, treatment, 2), [4, 4]):
        found = {kind for kind, _ in count.begun}
        assert found == {"X", "G", *kinds, *(("CIF", "CIB") if kinds else ())}


@pytest.mark.parametrize("split", [False, True])
def test_collectives_of_the_vocabulary_have_two_levels(split: bool) -> None:
    """A part of an activation along the pipeline, and the parts of it over the tensor ranks."""
    run = run_of(MODEL, "vocab-1", 2, sizes={"tensor": TensorRankSettings(2, split)})
    for rank, count in enumerate(counted(run, [4, 4])):
        part = Collective("broadcast", "column", 2, X // 2)
        whole = Collective("all_gather", "tensor", 2, X)
        found = {kind: list(collectives(own)) for (kind, _), own in count.begun.items()}
        assert found["CIB"] == ([part, whole] if rank else [part])  # the first stage has it all
        assert found["C0"][0] == part
        scattered = Collective("reduce_scatter", "tensor", 2, X)
        for kind in ("CIF", "C2"):
            assert found[kind][:2] == [scattered, Collective("reduce", "column", 2, X // 2)]


@pytest.mark.parametrize("split", [False, True])
def test_tensor_ranks_reduce_the_ends_of_attention_and_mlp(split: bool) -> None:
    sizes = {"tensor": TensorRankSettings(2, split)}
    first, _ = counted(run_of(MODEL, "none", 2, sizes=sizes), [4, 4], "zb-h1")
    gathered = Collective("all_gather", "tensor", 2, X)
    scattered = Collective("reduce_scatter", "tensor", 2, X)
    reduced = Collective("all_reduce", "tensor", 2, X)
    found = {kind: Counter(collectives(own)) for (kind, _), own in first.passes.items()}
    layers = 2 * 4
    if split:
        assert found["F"] == {gathered: layers, scattered: layers + 1}  # with the words' sum
        assert found["B"] == {gathered: layers + 1, scattered: layers}
        assert found["W"] == {gathered: 2 * layers}  # an input or a gradient of each product
    else:
        assert found["F"] == {reduced: layers + 1}
        assert found["B"] == {reduced: layers}
        assert found["W"] == {}


@pytest.mark.parametrize("c", [2, 4])
def test_context_ranks_gather_keys_and_values_and_scatter_their_gradients(c: int) -> None:
    keys_values = 2 * X
    plain, again = (
        counted(run_of(MODEL, sizes={"context": ContextRankSettings(c)}, recomputation=way), [8])[0]
        for way in (Recomputation(), Recomputation(group=1))
    )
    gathered = Collective("all_gather", "context", c, keys_values)
    scattered = Collective("reduce_scatter", "context", c, keys_values)
    assert Counter(collectives(plain.passes["F", 0])) == {gathered: 8}
    assert Counter(collectives(plain.passes["B", 0])) == {scattered: 8}
    assert Counter(collectives(again.passes["B", 0])) == {gathered: 8, scattered: 8}
