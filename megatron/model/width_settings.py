"""The settings of the maximal update parametrisation (muP); ``maximal_update`` has its formulas."""

from dataclasses import dataclass
from typing import Final

from megatron.flags.declare import flag
from megatron.flags.ranges import FACTOR, WIDTH, Range

_MUP: Final = "--use-mup"


@dataclass(frozen=True)
class WidthSettings:
    """The maximal update parametrisation (muP): a learning rate that fits models of every width."""

    # fmt: off
    use_mup: bool = flag(False,
        "Scale initial weights, scores of attention, logits, learning rates and Adam's epsilon "
        "with the width, so that hyperparameters found with --mup-base-hidden-size fit.")
    mup_base_hidden_size: int | None = flag(None,
        "--hidden-size of the model whose hyperparameters are used.", WIDTH,
        unset="--hidden-size", idle_without=_MUP)
    mup_width_mult: float | None = flag(None,
        "--hidden-size / --mup-base-hidden-size, which nothing else may be.", Range(1e-6, 1e6),
        unset="that quotient", idle_without=_MUP)
    mup_base_head_dim: float | None = flag(None,
        "Width of a head of the model whose hyperparameters are used: its root multiplies the "
        "products of queries and keys.", Range(1, 1 << 16), unset="1",
        idle_without=_MUP, idle_with="--softmax-scale or --query-pre-attn-scalar")
    mup_attn_scale_power: float = flag(1.0,
        "Power of a head's width by which products of queries and keys are divided.", Range(0, 2),
        idle_without=_MUP, idle_with="--softmax-scale or --query-pre-attn-scalar")
    mup_output_mult: float = flag(1.0,
        "Factor of the logits, beside --logit-multiplier. 1: --mup-base-hidden-size / "
        "--hidden-size.", FACTOR, idle_without=_MUP)
    mup_embedding_mult: float = flag(1.0,
        "Factor of the embeddings, beside --embedding-multiplier.", FACTOR, idle_without=_MUP)
    # fmt: on

    def width(self, hidden_size: int) -> float:
        """Return the width multiplier of a model; 1 without muP."""
        if not self.use_mup or self.mup_base_hidden_size is None:
            return 1.0
        return hidden_size / self.mup_base_hidden_size
