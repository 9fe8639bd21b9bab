"""A layer of a published model as this project's code runs it, and the sizes of the model.

The passes are the code's own count (``megatron/planning/count``). ``megatron_lm.py`` makes
those of Megatron-LM of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from megatron.planning.count.run import count_layers
from megatron.run.command_line import parse
from megatron.schedules.make_plan import make_plan
from megatron.schedules.passes import PassKind
from megatron.simulator.costs.count import HALF, Segment, Work

Recomputation = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Shape:
    """A dense GPT with biases and learned positions, one microbatch, and ranks that share a layer.

    Attributes:
        hidden_size: h; the MLP is four times as wide.
        num_attention_heads: heads of queries, of keys and of values.
        seq_length: tokens of a sequence.
        vocab_size: padded vocabulary V.
        micro_batch_size: sequences of a microbatch.
        dropout: of both branches, on the residual stream.
        tensor: ranks t that share a layer.
        sequence_parallel: outside of attention and MLP they have parts of the sequence.
        recomputation: what B computes again: nothing, attention, or the layer.
    """

    hidden_size: int
    num_attention_heads: int
    seq_length: int
    vocab_size: int
    micro_batch_size: int = 1
    dropout: bool = False
    tensor: int = 1
    sequence_parallel: bool = False
    recomputation: Recomputation = "none"

    @property
    def tokens(self) -> int:
        """Tokens n of a microbatch."""
        return self.micro_batch_size * self.seq_length

    @property
    def activation(self) -> int:
        """Bytes u of an activation of all tokens."""
        return HALF * self.tokens * self.hidden_size

    @property
    def own(self) -> int:
        """Bytes of a rank's part of an activation outside of attention and MLP."""
        return self.activation // (self.tensor if self.sequence_parallel else 1)

    @property
    def parameters(self) -> int:
        """Elements of a rank's parameters in a layer."""
        return self._counted(split=False).parameters.all

    @property
    def kept(self) -> int:
        """Bytes that a layer keeps from F to B."""
        return self.passes()["F"].left

    def passes(self, *, split: bool = False) -> Mapping[PassKind, Work]:
        """Return F and B of a layer; W where ``split``; R where the whole layer is computed again.

        Unlike this project's, R of Megatron-LM forms the layer's output too: it is F once more.
        """
        found = self._counted(split=split).passes
        if self.recomputation != "full":
            return found
        forward = found["F"]
        again = replace(forward, left=forward.left - self.own)
        return {**found, "F": replace(forward, left=self.own), "R": again}

    def _counted(self, *, split: bool) -> Segment:
        """Return the count of a layer that is not computed again as a whole."""
        again: Recomputation = "selective" if self.recomputation == "selective" else "none"
        return _count(replace(self, vocab_size=1, recomputation=again), split)


@cache
def _count(shape: Shape, split: bool) -> Segment:
    """Count the layer of a run of one layer on one pipeline rank."""
    words = (
        f"--bf16 --num-layers 1 --hidden-size {shape.hidden_size} --num-attention-heads "
        f"{shape.num_attention_heads} --seq-length {shape.seq_length} --max-position-embeddings "
        f"{shape.seq_length} --vocab-size {shape.vocab_size} --micro-batch-size "
        f"{shape.micro_batch_size} --global-batch-size {shape.micro_batch_size} --train-iters 1 "
        f"--lr 1 --attention-dropout 0 --hidden-dropout {0.1 * shape.dropout} "
        f"--tensor-model-parallel-size {shape.tensor} --dry-run"
    ).split()
    if shape.sequence_parallel:
        words.append("--sequence-parallel")
    if shape.recomputation == "selective":
        words += ["--recompute-granularity", "selective"]
    config = parse(words, world_size=shape.tensor, speak=False)
    plan = make_plan("zb-h1" if split else "1f1b", "none", 1, 1)
    return count_layers(config, plan)[0]
