"""Sizes that products in 8 bits can take: widths and tokens on a rank, and the rules about them."""

from collections.abc import Iterator

from megatron.flags.groups import Flags
from megatron.flags.rules import refuses
from megatron.kernels.eight_bits import MULTIPLE
from megatron.layers.eight_bit_settings import BLOCKS, FORMAT, EightBitSettings
from megatron.layers.settings import LatentAttentionSettings
from megatron.model.settings import ShapeSettings
from megatron.parallel.context_settings import ContextRankSettings
from megatron.parallel.settings import TensorRankSettings
from megatron.run.eight_bits import asks_for_engine
from megatron.run.train import TrainSettings


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
    own, samples = flags[EightBitSettings], flags[TrainSettings].micro_batch_size
    if own.fp8_format is None or samples is None:
        return
    if own.wide_weight_gradients and not asks_for_engine(flags):
        return
    products, multiple = products_of(flags)
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
    own, shared = flags[TensorRankSettings], ""
    if (parts := flags[ContextRankSettings].size) > 1:
        tokens /= parts
        shared = f" / {parts} context-parallel ranks"
    splits = own.sequence_parallel and flags[LatentAttentionSettings].multi_latent_attention
    if splits and (parts := own.size) > 1:
        tokens /= parts
        shared += f" / {parts} ranks of --sequence-parallel"
    return tokens, shared


def products_of(flags: Flags) -> tuple[str, int]:
    """Return a name for the products, and the number of which all sizes must be multiples.

    With ``blockwise`` blocks at an edge may be smaller; DeepSeek-V3 has a layer of 576 outputs.
    """
    recipe = flags[EightBitSettings].fp8_recipe
    if recipe == "mxfp8":
        return f"products with --fp8-recipe {recipe}", BLOCKS[recipe]
    return "products in 8 bits", MULTIPLE
