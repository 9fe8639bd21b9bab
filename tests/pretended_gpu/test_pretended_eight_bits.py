"""Products in 8 bits on GPUs that are not there: order, waits of the host, and memory."""

import math
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
import torch
from correctness.short_runs import Job, Layout
from cuda_path import needs_pretended_gpus
from kernels.engine_stand_in import installed
from pretended_gpu.lean_engine import LeanQuantizer, general_gemm, rmsnorm_fwd
from pretended_gpu.paper_memory import memory, paper_config, until_full
from pretended_gpu.pool import GpuPool
from pretended_gpu.rank import Findings, run_rank
from pretended_gpu.sound import assert_sound
from reference.plain_gpt import GPTOptions

from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.layers.recompute import NO_RECOMPUTATION, PARTS, Recomputation
from megatron.run.run_config import RunConfig
from megatron.simulator.costs.accuracy import ALLOCATED_WITHIN

DELAYED, TENSORWISE = (
    EightBitSettings("hybrid", fp8_amax_history_len=4),
    EightBitSettings("e4m3", "tensorwise"),
)
WIDE = replace(DELAYED, wide_weight_gradients=True)
BLOCKWISE = EightBitSettings("e4m3", "blockwise")
MX = EightBitSettings("hybrid", "mxfp8")
ACTIVE = Recomputation(parts=frozenset({"core_attn", "moe_act"}))
LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
}

MATRICES = GPTOptions(num_layers=4, hidden_size=256, ffn_hidden_size=512, vocab_size=64)
"""Nearly all of its parameters are matrices of layers."""

pytestmark = needs_pretended_gpus


def run(config: RunConfig, rank: int) -> Findings:
    return run_rank(config, rank)


def in_eight_bits(
    config: RunConfig,
    eight_bits: EightBitSettings,
    recomputation: Recomputation = NO_RECOMPUTATION,
) -> RunConfig:
    train = replace(config.train, eight_bits=eight_bits, recomputation=recomputation)
    return replace(config, train=train)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "eight_bits", "post_validation"),
    [
        (Layout(2, "vocab-2", "zb-h1"), DELAYED, True),
        (Layout(2, "none"), TENSORWISE, False),
        (Layout(2, "vocab-1", "zb-v"), WIDE, False),
        (Layout(2, "vocab-2", "zb-h1"), BLOCKWISE, False),
    ],
    ids=str,
)
def test_streams_and_memory_are_in_order(
    layout: Layout, eight_bits: EightBitSettings, post_validation: bool, gpus: GpuPool
) -> None:
    job = Job(GPTOptions(num_layers=4), microbatches=4, dropout=0.1)
    config = in_eight_bits(job.config(layout, torch.bfloat16), eight_bits)
    config = replace(config, optimizer=replace(config.optimizer, post_validation=post_validation))
    assert_sound(gpus.map(run, config, ranks=2))


@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "eight_bits", "recomputation"),
    [
        ("1f1b", DELAYED, NO_RECOMPUTATION),
        ("zb-h1", TENSORWISE, Recomputation(parts=frozenset(PARTS))),
        (
            "1f1b",
            replace(DELAYED, first_last_layers_bf16=True, num_layers_at_end_in_bf16=0),
            NO_RECOMPUTATION,
        ),
        ("zb-v", DELAYED, Recomputation(group=1)),
        ("1f1b", DELAYED, Recomputation(group=1)),
        ("1f1b", WIDE, NO_RECOMPUTATION),
        ("zb-h1", BLOCKWISE, NO_RECOMPUTATION),
        ("zb-h1", MX, NO_RECOMPUTATION),
    ],
    ids=str,
)
def test_memory_is_what_a_dry_run_says(
    schedule: str, eight_bits: EightBitSettings, recomputation: Recomputation, gpus: GpuPool
) -> None:
    config = paper_config(
        Layout(2, "vocab-2", schedule), 32_000, layers=4, micro_batch_size=4, **LLAMA
    )
    own = memory(in_eight_bits(config, eight_bits, recomputation), gpus)
    assert own.faults == []
    assert own.allocated == pytest.approx(own.predicted, rel=ALLOCATED_WITHIN)


@pytest.mark.full
def test_memory_of_plain_layers_that_are_computed_again(gpus: GpuPool) -> None:
    config = paper_config(Layout(2, "vocab-2", "zb-h1"), 32_000, layers=4, micro_batch_size=4)
    own = memory(in_eight_bits(config, DELAYED, Recomputation(group=1)), gpus)
    assert own.faults == []
    assert own.allocated == pytest.approx(own.predicted, rel=ALLOCATED_WITHIN)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "eight_bits"),
    [
        (Layout(2, "vocab-2", replicas=2, experts=2), DELAYED),
        (Layout(2, "vocab-2", "zb-h1", replicas=2, experts=2, dispatcher="alltoall"), WIDE),
        (Layout(2, "vocab-2", "zb-h1", tensor=2, sequence=True), DELAYED),
        (Layout(2, "vocab-2", "zb-h1", recomputation=ACTIVE), TENSORWISE),
        (Layout(2, "vocab-2", "zb-h1", replicas=2, experts=2, dispatcher="alltoall"), BLOCKWISE),
    ],
    ids=str,
)
def test_memory_of_a_mixture(layout: Layout, eight_bits: EightBitSettings, gpus: GpuPool) -> None:
    assert_memory_of_a_mixture(
        paper_config(layout, 32_000, layers=4, **LLAMA), layout, eight_bits, gpus
    )


def gathering(config: RunConfig, eight_bits: EightBitSettings) -> RunConfig:
    """The run, with weights that replicas gather in 8 bits."""
    config = in_eight_bits(config, eight_bits)
    replicas = replace(config.parallel.replicas, gathers_eight_bits=True)
    return replace(config, parallel=replace(config.parallel, replicas=replicas))


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "eight_bits"),
    [
        (Layout(2, "vocab-2", "zb-h1", replicas=2, sharded=True, overlap=True), BLOCKWISE),
        (Layout(1, "none", replicas=3, sharded=True), TENSORWISE),
        (Layout(1, "none", replicas=2, sharded=True, overlap=True), DELAYED),
    ],
    ids=str,
)
def test_memory_of_weights_that_are_gathered_in_8_bits(
    layout: Layout, eight_bits: EightBitSettings, gpus: GpuPool
) -> None:
    config = paper_config(layout, 32_000, layers=4, micro_batch_size=4, **LLAMA)
    own = memory(gathering(config, eight_bits), gpus)
    assert own.faults == []
    assert own.allocated == pytest.approx(own.predicted, rel=ALLOCATED_WITHIN)
    usual = memory(in_eight_bits(config, eight_bits), gpus)
    assert all(less < more for less, more in zip(own.allocated, usual.allocated, strict=True))


def gathered_bytes(found: Findings) -> int:
    """Bytes of all that was gathered."""
    return sum(
        math.prod(issued.shape) * getattr(torch, issued.dtype.removeprefix("torch.")).itemsize
        for issued in found.issued
        if issued.kind == "all_gather"
    )


@pytest.mark.full
@pytest.mark.parametrize("eight_bits", [BLOCKWISE, TENSORWISE, DELAYED], ids=str)
def test_streams_and_bytes_of_weights_that_are_gathered_in_8_bits(
    eight_bits: EightBitSettings, gpus: GpuPool
) -> None:
    layout = Layout(2, "vocab-2", "zb-h1", replicas=2, sharded=True, overlap=True)
    job = Job(replace(MATRICES, **LLAMA), microbatches=4)
    config = job.config(layout, torch.bfloat16)
    found = gpus.map(run, gathering(config, eight_bits), ranks=4)
    assert_sound(found)
    usual = gpus.map(run, in_eight_bits(config, eight_bits), ranks=4)
    for own, more in zip(found, usual, strict=True):
        assert 0.5 < gathered_bytes(own) / gathered_bytes(more) < 0.56


LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "kv_channels": 192,
    "q_lora_rank": 512,
    "kv_lora_rank": 256,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "qk_layernorm": True,
}
UP = Recomputation(parts=frozenset({"mla_up_proj", "layernorm", "moe_act"}))


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "eight_bits"),
    [
        (Layout(2, "vocab-2", "zb-h1", tensor=2, sequence=True), BLOCKWISE),
        (Layout(2, "vocab-2", recomputation=UP), DELAYED),
    ],
    ids=str,
)
def test_memory_of_latent_attention(
    layout: Layout, eight_bits: EightBitSettings, gpus: GpuPool
) -> None:
    config = paper_config(layout, 32_000, layers=4, **LLAMA, **LATENT)
    assert_memory_of_a_mixture(config, layout, eight_bits, gpus)


def assert_memory_of_a_mixture(
    config: RunConfig, layout: Layout, eight_bits: EightBitSettings, gpus: GpuPool
) -> None:
    """Compare a mixture's memory with the count."""
    mixture = config.model.replaced(num_experts=8, moe_ffn_hidden_size=1024)
    own = memory(
        in_eight_bits(replace(config, model=mixture), eight_bits, layout.recomputation), gpus
    )
    assert own.faults == []
    assert own.allocated == pytest.approx(own.predicted, rel=ALLOCATED_WITHIN)


def by_engine(config: RunConfig, rank: int) -> Findings:
    """Iterations until memory is full; from the second on, norms are rounded as they are formed."""
    formed: list[int] = []

    @wraps(rmsnorm_fwd)
    def norm(**given: Any) -> list[Any]:
        formed.append(rank)
        return rmsnorm_fwd(**given)

    with installed(general_gemm=general_gemm, Float8Quantizer=LeanQuantizer, rmsnorm_fwd=norm):
        found = until_full(config, rank)
    assert formed
    return found


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_memory_with_transformer_engine_is_what_a_dry_run_says(
    schedule: str, gpus: GpuPool
) -> None:
    config = paper_config(
        Layout(2, "vocab-2", schedule), 32_000, layers=4, micro_batch_size=4, **LLAMA
    )
    own = memory(in_eight_bits(config, replace(DELAYED, transformer_engine=True)), gpus, by_engine)
    assert own.faults == []
    assert own.allocated == pytest.approx(own.predicted, rel=ALLOCATED_WITHIN)
