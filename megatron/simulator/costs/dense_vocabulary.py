"""The counts of a dense GPT's vocabulary layers in closed form; see ``dense_gpt.py``."""

from megatron.schedules.passes import PassKind
from megatron.simulator.costs.count import Collective, Launch, Work, in_order
from megatron.simulator.costs.dense_gpt import (
    FULL,
    HALF,
    DenseGpt,
    Steps,
    entering,
    leaving,
    product,
)


def output_layer(gpt: DenseGpt, shards: int, *, early: bool = True) -> dict[PassKind, Work]:
    """Return S and T of a shard of the output layer, and the work between, which is F's or B's.

    Args:
        gpt: the model.
        shards: ranks that the vocabulary is split over.
        early: whether S computes the input gradient (Algorithm 2), not T.
    """
    n, h, rows = gpt.tokens, gpt.hidden_size, -(-gpt.vocab_size // shards)
    logits = HALF * n * rows
    wide = FULL * n * h
    gradient = product("mm", n, h, rows)._replace(bytes=logits + HALF * rows * h + wide)
    statistics: Steps = [
        product("mm", n, rows, h),
        Launch("column_maxima", logits),
        Launch("exponentials_", 2 * logits),
    ]
    weights: Steps = [
        Launch("scale_rows", 2 * gpt.activation),
        product("addmm", rows, h, n, adds=True),
        Launch("subtract_targets_", 2 * wide + gpt.activation),
    ]
    merged = Launch("merge_input_gradient", wide + 2 * gpt.activation)
    s = [*statistics, *([gradient] if early else [])]
    t = [*([] if early else [gradient, merged]), *weights]
    return {"S": Work(tuple(s), logits), "T": Work(tuple(t), -logits)}


def input_layer(gpt: DenseGpt) -> dict[PassKind, Work]:
    """Return IF and IB of a shard of the input layer, as if every token were its own."""
    u = gpt.activation
    return {
        "IF": Work((Launch("embedding", 2 * u + 8 * gpt.tokens),), u, u),
        "IB": Work((Launch("index_add_", u + 2 * FULL * gpt.tokens * gpt.hidden_size),), -u),
    }


def whole_output_layer(gpt: DenseGpt) -> dict[PassKind, Work]:
    """Return what an output layer that the tensor ranks of the last stage share adds to F and B.

    They gather the input if they have parts of it, merge three numbers of every token, and sum the
    input's gradient.
    """
    passes = output_layer(gpt, gpt.tensor)
    statistics: Steps = []
    if gpt.tensor > 1:
        size = 3 * FULL * gpt.tokens * gpt.tensor
        statistics.append(Collective("all_gather", "tensor", gpt.tensor, size))
    merged = Launch("merge_input_gradient", 4 * gpt.activation)
    around = Work((*statistics, merged, *leaving(gpt)))
    return {"F": in_order(Work(tuple(entering(gpt))), passes["S"], around), "B": passes["T"]}
