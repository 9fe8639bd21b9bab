"""The settings of the vocabulary layers' shards, which no checkpoint knows."""

from dataclasses import dataclass

from megatron.flags.declare import flag
from megatron.flags.ranges import WIDTH


@dataclass(frozen=True)
class ShardSettings:
    """Shards of the vocabulary layers."""

    # fmt: off
    vocab_recompute: bool = flag(False,
        "Keep no logits for the output layer's backward; form them again there. This saves memory "
        "and costs one more product, under every treatment.", idle_with="--skip-train")
    make_vocab_size_divisible_by: int = flag(128,
        "Number that divides the rows of every shard of the vocabulary.", WIDTH)
    # fmt: on

    def padded(self, vocab_size: int, shards: int) -> int:
        """Return the rows of the whole matrix, with as many for every shard.

        Args:
            vocab_size: real vocabulary entries V.
            shards: number of shards.
        """
        multiple = self.make_vocab_size_divisible_by * shards
        return -(-vocab_size // multiple) * multiple
