"""What the passes cost, by their FLOPs until they have been measured: enough to place them.

A stage costs as much as its transformer layers, and what it does besides: the whole vocabulary
layers, where they are not split over the ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron.model.config import ModelConfig
from megatron.schedules.costs import Costs, Time
from megatron.schedules.needs import CommKind
from megatron.schedules.passes import CHUNKED_KINDS, PassKind
from megatron.schedules.treatments import TREATMENTS, Treatment
from megatron.simulator.costs.cost_file import CostFile, check_measured
from megatron.simulator.costs.shape import Shape

FLOPS_PER_BYTE = 100
"""What moving a byte costs, as arithmetic that would take as long: devices do about a hundred
operations in the time of one byte."""

LOOKUP_BYTES_PER_ELEMENT = 6
"""Reading and adding an embedding, or its gradient."""

EXPONENTIAL_BYTES_PER_LOGIT = 4
"""Reading a logit and writing its exponential, where a pass does nothing else."""

Stages = Sequence[tuple[int, int]]
"""(rank, chunk) of every stage, in the order in which the data flows."""


@dataclass(frozen=True)
class StageCosts:
    """What every stage costs, for any distribution of the layers.

    Attributes:
        stages: the stages.
        layer: what one transformer layer adds to F, B (the input gradient) and W of its stage.
        extras: what these cost besides, by stage.
        others: the passes that do not belong to a stage.
        vocabulary: the treatment of the vocabulary that they belong to.
        comms: communications.
    """

    stages: Stages
    layer: Mapping[PassKind, float]
    extras: Sequence[Mapping[PassKind, float]]
    others: Mapping[PassKind, Time]
    vocabulary: str
    comms: Mapping[CommKind, float] = field(default_factory=dict)

    def costs(self, layers: Sequence[int]) -> Costs:
        """Return the costs of all passes, those of stages by rank and chunk.

        Args:
            layers: transformer layers of every stage.
        """
        ranks = 1 + max(rank for rank, _ in self.stages)
        passes: dict[PassKind, Time] = {}
        for kind, cost in self.layer.items():
            table = [[0.0] * (len(self.stages) // ranks) for _ in range(ranks)]
            for (rank, chunk), count, extra in zip(self.stages, layers, self.extras, strict=True):
                table[rank][chunk] = max(cost * count + extra.get(kind, 0.0), 0.0)
            passes[kind] = table
        return Costs({**passes, **self.others}, self.comms)


def shape_of(model: ModelConfig, micro_batch_size: int) -> Shape:
    """Return the shape by which the simulator counts FLOPs and bytes."""
    return Shape(
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        seq_length=model.seq_length,
        vocab_size=model.vocab_size,
        micro_batch_size=micro_batch_size,
        ffn_hidden_size=model.ffn_hidden_size,
        query_width=model.num_attention_heads * model.kv_channels,
        key_value_width=2 * model.num_query_groups * model.kv_channels,
        gated_mlp=model.swiglu,
        own_queries=model.qk_layernorm or model.position_embedding_type == "rope",
        dropout=model.hidden_dropout > 0,
    )


def costs_by_flops(shape: Shape, stages: Stages, vocabulary: str) -> StageCosts:
    """Return the assumed costs, in FLOPs; communication is free.

    The backward costs twice the forward. Attention itself has no weights: its backward is all in B.
    The whole output layer forms the logits and at once its input gradient in F, the weight gradient
    in W.

    Args:
        shape: the model and one microbatch.
        stages: the stages of the plan.
        vocabulary: a treatment of the vocabulary.
    """
    treatment = TREATMENTS[vocabulary]
    extras: list[dict[PassKind, float]] = [dict.fromkeys(CHUNKED_KINDS, 0.0) for _ in stages]
    others: dict[PassKind, float] = {}
    if not treatment.is_sharded:
        product = shape.output_product_flops
        extras[0]["F"] += _lookup(shape)
        extras[0]["B"] += _lookup(shape)
        extras[-1]["F"] += 2 * product
        extras[-1]["W"] += product
    else:
        others = _vocabulary_passes(shape, 1 + max(rank for rank, _ in stages), treatment)
    layer: dict[PassKind, float] = {
        "F": shape.forward_flops,
        "B": shape.backward_flops,
        "W": shape.weight_gradient_flops,
    }
    return StageCosts(stages, layer, extras, others, vocabulary)


def _vocabulary_passes(shape: Shape, ranks: int, treatment: Treatment) -> dict[PassKind, float]:
    """Return the costs of one shard's passes."""
    product = shape.output_product_flops / ranks
    costs: dict[PassKind, float] = {
        "S": treatment.products["S"] * product,
        "E": float(FLOPS_PER_BYTE * EXPONENTIAL_BYTES_PER_LOGIT * shape.logits) / ranks,
        "T": treatment.products["T"] * product,
        "IF": _lookup(shape),
        "IB": _lookup(shape),
    }
    return {kind: costs[kind] for kind in treatment.passes}


def _lookup(shape: Shape) -> float:
    return float(FLOPS_PER_BYTE * LOOKUP_BYTES_PER_ELEMENT * shape.elements)


def measured_costs(file: CostFile, by_flops: StageCosts) -> StageCosts:
    """Return the costs of a file, for any distribution of the layers.

    A layer costs what it does on the stages that do nothing else, in the mean. Where there are
    none, a stage's time is divided as its FLOPs are.

    Args:
        file: with the layers that it was measured with.
        by_flops: tells the stages, and which do something else.

    Raises:
        ValueError: if the file does not fit the stages, was measured with another treatment of the
            vocabulary, or lacks what is needed.
    """
    check_measured(file, by_flops.vocabulary)
    counts = _by_stage(file.layers, by_flops.stages, "layers")
    layer, extras = {}, [dict[PassKind, float]() for _ in counts]
    for kind in CHUNKED_KINDS:
        if kind == "W" and kind not in file.costs.passes:
            continue  # measured without splitting the backward
        times = _by_stage(file.costs.passes.get(kind), by_flops.stages, kind)
        layer[kind] = _layer_time(kind, times, counts, by_flops)
        for extra, time, count in zip(extras, times, counts, strict=True):
            extra[kind] = time - count * layer[kind]
    others = {kind: file.costs.passes[kind] for kind in by_flops.others}
    return replace(by_flops, layer=layer, extras=extras, others=others, comms=file.costs.comms)


def _layer_time(
    kind: PassKind, times: Sequence[float], counts: Sequence[float], by_flops: StageCosts
) -> float:
    """Return the time of one layer in passes of a kind, in the mean over stages."""
    busy = [any(extra.values()) for extra in by_flops.extras]
    pure = [not other and count > 0 for other, count in zip(busy, counts, strict=True)]
    time = total = 0.0
    for own, count, extra, alone in zip(times, counts, by_flops.extras, pure, strict=True):
        if alone or not any(pure):
            flops = count * by_flops.layer[kind]
            time += own * flops / max(flops + extra[kind], 1.0)
            total += count
    return time / max(total, 1.0)


def _by_stage(value: Time | None, stages: Stages, name: str) -> list[float]:
    """Return the entries of a table by rank and chunk in the order of the stages.

    Raises:
        ValueError: if there is no table, or one of other ranks or chunks.
    """
    table = [
        [own] if isinstance(own, (int, float)) else list(own)
        for own in (value if isinstance(value, Sequence) else ())
    ]
    ranks, chunks = (1 + max(numbers) for numbers in zip(*stages, strict=True))
    if [len(row) for row in table] != [chunks] * ranks:
        raise ValueError(
            f"{name} is no table for {ranks} ranks with {chunks} chunk(s) each: measure with the "
            "schedule that is planned for"
        )
    return [table[rank][chunk] for rank, chunk in stages]
