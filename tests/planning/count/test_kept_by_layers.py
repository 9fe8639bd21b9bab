"""A layer keeps the tensors that its backward reads, once each: lists by hand, in 16 bits.

Every size is of one token of a rank, in elements.
"""

from typing import Any, Final

import pytest
from planning.count.counting import LLAMA, plan_of, run_of

from megatron.layers.recompute import Part, Recomputation
from megatron.model.settings import ModelSettings
from megatron.parallel.context_settings import ContextRankSettings
from megatron.planning.count.run import count_layers
from megatron.simulator.costs.count import HALF

LENGTH: Final = 8192
GROUPED: Final = LLAMA.replaced(seq_length=LENGTH, max_position_embeddings=LENGTH)
"""Two query heads for every key."""

EQUAL: Final = GROUPED.replaced(num_query_groups=GROUPED.attention.num_attention_heads)
NORM: Final = 2 * 4
"""Bytes of a norm's statistics, in fp32; an RMSNorm has a place for the mean, too."""

NORMED: Final = GROUPED.replaced(qk_layernorm=True)
WITHOUT_ROTATION: Final = GROUPED.replaced(position_embedding_type="learned_absolute")


NORMS: Final = "norm before attention", "norm before the MLP"
ACTIVATION: Final = "activation, which the last product reads"


def kept(model: ModelSettings, context: int = 1, **options: Any) -> float:
    """Return the bytes that a layer keeps for every token of a rank."""
    sizes = {"context": ContextRankSettings(context)} if context > 1 else {}
    run = run_of(model, sizes=sizes, **options)
    left = count_layers(run, plan_of(run))[1].passes["F"].left
    return left / (model.seq_length // context)


def by_hand(
    model: ModelSettings, *, keys: int = 1, without: frozenset[str] = frozenset(), **further: int
) -> int:
    """Return the bytes of the list.

    Args:
        model: of the layer.
        keys: number of ranks whose keys are kept.
        without: entries that are left out.
        further: entries that are added.
    """
    hidden, channels = model.hidden_size, model.attention.kv_channels
    queries, groups = (
        model.attention.num_attention_heads * channels,
        model.attention.num_query_groups * channels,
    )
    elements = {
        NORMS[0]: hidden,
        "queries as attention reads them": queries,
        "keys and values": 2 * groups * keys,
        "output of attention, which its projection reads": queries,
        "stream between attention and MLP": hidden,
        NORMS[1]: hidden,
        "gate and up": 2 * model.mlp.ffn_hidden_size,
        ACTIVATION: model.mlp.ffn_hidden_size,
        "output, which the next layer reads": hidden,
        **further,
    }
    statistics = (
        2 * NORM + 4 * model.attention.num_attention_heads
    )  # of two norms and of every softmax
    kept = (size for name, size in elements.items() if name not in without)
    return HALF * sum(kept) + statistics


@pytest.mark.parametrize("model", [GROUPED, EQUAL, WITHOUT_ROTATION])
def test_a_layer_keeps_every_tensor_once(model: ModelSettings) -> None:
    """Neither queries before their rotation, nor a view of the projection that keeps all of it."""
    assert kept(model) == pytest.approx(by_hand(model), abs=2)


def test_norms_of_heads_keep_their_inputs() -> None:
    heads = NORMED.attention.num_attention_heads + NORMED.attention.num_query_groups
    inputs = heads * NORMED.attention.kv_channels
    statistics = NORM * heads // HALF
    expected = by_hand(NORMED, inputs=inputs, statistics=statistics)
    assert kept(NORMED) == pytest.approx(expected, abs=2)


def test_ranks_that_gather_keys_keep_the_output_of_both_chunks_once() -> None:
    assert kept(GROUPED, context=2) == pytest.approx(by_hand(GROUPED, keys=2), abs=2)


@pytest.mark.parametrize(
    ("parts", "dropped"),
    [(["mlp_act"], [ACTIVATION]), (["layernorm", "mlp_act"], [*NORMS, ACTIVATION])],
)
def test_tensors_that_are_computed_again_are_not_kept(
    parts: list[Part], dropped: list[str]
) -> None:
    found = kept(GROUPED, recomputation=Recomputation(frozenset(parts)))
    assert found == pytest.approx(by_hand(GROUPED, without=frozenset(dropped)), abs=2)


def test_squared_relu_reads_its_result_so_nothing_can_be_dropped() -> None:
    model = GROUPED.replaced(activation="squared_relu")
    again = Recomputation(frozenset(["mlp_act"]))
    assert kept(model, recomputation=again) == kept(model)
