"""Passes that are captured once and replayed give the bits of passes that are launched anew."""

import dataclasses
from unittest.mock import patch

import pytest
import torch
from correctness.eight_bit_runs import LLAMA, config_of
from correctness.rank_runs import Batches, RankRun, train_on_rank
from correctness.recorded_graph import RecordedGraph, RecordedSlot
from correctness.short_runs import EIGHT_LAYER_GPT, EIGHT_LAYER_LLAMA, Job, Layout
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions

from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.layers.recompute import Recomputation
from megatron.layers.vocabulary.settings import ShardSettings
from megatron.run.run_config import RunConfig

EACH_LAYER = Recomputation(group=1)
PARTS = Recomputation(parts=frozenset({"core_attn", "layernorm", "mlp"}))

LAYOUTS = [
    Layout(1, "none"),
    Layout(2, "none"),
    Layout(2, "vocab-1"),
    Layout(2, "vocab-2", schedule="zb-h1"),
    Layout(2, "vocab-1", schedule="zb-v"),
    Layout(2, "none", schedule="zb-v"),
    Layout(2, "vocab-2", recomputation=EACH_LAYER),
    Layout(2, "vocab-2", schedule="zb-h1", recomputation=PARTS),
    Layout(2, "vocab-2", replicas=2, overlap=True, sharded=True),
]
SHARED_LAYERS = [
    (EIGHT_LAYER_GPT, Layout(1, "none", tensor=2)),
    (EIGHT_LAYER_LLAMA, Layout(1, "vocab-2", tensor=2, sequence=True)),
    (EIGHT_LAYER_LLAMA, Layout(2, "vocab-2", schedule="zb-h1", tensor=2, sequence=True)),
    (EIGHT_LAYER_GPT, Layout(2, "vocab-1", schedule="zb-v", tensor=2, recomputation=PARTS)),
]
"""Whose passes have collectives."""

SHARED_SEQUENCES = [
    (EIGHT_LAYER_LLAMA, Layout(1, "none", context=2)),
    (EIGHT_LAYER_LLAMA, Layout(1, "vocab-2", context=2, exchange="p2p")),
    (EIGHT_LAYER_GPT, Layout(1, "none", "zb-h1", context=2, exchange="a2a")),
    (
        EIGHT_LAYER_LLAMA,
        Layout(1, "none", "zb-h1", context=4, exchange="a2a+p2p", neighbours=2),
    ),
    (EIGHT_LAYER_LLAMA, Layout(1, "none", tensor=2, sequence=True, context=2, exchange="p2p")),
]
"""Whose passes exchange keys or heads, and whose positions are an input."""

MIXTURE = dataclasses.replace(
    EIGHT_LAYER_LLAMA,
    num_layers=4,
    num_experts=4,
    moe_ffn_hidden_size=16,
    moe_router_topk=2,
    moe_aux_loss_coeff=0.01,
    moe_z_loss_coeff=0.01,
    moe_shared_expert_intermediate_size=16,
)
BIASED = dataclasses.replace(
    MIXTURE,
    moe_router_score_function="sigmoid",
    moe_router_load_balancing_type="seq_aux_loss",
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=0.01,
    moe_expert_capacity_factor=1.0,
)
FURTHER = dataclasses.replace(EIGHT_LAYER_LLAMA, num_layers=4, mtp_num_layers=2)
MORE_INPUTS = [
    (MIXTURE, Layout(1, "none")),
    (MIXTURE, Layout(2, "vocab-2", schedule="zb-h1", recomputation=EACH_LAYER)),
    (MIXTURE, Layout(1, "none", tensor=2, sequence=True)),
    (BIASED, Layout(2, "vocab-1")),
    (FURTHER, Layout(1, "none")),
    (FURTHER, Layout(2, "vocab-2", schedule="zb-h1")),
]
"""Whose stages leave losses of layers, or read embeddings of following tokens."""

CASES = [(o, layout) for layout in LAYOUTS for o in (EIGHT_LAYER_GPT, EIGHT_LAYER_LLAMA)]


LOSSES = dataclasses.replace(
    EIGHT_LAYER_GPT, num_layers=2, label_smoothing=0.1, z_loss_coeff=1e-3, logit_softcap=5.0
)

NAMES = {
    EIGHT_LAYER_GPT: "gpt",
    EIGHT_LAYER_LLAMA: "llama",
    MIXTURE: "mixture",
    BIASED: "biased",
    FURTHER: "further",
}


def replayed(
    rank: int, world_size: int, *, config: RunConfig, batches: Batches
) -> tuple[RankRun, int]:
    """Train with graphs; return what the run left, and how many passes were replayed."""
    before = RecordedGraph.replays
    config = dataclasses.replace(
        config, train=dataclasses.replace(config.train, captures_passes=True)
    )
    with patch("megatron.training.setup.CudaSlot", RecordedSlot):
        run = train_on_rank(rank, world_size, config=config, batches=batches)
    return run, RecordedGraph.replays - before


RECIPES = {
    "tensorwise": EightBitSettings("hybrid", "tensorwise"),
    "blockwise": EightBitSettings("e4m3", "blockwise"),
    "delayed": EightBitSettings("hybrid", fp8_amax_history_len=2),
    "delayed, wide": EightBitSettings("hybrid", wide_weight_gradients=True),
}


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("tensorwise", Layout(2, "vocab-2", schedule="zb-h1")),
        ("blockwise", Layout(1, "none")),
        ("delayed", Layout(2, "vocab-1", schedule="zb-v", recomputation=PARTS)),
        ("delayed, wide", Layout(1, "none", tensor=2, sequence=True)),
    ],
    ids=str,
)
def test_graphs_in_8_bits_change_no_bit(recipe: str, layout: Layout, ranks: RankPool) -> None:
    """Weights change between iterations, and the slot that comes first is not always the same."""
    job = Job(LLAMA, microbatches=5, iterations=4, sequence=16)
    check(job, config_of(job, layout, RECIPES[recipe]), ranks)


@pytest.mark.parametrize(
    ("options", "layout"),
    CASES + SHARED_LAYERS + SHARED_SEQUENCES + MORE_INPUTS,
    ids=lambda value: NAMES.get(value, str(value)),
)
def test_graphs_change_no_bit(options: GPTOptions, layout: Layout, ranks: RankPool) -> None:
    """With other data in every microbatch, more of them than slots, and weights that change."""
    job = Job(options, microbatches=5, iterations=3, sequence=8)
    check(job, job.config(layout), ranks)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(1, "none", schedule="zb-h1"),
        Layout(2, "vocab-1"),
        Layout(2, "vocab-2", schedule="zb-h1"),
        Layout(1, "vocab-2", tensor=2, sequence=True),
        Layout(2, "naive"),
        Layout(2, "interlaced"),
    ],
    ids=str,
)
@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
def test_graphs_of_the_output_layer_change_no_bit(
    layout: Layout, again: bool, ranks: RankPool
) -> None:
    """With every option of the loss; T reads what S has left in the slot, or forms it again."""
    job = Job(LOSSES, microbatches=5, iterations=3, sequence=8)
    config = job.config(layout)
    vocabulary = ShardSettings(vocab_recompute=again)
    parallel = dataclasses.replace(config.parallel, vocabulary=vocabulary)
    check(job, dataclasses.replace(config, parallel=parallel), ranks)


def check(job: Job, config: RunConfig, ranks: RankPool) -> None:
    size, batches = config.parallel.grid.world_size, job.batches()
    plain = ranks.run(train_on_rank, size, config=config, batches=batches)
    found = ranks.run(replayed, size, config=config, batches=batches)
    for expected, (run, replays) in zip(plain, found, strict=True):
        assert run.losses == expected.losses
        assert run.gradient_norms == expected.gradient_norms
        assert run.after_steps == expected.after_steps
        assert run.first_gradients.keys() == expected.first_gradients.keys()
        for name, (_, pieces) in run.first_gradients.items():
            for (_, own), (_, other) in zip(pieces, expected.first_gradients[name][1], strict=True):
                assert torch.equal(own, other), name
        assert replays > 0
