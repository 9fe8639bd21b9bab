"""Products in 8 bits: layers, widths and devices that can have them."""

from collections.abc import Iterator
from importlib.util import find_spec

import torch

from megatron.flags.groups import Flags
from megatron.flags.rules import notes_in, refuses, refuses_in
from megatron.kernels.cuda.microscaling import lack_of_mx_products
from megatron.layers.eight_bit_settings import (
    ENDS,
    FORMAT,
    GATHER,
    WITHOUT_EXPERTS,
    EightBitSettings,
)
from megatron.layers.experts.settings import SHARED_EXPERT, ExpertSettings
from megatron.model.settings import ModelSettings, ShapeSettings
from megatron.parallel.settings import ExpertRankSettings, TensorRankSettings
from megatron.run.eight_bit_sizes import products_of
from megatron.run.eight_bits import (
    LEAST_CAPABILITY,
    PACKAGE,
    asks_for_engine,
    engine_multiplies,
    gathers,
    lack_of_engine,
)
from megatron.run.experts import is_mixture
from megatron.run.model import sound_model
from megatron.run.parallelism import on_cuda


@refuses
def _mxfp8_of_experts(flags: Flags) -> Iterator[str]:
    """Refuse experts with scales of 32 numbers."""
    own, experts = flags[EightBitSettings], flags[ExpertSettings]
    if own.fp8_format is not None and own.fp8_recipe in WITHOUT_EXPERTS and experts.is_mixture:
        yield (
            f"--fp8-recipe {own.fp8_recipe} with --num-experts {experts.num_experts}: the products "
            "of experts have no scales of 32 numbers: use --fp8-recipe blockwise, tensorwise or "
            f"delayed, or leave {FORMAT} out"
        )


@refuses
def _ends(flags: Flags) -> Iterator[str]:
    own, layers = flags[EightBitSettings], flags[ShapeSettings].num_layers
    if own.fp8_format is None or not own.first_last_layers_bf16:
        return
    start, end = own.num_layers_at_start_in_bf16, own.num_layers_at_end_in_bf16
    if start + end >= layers:
        yield (
            f"{ENDS}: --num-layers-at-start-in-bf16 {start} and --num-layers-at-end-in-bf16 {end} "
            f"leave none of --num-layers {layers} in 8 bits: lower them, or leave {FORMAT} out"
        )


@refuses_in("real")
def _eight_bits_of_device(flags: Flags) -> Iterator[str]:
    """Refuse 8 bits on GPUs that cannot multiply them, or without Triton's kernels."""
    form, by_engine = flags[EightBitSettings].fp8_format, engine_multiplies(flags)
    if form is None or not on_cuda(flags) or (by_engine and not is_mixture(flags)):
        return
    for number in range(0 if by_engine else torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(number)
        if capability < LEAST_CAPABILITY:
            yield (
                f"{FORMAT} {form}: {torch.cuda.get_device_name(number)} has no tensor cores for 8 "
                f"bits (compute capability {'.'.join(map(str, capability))}, and they begin at "
                f"{'.'.join(map(str, LEAST_CAPABILITY))}): leave it out, or use another GPU"
            )
            return
        is_mx = flags[EightBitSettings].fp8_recipe == "mxfp8"
        if is_mx and (lack := lack_of_mx_products(number)):
            yield f"--fp8-recipe mxfp8: {lack}: use --fp8-recipe blockwise, tensorwise or delayed"
            return
    if find_spec("triton") is None:
        yield (
            f"{FORMAT} {form}: the kernels that quantise on GPUs are Triton's, which is not "
            "installed: pip install triton, or leave it out"
        )


@notes_in("real")
def _kernels_for_transformer_engine(flags: Flags) -> Iterator[str]:
    """Note that the kernels multiply in place of Transformer Engine, by the same recipe."""
    if not asks_for_engine(flags):
        return
    lack = lack_of_engine(flags)
    if gathers(flags):
        lack = f"weights that were gathered in 8 bits ({GATHER}) are not in its form"
    if lack:
        yield (
            f"{PACKAGE} changes nothing: {lack}; this project's kernels multiply, by the same "
            "recipe"
        )


@notes_in("real")
def _eight_bits_on_cpus(flags: Flags) -> Iterator[str]:
    """Note that CPUs are slower with 8 bits."""
    form = flags[EightBitSettings].fp8_format
    if form is not None and not on_cuda(flags):
        yield (
            f"{FORMAT} {form} makes this run slower: a CPU emulates products in 8 bits, to see "
            "what they do to the loss"
        )


@refuses
def _widths(flags: Flags) -> Iterator[str]:
    form = flags[EightBitSettings].fp8_format
    if form is None:
        return
    model = sound_model(flags)
    ranks = flags[TensorRankSettings].size
    widths = {"--hidden-size": float(model.hidden_size), **_widths_of_attention(model, ranks)}
    if not all(map(model.experts.in_layer, range(model.num_layers))):
        widths["--ffn-hidden-size"] = model.mlp.ffn_hidden_size / ranks
    if model.experts.num_experts:
        own_ranks = flags[ExpertRankSettings].expert_tensor_parallel_size or ranks
        widths["--moe-ffn-hidden-size"] = model.experts.moe_ffn_hidden_size / own_ranks
        widths[SHARED_EXPERT] = model.experts.moe_shared_expert_intermediate_size / ranks
    if model.further.mtp_num_layers:
        widths["--hidden-size with --mtp-num-layers"] = model.hidden_size / ranks
    of_a_rank = f" on each of {ranks} tensor-parallel ranks" if ranks > 1 else ""
    products, multiple = products_of(flags)
    for name, width in widths.items():
        if width % multiple:
            yield (
                f"{FORMAT} {form}: {products} need widths in multiples of {multiple}, but {name} "
                f"makes {width:g}{of_a_rank}: change it, or leave {FORMAT} out"
            )


def _widths_of_attention(model: ModelSettings, ranks: int) -> dict[str, float]:
    """Return the widths of factors in attention, by the flags that make them."""
    heads, queries = (
        model.attention.num_attention_heads,
        model.attention.num_attention_heads * model.attention.kv_channels,
    )
    if not model.latent.multi_latent_attention:
        keys_and_values = 2 * model.attention.num_query_groups * model.attention.kv_channels
        return {
            "--num-attention-heads x --kv-channels": queries / ranks,
            "--num-query-groups x --kv-channels, queries, keys and values together": (
                (queries + keys_and_values) / ranks
            ),
        }
    found: dict[str, float] = {
        "--kv-lora-rank": model.latent.kv_lora_rank,
        "--kv-lora-rank + --qk-pos-emb-head-dim": model.latent.kv_lora_rank
        + model.latent.qk_pos_emb_head_dim,
        "--num-attention-heads x (--qk-head-dim + --qk-pos-emb-head-dim)": queries / ranks,
        "--num-attention-heads x (--qk-head-dim + --v-head-dim)": (
            heads * (model.latent.qk_head_dim + model.latent.v_head_dim) / ranks
        ),
        "--num-attention-heads x --v-head-dim": heads * model.latent.v_head_dim / ranks,
    }
    if model.latent.q_lora_rank is not None:
        found["--q-lora-rank"] = model.latent.q_lora_rank
    return found
