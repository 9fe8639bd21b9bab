"""Sizes that products in 8 bits can take: widths and tokens on a rank, and the rules about them."""

from collections.abc import Iterator

from megatron.config.eight_bits import FORMAT, EightBitFlags, asks_for_engine
from megatron.config.model import sound_model
from megatron.config.parallelism import ParallelFlags
from megatron.config.train import TrainFlags
from megatron.flags.groups import Flags
from megatron.flags.rules import refuses
from megatron.kernels.eight_bits import MULTIPLE
from megatron.layers.eight_bit_config import BLOCKS
from megatron.layers.experts.settings import SHARED_EXPERT
from megatron.layers.settings import LatentAttentionSettings
from megatron.model.settings import ModelSettings, ShapeSettings
from megatron.parallel.settings import ExpertRankSettings


@refuses
def _widths(flags: Flags) -> Iterator[str]:
    form = flags[EightBitFlags].fp8_format
    if form is None:
        return
    try:
        model = sound_model(flags)
    except ValueError:  # another rule reports this mistake
        return
    ranks = flags[ParallelFlags].tensor_model_parallel_size
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
    products, multiple = _products(flags)
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


@refuses
def _tokens(flags: Flags) -> Iterator[str]:
    length = flags[ShapeSettings].seq_length
    yield from fault_of_tokens(flags, length, f"--seq-length {length}")


def fault_of_tokens(flags: Flags, length: int, named: str) -> Iterator[str]:
    """Refuse passes whose tokens products in 8 bits cannot take.

    Args:
        flags: the flags.
        length: tokens of a sample that a pass has, if context-parallel ranks do not share them.
        named: that length in words.
    """
    own, samples = flags[EightBitFlags], flags[TrainFlags].micro_batch_size
    if own.fp8_format is None or samples is None:
        return
    if own.no_fp8_wgrad and not asks_for_engine(flags):
        return
    products, multiple = _products(flags)
    tokens, shared = _shared(flags, samples * length)
    if tokens % multiple:
        instead = "" if asks_for_engine(flags) else ", or add --no-fp8-wgrad"
        of_weights = "" if asks_for_engine(flags) else " of weights' gradients"
        yield (
            f"{FORMAT} {own.fp8_format}: {products}{of_weights} need tokens in multiples of "
            f"{multiple}, but --micro-batch-size {samples} x {named}{shared} is {tokens:g}: change "
            f"one of them{instead}"
        )


def _shared(flags: Flags, tokens: float) -> tuple[float, str]:
    """Return the fewest of a pass's tokens that a linear layer has on a rank, and who shares them.

    The layers of multi-latent attention that make latents have the tokens outside of attention.
    """
    own, shared = flags[ParallelFlags], ""
    if (parts := own.context_parallel_size) > 1:
        tokens /= parts
        shared = f" / {parts} context-parallel ranks"
    splits = own.sequence_parallel and flags[LatentAttentionSettings].multi_latent_attention
    if splits and (parts := own.tensor_model_parallel_size) > 1:
        tokens /= parts
        shared += f" / {parts} ranks of --sequence-parallel"
    return tokens, shared


def _products(flags: Flags) -> tuple[str, int]:
    """Return a name for the products, and the number of which all sizes must be multiples.

    With ``blockwise`` blocks at an edge may be smaller; DeepSeek-V3 has a layer of 576 outputs.
    """
    recipe = flags[EightBitFlags].fp8_recipe
    if recipe == "mxfp8":
        return f"products with --fp8-recipe {recipe}", BLOCKS[recipe]
    return "products in 8 bits", MULTIPLE
