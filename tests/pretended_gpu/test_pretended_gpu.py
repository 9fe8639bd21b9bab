"""The CUDA code of every schedule, on GPUs that are not there: what can be known without one.

Streams are ordered wherever they share memory, memory goes back in time, the host never waits for
the device within a schedule, nothing grows, the ranks' communications fit one another and end, and
the memory is what a dry run says.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
from correctness.joined_jobs import config_of, counted_turns, file_of, in_pairs
from correctness.recorded_graph import RecordedGraph, RecordedSlot
from correctness.short_runs import Job, Layout
from cuda_path import needs_pretended_gpus
from harness.marks import full
from harness.precisions import precision
from pretended_gpu.deadlock import name_of, stuck
from pretended_gpu.paper_memory import memory, paper_config
from pretended_gpu.pool import GpuPool
from pretended_gpu.rank import Findings, run_loop, run_rank
from pretended_gpu.sound import assert_communications_fit, assert_sound, transfers
from reference.plain_gpt import GPTOptions
from schedules.cases import expected_passes

from megatron.layers.recompute import PARTS, Part, Recomputation
from megatron.layers.vocabulary.settings import ShardSettings
from megatron.optimizer.settings import LossScaleSettings, MuonSettings
from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig
from megatron.runtime.communicator import links_of
from megatron.schedules.settings import SliceSettings
from megatron.schedules.slice_lengths import SliceStrategy
from megatron.simulator.costs.accuracy import ALLOCATED_WITHIN
from megatron.simulator.costs.gpus import GIB, WORKSPACE, WORKSPACES
from megatron.training import loop
from megatron.training.metrics.meter import Meter, Pause

ITERATIONS = 3
EVALUATIONS = 1
"""At the end of what every rank does."""

ACTIVATIONS = frozenset[Part]({"layernorm", "mlp_act"})

WARM_UP = 3
"""Microbatches before the first iteration: two to train on and one to evaluate."""

pytestmark = needs_pretended_gpus


def run(config: RunConfig, rank: int) -> Findings:
    return run_rank(config, rank)


def run_counting_turns(config: RunConfig, rank: int) -> tuple[Findings, int]:
    """Also return how often a pass of a pair has handed over to the other one."""
    with counted_turns() as turns:
        return run_rank(config, rank), turns()


def run_in_one_order(config: RunConfig, rank: int) -> tuple[Findings, list[str]]:
    """Also return the forms of the programs with atomic additions that were launched."""
    torch.use_deterministic_algorithms(True)
    try:
        found = run_rank(config, rank)
    finally:
        torch.use_deterministic_algorithms(False)
    return found, [str(form) for form in found.forms if "subtract_targets" in str(form)]


def run_observed(config: RunConfig, rank: int) -> Findings:
    return run_rank(config, rank, observed=True)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(1, "none", "1f1b"),
        Layout(2, "vocab-2", "zb-h1"),
        full(Layout(2, "vocab-1", "interleaved", tensor=2, sequence=True, replicas=2)),
    ],
    ids=str,
)
def test_two_threads_of_a_rank_multiply(layout: Layout, gpus: GpuPool) -> None:
    """That of the passes, and that of autograd, on one stream: so a dry run counts it."""
    config = Job(GPTOptions(num_layers=4), microbatches=4).config(layout, torch.bfloat16)
    found = gpus.map(run_rank, config, ranks=layout.world_size)
    assert {own.workspaces for own in found} == {WORKSPACES}


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp32": {},
    "fp32 groups": {"num_query_groups": 2},
    "groups": {"num_query_groups": 2},
    "rope": {"position_embedding_type": "rope", "rotary_percent": 0.5, "qk_layernorm": True},
    "llama": {
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "position_embedding_type": "rope",
    },
    "loss": {"label_smoothing": 0.1, "z_loss_coeff": 1e-3, "logit_softcap": 5.0},
    "empty shard": {"vocab_size": 4},
    "squared relu": {
        "squared_relu": True,
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "position_embedding_type": "rope",
        "rotary_interleaved": True,
        "use_rope_scaling": True,
    },
    "latents": {
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "multi_latent_attention": True,
        "kv_channels": 8,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_head_dim": 4,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 4,
        "qk_layernorm": True,
    },
    "further tokens": {"mtp_num_layers": 2, "position_embedding_type": "rope"},
    "mixture": {
        "swiglu": True,
        "add_bias_linear": False,
        "num_experts": 4,
        "moe_ffn_hidden_size": 16,
        "moe_aux_loss_coeff": 0.01,
        "moe_z_loss_coeff": 0.01,
        "moe_shared_expert_intermediate_size": 16,
    },
}


@pytest.mark.parametrize(
    ("layout", "variant"),
    [
        (Layout(2, "vocab-2", "zb-h1"), "plain"),
        full(Layout(2, "none", "1f1b"), "plain"),
        full(Layout(2, "vocab-1", "zb-v"), "plain"),
        full(Layout(2, "vocab-2", "zb-h1", tensor=2, sequence=True), "plain"),
        full(Layout(2, "vocab-1", "zb-v", tensor=2), "plain"),
        full(Layout(2, "vocab-2", "zb-h1", context=2), "plain"),
        full(Layout(1, "none", context=2, exchange="p2p"), "llama"),
        full(Layout(1, "none", "zb-h1", tensor=2, context=2, exchange="p2p"), "llama"),
        full(Layout(1, "none", "zb-h1", context=2, exchange="a2a"), "plain"),
        full(Layout(1, "none", context=4, exchange="a2a+p2p", neighbours=2), "plain"),
        (Layout(1, "none", "zb-h1"), "further tokens"),
        full(Layout(2, "vocab-2", "1f1b", tensor=2, sequence=True), "further tokens"),
        (Layout(2, "vocab-2", "zb-h1"), "mixture"),
        full(Layout(1, "none", tensor=2, sequence=True), "mixture"),
    ],
    ids=str,
)
def test_passes_that_are_captured(layout: Layout, variant: str, gpus: GpuPool) -> None:
    """A replay works on the memory of its capture, on the stream of the passes.

    It issues all collectives of a pass at once, in the order of the pass. So do hosts that are
    ahead of their devices.
    """
    options = GPTOptions(num_layers=4, **VARIANTS[variant])
    config = Job(options, microbatches=4, sequence=8).config(layout, torch.bfloat16)
    found = gpus.map(run_captured, config, ranks=layout.world_size)
    assert_sound([own for own, _ in found])
    assert all(replays > 0 for _, replays in found)


def run_captured(config: RunConfig, rank: int) -> tuple[Findings, int]:
    """Also return how many passes were replayed."""
    config, before = replace(config, train=replace(config.train, captures_passes=True)), replays()
    with patch("megatron.training.setup.CudaSlot", RecordedSlot):
        return run_rank(config, rank), replays() - before


def replays() -> int:
    return RecordedGraph.replays


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        Layout(1, "none", replicas=2, experts=2),
        Layout(2, "vocab-2", "zb-h1", replicas=2, experts=2, dispatcher="alltoall", sharded=True),
        Layout(1, "none", tensor=2, sequence=True, experts=2, expert_tensor=1),
        Layout(1, "none", replicas=4, experts=2, expert_tensor=2, dispatcher="alltoall"),
        Layout(2, "vocab-1", "zb-v", replicas=2, experts=2, dispatcher="flex"),
    ],
    ids=str,
)
def test_mixtures_whose_experts_are_spread(layout: Layout, gpus: GpuPool) -> None:
    """The host waits for numbers of rows that travel, once for every layer and microbatch."""
    options = GPTOptions(num_layers=2, **VARIANTS["mixture"])
    config = Job(options, microbatches=4).config(layout, torch.bfloat16)
    found = gpus.map(run, config, ranks=layout.world_size)
    assert_sound(found)
    waits = options.num_layers // layout.ranks * config.train.num_microbatches
    assert all(own.waits == [waits] * ITERATIONS for own in found)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, "vocab-2", "dualpipe-v", replicas=2, experts=2, dispatcher="alltoall"),
        Layout(2, "none", replicas=2, experts=2, recomputation=Recomputation(group=1)),
    ],
    ids=str,
)
def test_pairs_of_passes_that_exchange_tokens(
    layout: Layout, gpus: GpuPool, tmp_path: Path
) -> None:
    """Two host threads issue the work of a pair; streams and communicators are in order as ever."""
    job = Job(GPTOptions(num_layers=4, **VARIANTS["mixture"]), microbatches=8)
    file = file_of(layout, job.microbatches // layout.replicas, tmp_path)
    layout = replace(layout, schedule="file", file=file)
    config = config_of(job, layout, overlap=True, dtype=torch.bfloat16)
    found = gpus.map(run_counting_turns, config, ranks=layout.world_size)
    assert all(turns > 0 for _, turns in found)
    assert_sound([own for own, _ in found])


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, "vocab-2", "zb-v", tensor=2, sequence=True),
        full(Layout(1, "none", "zb-h1", tensor=2)),
        full(Layout(2, "vocab-1", "interleaved", tensor=2, sequence=True)),
        full(Layout(2, "vocab-2", "zb-v", tensor=2, sequence=True, slices=2)),
    ],
    ids=str,
)
def test_pairs_of_passes_that_share_layers(layout: Layout, gpus: GpuPool, tmp_path: Path) -> None:
    """Any two neighbours in turns: F, B, W and passes of the vocabulary layers."""
    job = Job(GPTOptions(num_layers=4), microbatches=4, sequence=8)
    config = in_pairs(job, layout, tmp_path, joined=True, dtype=torch.bfloat16)
    found = gpus.map(run_counting_turns, config, ranks=layout.world_size)
    assert all(turns > 0 for _, turns in found)
    assert_sound([own for own, _ in found])


@pytest.mark.full
def test_no_host_waits_for_a_mixture_in_fp32(gpus: GpuPool) -> None:
    """For products of groups in this type PyTorch's own function would wait."""
    options = GPTOptions(num_layers=2, **VARIANTS["mixture"])
    config = Job(options, microbatches=4).config(Layout(2, "vocab-2", "zb-h1"), torch.float32)
    assert_sound(gpus.map(run, config, ranks=2))


SHARDED = ("vocab-2", "vocab-1", "naive")
OF_THE_LOSS = ("loss", "empty shard", "further tokens")
"""Variants of what the output layer computes, which every treatment does in its own way."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("variant", "treatment"),
    [
        *product(OF_THE_LOSS, SHARDED),
        *zip((own for own in VARIANTS if own not in OF_THE_LOSS), cycle(SHARDED), strict=False),
    ],
)
def test_every_kind_of_model(variant: str, treatment: str, gpus: GpuPool) -> None:
    """The layers of the others do not know the treatment: each meets one, by turns."""
    options = GPTOptions(num_layers=2, **VARIANTS[variant])
    dtype = torch.float32 if "fp32" in variant else torch.bfloat16
    config = Job(options, microbatches=4, dropout=0.1).config(Layout(2, treatment), dtype)
    assert_sound(gpus.map(run, config, ranks=2))


@pytest.mark.full
def test_a_model_like_gpt_oss(gpus: GpuPool) -> None:
    """Without dropout, because sinks and windows ask CUDA for a generator, and there is none.

    Once a node of autograd held itself, and its pass's tensors with it.
    """
    options = GPTOptions(
        num_layers=2,
        quick_geglu=True,
        activation_func_clamp_value=7.0,
        glu_linear_offset=1.0,
        softmax_type="learnable",
        window_size=4,
        window_pattern=(1, 0),
        num_experts=4,
        moe_ffn_hidden_size=16,
        kv_channels=8,
    )
    config = Job(options, microbatches=4).config(Layout(2, "vocab-2"), torch.bfloat16)
    assert_sound(gpus.map(run, config, ranks=2))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scores_that_are_computed_block_by_block(dtype: torch.dtype, gpus: GpuPool) -> None:
    options = GPTOptions(num_layers=2, position_embedding_type="alibi", attn_logit_softcapping=5.0)
    config = Job(options, microbatches=4).config(Layout(2, "vocab-2"), dtype)
    assert_sound(gpus.map(run, config, ranks=2))


@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "treatment"),
    [("1f1b", "vocab-1"), ("zb-v", "vocab-2"), ("zb-h1", "none"), ("1f1b", "naive")],
)
def test_logits_that_are_formed_again(schedule: str, treatment: str, gpus: GpuPool) -> None:
    options = GPTOptions(num_layers=4, **VARIANTS["loss"])
    layout = Layout(2, treatment, schedule, vocab_recompute=True)
    config = Job(options, microbatches=4, dropout=0.1).config(layout, torch.bfloat16)
    assert_sound(gpus.map(run, config, ranks=2))


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["muon", "sgd"])
def test_every_optimizer(optimizer: Literal["sgd", "muon"], gpus: GpuPool) -> None:
    options = GPTOptions(num_layers=4, num_query_groups=2)
    config = Job(options, microbatches=4).config(Layout(2, "vocab-2"), torch.bfloat16)
    config = replace(config, optimizer=replace(config.optimizer, optimizer=optimizer))
    assert_sound(gpus.map(run, config, ranks=2))


@pytest.mark.full
@pytest.mark.parametrize("post_validation", [True, False])
def test_fp16(post_validation: bool, gpus: GpuPool) -> None:
    config = Job(GPTOptions(num_layers=4), microbatches=4).config(
        Layout(2, "vocab-2"), torch.float16
    )
    optimizer = replace(
        config.optimizer,
        loss_scale=LossScaleSettings(),
        post_validation=post_validation,
        clip_grad=0,
    )
    assert_sound(gpus.map(run, replace(config, optimizer=optimizer), ranks=2))


@pytest.mark.full
@pytest.mark.parametrize(
    ("sent", "abandoned"),
    [pytest.param(1.0, 0, id="right guess"), pytest.param(100.0, 2, id="wrong guess")],
)
def test_steps_validated_later(sent: float, abandoned: int, gpus: GpuPool) -> None:
    """A wrong guess is undone; the schedule that was begun is abandoned, and run anew.

    The first rank's own norm is 1 and needs no clipping; what it hears of the whole is ``sent``.
    """
    config = Job(GPTOptions(num_layers=4), microbatches=4).config(Layout(3, "vocab-2", "zb-2p"))
    config = replace(config, optimizer=replace(config.optimizer, post_validation=True, clip_grad=5))
    found = gpus.map(run_hearing, config, sent, ranks=3)
    assert_sound(found)
    first = transfers(found[0].issued, "transfers X 0 to 1 of 0+1", "send", 1)
    assert len(first) == WARM_UP + 4 * (ITERATIONS + abandoned + EVALUATIONS)
    assert [own.restored for own in found] == [ITERATIONS if abandoned else 0, 0, 0]


def run_hearing(config: RunConfig, sent: float, rank: int) -> Findings:
    return run_rank(config, rank, iterations=ITERATIONS, number_of_others=sent)


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        GPTOptions(num_layers=4, label_smoothing=0.1, logit_softcap=20.0),
        GPTOptions(
            num_layers=4,
            num_experts=4,
            moe_ffn_hidden_size=16,
            add_bias_linear=False,
            moe_router_load_balancing_type="aux_loss",
            moe_aux_loss_coeff=0.01,
        ),
    ],
    ids=["dense", "experts"],
)
def test_one_order_of_additions(options: GPTOptions, gpus: GpuPool) -> None:
    """No program with atomic additions runs, and no other waits or compiles in their place."""
    config = Job(options, microbatches=4).config(Layout(2, "vocab-2"), torch.bfloat16)
    found = gpus.map(run_in_one_order, config, ranks=2)
    assert_sound([own for own, _ in found])
    assert [atomic for _, atomic in found] == [[], []]
    usual = gpus.map(run, config, ranks=2)
    assert any("subtract_targets" in str(form) for own in usual for form in own.forms)


@pytest.mark.full
def test_slices_of_matrices(gpus: GpuPool) -> None:
    options = GPTOptions(num_layers=4, num_query_groups=2)
    config = Job(options, microbatches=4).config(Layout(1, "none", tensor=2), torch.bfloat16)
    muon = MuonSettings(muon_tp_mode="distributed")
    config = replace(config, optimizer=replace(config.optimizer, optimizer="muon", muon=muon))
    assert_sound(gpus.map(run, config, ranks=2))


@pytest.mark.full
def test_whole_matrices_of_replicas(gpus: GpuPool) -> None:
    """Shards of other sizes are reduced to their owners, and broadcast from there."""
    layout = Layout(1, "none", replicas=2, overlap=True, bucket_size=3000, sharded=True)
    config = Job(GPTOptions(num_layers=3), microbatches=4).config(layout, torch.bfloat16)
    config = replace(config, optimizer=replace(config.optimizer, optimizer="muon"))
    found = gpus.map(run, config, ranks=2)
    first, second = (
        [each for each in own.issued if each.group.startswith("gradients")] for own in found
    )
    assert [own.faults for own in found] == [[], []]
    assert first == second
    kinds = {each.kind for each in first}
    assert kinds == {"reduce_scatter", "all_gather", "reduce", "broadcast"}


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, "vocab-2", "zb-v", replicas=2, overlap=True, bucket_size=3000, sharded=True),
        Layout(2, "none", replicas=2, overlap=True, bucket_size=3000),
        Layout(1, "none", "zb-h1", replicas=2, sharded=True),
    ],
    ids=str,
)
def test_replicas(layout: Layout, gpus: GpuPool) -> None:
    """Replicas issue the same on their communicator, which nothing else uses."""
    sizes = GPTOptions(num_layers=4, tie_embeddings=layout.vocabulary != "none")
    config = Job(sizes, microbatches=8).config(layout, torch.bfloat16)
    found = gpus.map(run, config, ranks=layout.world_size)
    assert_sound(found)
    size = layout.world_size
    for number in range(layout.ranks):
        first, second = (
            [each for each in found[rank].issued if each.group == name_of("gradients", ranks, size)]
            for ranks in [config.parallel.grid.groups("data")[number]]
            for rank in ranks
        )
        assert first == second
        kinds = {"reduce_scatter", "all_gather"} if layout.sharded else {"all_reduce"}
        assert {each.kind for each in first} == kinds


@pytest.mark.full
@pytest.mark.parametrize(
    ("treatment", "schedule", "sequence"),
    [
        ("vocab-2", "zb-v", True),
        ("none", "1f1b", True),
        ("naive", "zb-h1", False),
        ("interlaced", "1f1b", True),
        ("vocab-2", "zb-v", False),
        ("none", "1f1b", False),
        ("naive", "zb-h1", True),
        ("interlaced", "1f1b", False),
    ],
)
def test_ranks_that_share_layers(
    treatment: str, schedule: str, sequence: bool, gpus: GpuPool
) -> None:
    layout = Layout(2, treatment, schedule, tensor=2, sequence=sequence)
    job = Job(GPTOptions(num_layers=4), 2, microbatches=4, sequence=12)
    config = job.config(layout, torch.bfloat16)
    found = gpus.map(run, config, ranks=layout.world_size)
    assert_sound(found)
    links = {f"transfers {link}" for link in links_of(make_run_plan(config).plan)}
    uses = {each.group.partition(" of ")[0] for own in found for each in own.issued}
    summed = {"gradients"} if sequence else set()  # over tensor ranks
    summed |= {"ends"} if treatment == "none" else {"vocabulary"}
    assert uses == {"tensor", "control", *links, *summed}


@pytest.mark.full
@pytest.mark.parametrize("treatment", ["vocab-2", "none"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, "", "zb-h1", tensor=2, sequence=True),
        Layout(4, "", "zb-h1", stages="Ett|tt|mm|L"),
        Layout(2, "", "interleaved", tensor=2, stages="Ett|t|tmm|L"),
    ],
)
def test_ranks_that_share_layers_of_further_tokens(
    layout: Layout, treatment: str, gpus: GpuPool
) -> None:
    options = GPTOptions(num_layers=4, tie_embeddings=False, **VARIANTS["further tokens"])
    layout = replace(layout, vocabulary=treatment)
    job = Job(options, 2, microbatches=4, sequence=12)
    assert_sound(gpus.map(run, job.config(layout, torch.bfloat16), ranks=layout.world_size))


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "kinds"),
    [
        (Layout(2, "vocab-2", "zb-h1", context=2), "all_gather reduce_scatter"),
        (
            Layout(1, "none", tensor=2, sequence=True, context=2),
            "all_gather reduce_scatter",
        ),
        (Layout(1, "none", context=2, exchange="a2a"), "all_to_all"),
        (Layout(2, "vocab-2", "zb-h1", context=2, exchange="p2p"), "receive send"),
        (Layout(2, "vocab-2", "zb-h1", context=4, exchange="p2p"), "receive send"),
        (
            Layout(1, "none", context=4, exchange="a2a+p2p", neighbours=2),
            "all_to_all receive send",
        ),
    ],
    ids=str,
)
def test_ranks_that_share_sequences(layout: Layout, kinds: str, gpus: GpuPool) -> None:
    options = GPTOptions(num_layers=4, num_query_groups=2, window_size=5, window_pattern=(1, 0))
    job = Job(options, 2, microbatches=4, sequence=16)
    found = gpus.map(run, job.config(layout, torch.bfloat16), ranks=layout.world_size)
    assert_sound(found)
    issued = [each for own in found for each in own.issued if each.group.startswith("context")]
    assert " ".join(sorted({each.kind for each in issued})) == kinds


@pytest.mark.full
def test_nothing_grows_later_either(gpus: GpuPool) -> None:
    config = Job(GPTOptions(num_layers=4), microbatches=5).config(Layout(2, "vocab-2", "zb-v"))
    found = gpus.map(run_longer, config, ranks=2)
    assert_sound(found)
    assert [len(own.held) for own in found] == [8, 8]


def run_longer(config: RunConfig, rank: int) -> Findings:
    return run_rank(config, rank, iterations=8)


@pytest.mark.parametrize("treatment", ["vocab-2", full("none")])
def test_a_run_that_only_evaluates_finds_all_in_place(treatment: str, gpus: GpuPool) -> None:
    config = Job(GPTOptions(num_layers=4), microbatches=4).config(
        Layout(2, treatment, "zb-v"), torch.bfloat16
    )
    config = replace(config, train=replace(config.train, skip_train=True))
    for own in gpus.map(run_evaluating, config, ranks=2):
        assert own.faults == []
        assert own.warm >= {each.group for each in own.issued if not each.on_host}
        assert own.forms == own.warm_forms != set()


@pytest.mark.parametrize(
    "layout",
    [Layout(2, "vocab-2", "zb-v"), full(Layout(2, "none", tensor=2)), full(Layout(1, "none"))],
    ids=str,
)
def test_texts_between_iterations_hold_up_no_rank(layout: Layout, gpus: GpuPool) -> None:
    """Samples are longer than texts, so that rows are shorter than samples."""
    options = GPTOptions(num_layers=4, max_position_embeddings=96)
    job = Job(options, microbatches=3, sequence=96)
    config = job.config(layout, torch.bfloat16)
    found = gpus.map(run_writing, config, ranks=layout.world_size)
    assert [own.faults for own in found] == [[] for _ in found]
    assert [list(map(len, own.texts)) for own in found] == [[3, 3] for _ in found]
    assert [own.forms - own.warm_forms for own in found] == [set() for _ in found]
    assert_communications_fit([own.issued for own in found])
    for held_up, implicit in product((False, True), (False, True)):
        assert stuck([own.journal for own in found], held_up, implicit) == []


def run_writing(config: RunConfig, rank: int) -> Findings:
    return run_rank(config, rank, writes=True)


def run_evaluating(config: RunConfig, rank: int) -> Findings:
    return run_rank(config, rank, iterations=0)


@pytest.mark.full
def test_observers_see_every_pass_and_make_nobody_wait(gpus: GpuPool) -> None:
    config = Job(GPTOptions(num_layers=4), microbatches=5).config(Layout(2, "vocab-2", "zb-v"))
    plan = make_run_plan(config).plan
    found = gpus.map(run_observed, config, ranks=2)
    assert_sound(found)
    for rank, own in enumerate(found):
        assert not any(own.waits_within)
        passes = expected_passes(plan, rank)
        recorded = [(s.kind, s.microbatch, s.chunk) for s in own.spans if s.lane == "compute"]
        assert recorded == [(p.kind, p.microbatch, p.chunk) for p in plan.rows[rank]]
        assert {str(p) for p in passes} <= set(own.ranges)
        assert {"C1 4", "wait C1 4"} <= set(own.ranges)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(1, "none", "zb-h1", tensor=2, sequence=True),
        full(Layout(1, "none", tensor=2)),
    ],
    ids=str,
)
def test_observers_see_the_waits_within_passes_and_make_nobody_wait(
    layout: Layout, gpus: GpuPool
) -> None:
    layers = 4
    config = Job(GPTOptions(num_layers=layers), microbatches=2).config(layout)
    found = gpus.map(run_observed, config, ranks=2)
    assert_sound(found)
    for own in found:
        passes = [span.kind for span in own.spans if span.lane == "compute"]
        assert set(passes) >= {"F", "B"}
        # The sums after attention and MLP of every layer, or those of their input gradients.
        least = {"F": 2 * layers, "B": 2 * layers}
        waits = zip(passes, own.waits_within, strict=True)
        assert all(count >= least.get(kind, 0) for kind, count in waits)


@pytest.mark.full
@pytest.mark.parametrize("post_validation", [False, True], ids=["waiting", "guessing"])
@pytest.mark.parametrize("treatment", ["none", "vocab-2"])
def test_a_batch_is_copied_while_the_one_before_is_trained_on(
    treatment: str, post_validation: bool, gpus: GpuPool
) -> None:
    job = Job(GPTOptions(num_layers=2), microbatches=3)
    config = reading_ahead(job.config(Layout(2, treatment)))
    optimizer = replace(config.optimizer, post_validation=post_validation)
    found = gpus.map(run, replace(config, optimizer=optimizer), ranks=2)
    assert_sound(found)


def reading_ahead(config: RunConfig) -> RunConfig:
    return replace(config, data=replace(config.data, prefetch=True))


@pytest.mark.parametrize(
    "ahead",
    [
        pytest.param(False, marks=pytest.mark.full, id="read when needed"),
        pytest.param(True, id="read ahead"),
    ],
)
def test_the_whole_loop(ahead: bool, gpus: GpuPool) -> None:
    job = Job(GPTOptions(num_layers=2), microbatches=3, iterations=4)
    config = job.config(Layout(2, "vocab-2"))
    found = gpus.map(run_loop, reading_ahead(config) if ahead else config, ranks=2)
    (printed, first), (silence, last) = found
    assert (first, last, silence) == ([], [], "")
    assert "table: NVIDIA H200" in printed
    assert printed.count("lm loss: ") == printed.count("validation loss") == 4
    assert printed.count("max allocated") == 2


def pauses_of_the_warm_up(config: RunConfig, rank: int) -> list[int]:
    """Go through the loop; return how many pauses of the meter each warm-up is in."""
    found, pauses, usual = list[int](), list[str](), Meter.paused

    @contextmanager
    def paused(meter: Meter, what: Pause = "other") -> Iterator[None]:
        with usual(meter, what):
            pauses.append(what)
            yield
            pauses.pop()

    with (
        patch.object(Meter, "paused", paused),
        patch.object(loop, "warm_up", lambda config, state: found.append(len(pauses))),
    ):
        run_loop(config, rank)
    return found


@pytest.mark.full
def test_the_warm_up_counts_for_no_iteration(gpus: GpuPool) -> None:
    """It compiles and connects, which may take a minute; the first MFU shall be one."""
    config = Job(GPTOptions(num_layers=2), microbatches=2).config(Layout(2, "vocab-2"))
    assert gpus.map(pauses_of_the_warm_up, config, ranks=1) == [[1]]


@pytest.mark.full
@pytest.mark.parametrize("p", [3, 8])
@pytest.mark.parametrize(
    ("schedule", "treatment", "vocab_size"),
    [
        ("1f1b", "none", 32_000),
        ("1f1b", "vocab-2", 256_000),
        ("v-half", "vocab-1", 128_000),
    ],
)
def test_memory_is_what_a_dry_run_says(
    schedule: str, treatment: str, vocab_size: int, p: int, gpus: GpuPool
) -> None:
    """The paper's model for 8 GPUs with half as many layers on each rank; in short on 3 of them."""
    own = memory(paper_config(Layout(p, treatment, schedule), vocab_size, layers=2 * p), gpus)
    assert own.faults == []
    assert own.allocated == pytest.approx(own.predicted, rel=ALLOCATED_WITHIN)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, "vocab-2"),
        Layout(2, "vocab-2", "zb-h1"),
        Layout(2, "vocab-2", "zb-h1", recomputation=Recomputation(group=1)),
        Layout(2, "vocab-2", replicas=2, experts=2),
        Layout(2, "vocab-2", "zb-h1", replicas=2, experts=2, dispatcher="alltoall"),
        Layout(2, "vocab-2", replicas=2, experts=2, dispatcher="flex"),
        Layout(2, "vocab-2", "zb-h1", replicas=2, experts=2, dispatcher="flex"),
    ],
    ids=str,
)
def test_memory_of_a_mixture(layout: Layout, gpus: GpuPool) -> None:
    config = paper_config(layout, 32_000, layers=4)
    mixture = config.model.replaced(
        activation="swiglu",
        add_bias_linear=False,
        num_experts=8,
        moe_ffn_hidden_size=1024,
        moe_aux_loss_coeff=(0.01,),
    )
    own = memory(replace(config, model=mixture), gpus)
    assert own.faults == []
    assert own.allocated == pytest.approx(own.predicted, rel=ALLOCATED_WITHIN)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        (Layout(2, "vocab-2", "zb-h1"), {"mla_up_proj"}),
        (Layout(2, "vocab-2", tensor=2, sequence=True), set()),
    ],
    ids=str,
)
def test_memory_of_multi_latent_attention(layout: Layout, parts: set[Part], gpus: GpuPool) -> None:
    layout = replace(layout, recomputation=Recomputation(frozenset(parts)))
    config = paper_config(layout, 32_000, layers=4, micro_batch_size=2, **VARIANTS["llama"])
    latents = config.model.replaced(
        multi_latent_attention=True,
        q_lora_rank=768,
        kv_lora_rank=512,
        qk_head_dim=128,
        qk_pos_emb_head_dim=64,
        v_head_dim=128,
        kv_channels=192,
        qk_layernorm=True,
    )
    own = memory(replace(config, model=latents), gpus)
    assert own.faults == []
    assert own.allocated == pytest.approx(own.predicted, rel=ALLOCATED_WITHIN)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "strategy"),
    [
        (Layout(2, "vocab-2", slices=4), "uniform"),
        (Layout(2, "vocab-1", "zb-h1", slices=4), "balanced"),
        (Layout(2, "none", "zb-v", slices=2), "uniform"),
        (Layout(2, "vocab-2", slices=4, recomputation=Recomputation(group=1)), "uniform"),
    ],
    ids=str,
)
def test_memory_of_slices(layout: Layout, strategy: SliceStrategy, gpus: GpuPool) -> None:
    """Keys, values and their gradients of a microbatch stand beside its slices."""
    config = paper_config(layout, 32_000, layers=4, sequence=4096)
    parallel = replace(config.parallel, slices=SliceSettings(layout.slices, strategy))
    own = memory(replace(config, parallel=parallel), gpus)
    assert own.faults == []
    assert own.allocated == pytest.approx(own.predicted, rel=0.01)


@pytest.mark.full
def test_slices_keep_the_keys_of_groups_once_in_fp32(gpus: GpuPool) -> None:
    """Slices share their keys, so fewer groups need less memory, though no kernel knows groups."""
    layout = Layout(1, "none", slices=4)
    few, many = (
        replace(own, train=replace(own.train, precision=precision(torch.float32)))
        for groups in (2, 24)
        for own in [paper_config(layout, 4096, layers=1, sequence=4096, num_query_groups=groups)]
    )
    own, other = memory(few, gpus), memory(many, gpus)
    assert own.faults == other.faults == []
    assert own.allocated == pytest.approx(own.predicted, rel=ALLOCATED_WITHIN)
    assert other.allocated == pytest.approx(other.predicted, rel=ALLOCATED_WITHIN)
    fewer = 2 * 22 * 128
    parameters = fewer * (3072 + 1)
    states, keys = 4 * 4 * parameters, 4 * 4096 * fewer
    assert other.allocated[0] - own.allocated[0] > (states + keys) / GIB


@pytest.mark.full
@pytest.mark.parametrize(
    ("treatment", "vocab_size"),
    [
        ("vocab-2", 128_000),
        ("none", 32_000),
        ("vocab-1", 256_000),
        ("vocab-2", 256_000),
    ],
)
def test_memory_without_logits_is_what_a_dry_run_says(
    treatment: str, vocab_size: int, gpus: GpuPool
) -> None:
    """Less than with them by the exponentials of a microbatch at least, but for a tile of them."""
    config = paper_config(Layout(3, treatment), vocab_size, layers=6)
    parallel = replace(config.parallel, vocabulary=ShardSettings(vocab_recompute=True))
    again = replace(config, parallel=parallel)
    kept, own = memory(config, gpus), memory(again, gpus)
    assert own.faults == []
    assert own.allocated == pytest.approx(own.predicted, rel=ALLOCATED_WITHIN)
    exponentials = 2 * 2048 * vocab_size / config.parallel.vocab_shards / GIB
    assert kept.allocated[-1] - own.allocated[-1] > 0.7 * exponentials


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("variant", ["llama", "squared relu", "groups", "rope"])
def test_memory_of_other_models(variant: str, schedule: str, gpus: GpuPool) -> None:
    """Long microbatches, in which activations count for more."""
    config = paper_config(
        Layout(2, "vocab-2", schedule), 32_000, layers=4, micro_batch_size=4, **VARIANTS[variant]
    )
    own = memory(config, gpus)
    assert own.faults == []
    assert own.allocated == pytest.approx(own.predicted, rel=ALLOCATED_WITHIN)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        Layout(3, "vocab-2", "zb-h1"),
        Layout(3, "vocab-2"),
        Layout(3, "none"),
        Layout(3, "vocab-1", recomputation=Recomputation(group=1)),
        Layout(3, "vocab-1", "zb-v"),
        Layout(2, "vocab-2", "interleaved", stages="Ettt|ttt|mm|L"),
    ],
    ids=str,
)
def test_memory_of_further_tokens_is_what_a_dry_run_says(layout: Layout, gpus: GpuPool) -> None:
    further = VARIANTS["further tokens"]
    config = paper_config(layout, 32_000, layers=6, micro_batch_size=2, **further)
    own = memory(config, gpus)
    assert own.faults == []
    assert own.allocated == pytest.approx(own.predicted, rel=ALLOCATED_WITHIN)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(4, "vocab-2", stages="Ettt|ttt|mm|L"),
        full(Layout(3, "none", stages="Ettt|tttmm|L")),
        full(Layout(4, "vocab-1", "zb-h1", stages="Ettt|tttmm||L")),
    ],
    ids=str,
)
def test_memory_of_further_tokens_before_the_last_stage(layout: Layout, gpus: GpuPool) -> None:
    """The thread of autograd multiplies only on ranks with layers, and needs a workspace there."""
    further = VARIANTS["further tokens"]
    own = memory(paper_config(layout, 32_000, layers=6, micro_batch_size=2, **further), gpus)
    assert own.faults == []
    without_layers = [not set("tm") & set(stage) for stage in layout.stages.split("|")]
    assert any(without_layers)
    expected = [
        predicted - WORKSPACE / GIB * without
        for predicted, without in zip(own.predicted, without_layers, strict=True)
    ]
    assert own.allocated == pytest.approx(expected, rel=ALLOCATED_WITHIN)


@pytest.mark.parametrize(
    ("schedule", "recomputation", "ahead"),
    [
        full("1f1b", Recomputation(group=1), 1),
        full("1f1b", Recomputation(group=1), None),
        full("zb-h1", Recomputation(group=1), None),
        full("zb-h1", Recomputation(parts=frozenset(PARTS)), None),
        full("1f1b", Recomputation(group=2), None),
        full("zb-h1", Recomputation(group=2), 2),
        full("1f1b", Recomputation(group=1, most=1), None),
        full("zb-v", Recomputation(group=1, most=1), None),
        full("zb-v", Recomputation(group=1, most=1), 1),
        full("1f1b", Recomputation(parts=frozenset(PARTS)), None),
        full("1f1b", Recomputation(parts=ACTIVATIONS), None),
        full("zb-h1", Recomputation(parts=ACTIVATIONS), None),
    ],
    ids=str,
)
def test_memory_of_recomputation_is_what_a_dry_run_says(
    schedule: str, recomputation: Recomputation, ahead: int | None, gpus: GpuPool
) -> None:
    """With a split backward, what B computes again stays until W."""
    config = paper_config(Layout(2, "vocab-2", schedule), 32_000, layers=4, micro_batch_size=4)
    config = replace(
        config,
        train=replace(config.train, recomputation=recomputation),
        parallel=replace(config.parallel, recompute_ahead=ahead),
    )
    own = memory(config, gpus)
    assert own.faults == []
    assert own.allocated == pytest.approx(own.predicted, rel=ALLOCATED_WITHIN)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "variant"),
    [
        (Layout(2, "vocab-2", tensor=2, sequence=True), "llama"),
        (Layout(2, "vocab-1", "zb-v", tensor=2), "fp32"),
        (Layout(2, "vocab-2", context=2), "llama"),
        (Layout(2, "vocab-2", "zb-h1", tensor=2, sequence=True), "fp32"),
        (Layout(2, "vocab-2", tensor=2), "llama"),
        (Layout(2, "none", tensor=2, sequence=True), "llama"),
        (Layout(2, "vocab-2", tensor=2, sequence=True), "further tokens"),
        (Layout(2, "vocab-2", "zb-h1", context=2), "groups"),
        (Layout(2, "vocab-1", "zb-v", context=2), "fp32"),
        (Layout(2, "none", context=2, tensor=2, sequence=True), "llama"),
    ],
    ids=str,
)
def test_memory_of_shared_layers_and_sequences_is_what_a_dry_run_says(
    layout: Layout, variant: str, gpus: GpuPool
) -> None:
    config = paper_config(layout, 32_000, layers=4, micro_batch_size=4, **VARIANTS[variant])
    own = memory(config, gpus)
    assert own.faults == []
    assert own.allocated == pytest.approx(own.predicted, rel=ALLOCATED_WITHIN)


@pytest.mark.full
def test_memory_with_steps_validated_later_is_what_a_dry_run_says(gpus: GpuPool) -> None:
    """All ranks but the last keep a copy of masters and moments."""
    config = paper_config(Layout(2, "vocab-2"), 32_000, layers=2)
    later = replace(config, optimizer=replace(config.optimizer, post_validation=True, clip_grad=0))
    plain, own = memory(config, gpus), memory(later, gpus)
    assert own.faults == []
    assert own.allocated == pytest.approx(own.predicted, rel=ALLOCATED_WITHIN)
    positions = 2048 * 3072
    parameters = 12 * 3072**2 + 32_000 * 3072 + positions
    grown = [now - before for now, before in zip(own.allocated, plain.allocated, strict=True)]
    assert grown == pytest.approx([12 * parameters / GIB, 0.0], abs=2e-3)


@pytest.mark.full
@pytest.mark.parametrize(
    "changed",
    [
        {"optimizer": "muon"},
        {"optimizer": "sgd"},
        {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
        {"exp_avg_sq_dtype": "bf16", "post_validation": True, "clip_grad": 0},
    ],
    ids=str,
)
def test_memory_of_other_optimizers_is_what_a_dry_run_says(
    changed: dict[str, Any], gpus: GpuPool
) -> None:
    config = paper_config(Layout(2, "vocab-2"), 32_000, layers=4)
    own = memory(replace(config, optimizer=replace(config.optimizer, **changed)), gpus)
    assert own.faults == []
    assert own.allocated == pytest.approx(own.predicted, rel=ALLOCATED_WITHIN)


@pytest.mark.full
def test_memory_of_gradients_in_bf16_is_what_a_dry_run_says(gpus: GpuPool) -> None:
    config = paper_config(Layout(2, "vocab-2"), 32_000, layers=4)
    narrow = replace(
        config,
        train=replace(config.train, precision=precision(torch.bfloat16, narrow_gradients=True)),
    )
    own = memory(narrow, gpus)
    assert own.faults == []
    assert own.allocated == pytest.approx(own.predicted, rel=ALLOCATED_WITHIN)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["zb-v", "1f1b"])
def test_memory_of_an_fp32_stream_is_what_a_dry_run_says(schedule: str, gpus: GpuPool) -> None:
    config = paper_config(
        Layout(2, "vocab-2", schedule), 32_000, layers=4, micro_batch_size=4, tie_embeddings=True
    )
    wide = replace(config.train.precision, fp32_residual_connection=True)
    own = memory(replace(config, train=replace(config.train, precision=wide)), gpus)
    assert own.faults == []
    assert own.allocated == pytest.approx(own.predicted, rel=ALLOCATED_WITHIN)


@pytest.mark.full
@pytest.mark.parametrize("overlap", [False, True], ids=["at the end", "overlapped"])
def test_memory_of_copies_in_which_gradients_are_reduced_is_what_a_dry_run_says(
    overlap: bool, gpus: GpuPool
) -> None:
    """Small microbatches, so that the end of an iteration is its peak if nothing overlaps."""
    layout = Layout(2, "vocab-2", replicas=2, overlap=overlap)
    config = paper_config(layout, 128_000, layers=2, sequence=128)
    copied = replace(config.parallel.replicas, grad_reduce_in_bf16=True)
    narrow = replace(config, parallel=replace(config.parallel, replicas=copied))
    wide, own = memory(config, gpus), memory(narrow, gpus)
    assert own.faults == []
    assert own.allocated == pytest.approx(own.predicted, rel=ALLOCATED_WITHIN)
    assert min(own.allocated) > 1.02 * max(wide.allocated), "the copies count"
