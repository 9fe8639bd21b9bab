"""The counts of all ranks of an untied dense GPT in closed form: layers, and vocabulary layers.

FLOPs and collectives are exact, and so are the bytes of all kernels that touch an activation.
Kernels that touch a few numbers of every token are joined to one launch, and the few that end the
loss on the last rank are left out. Memory leaves out the few numbers that these kernels return.

n tokens, h hidden size; u = 2nh bytes is one activation.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from megatron.schedules.needs import CommKind
from megatron.schedules.passes import PassKind
from megatron.schedules.plan import Plan
from megatron.schedules.treatments import Barrier, Treatment
from megatron.simulator.costs.count import (
    AWAIT,
    NO_WORK,
    Begin,
    Collective,
    Launch,
    Parameters,
    PassCount,
    RankCount,
    Work,
    in_order,
)
from megatron.simulator.costs.dense_gpt import (
    FULL,
    HALF,
    DenseGpt,
    Steps,
    dropped,
    entering,
    layer,
    leaving,
    norm,
    norm_backward,
    norm_sums,
    product,
    scattered,
)

TILE_ROWS: Final = 512
"""Vocabulary entries of a partial maximum, and of a partial sum."""

STATISTICS: Final = 4 * FULL
"""Bytes of a token's maximum, sum of exponentials and target's logit, with one number of room."""

BATCH: Final = 20
"""Bytes of a token, its target and the weight of its loss."""


MASKS: Final = 86
"""Bytes of a token in the seven kernels that find the tokens of a shard."""

Communications = dict[tuple[CommKind, int], PassCount]


def dense_counts(gpt: DenseGpt, plan: Plan, layers: Sequence[int]) -> list[RankCount]:
    """Return what every pipeline rank does for one microbatch.

    Args:
        gpt: the model, one microbatch and the ranks that share a layer.
        plan: any with the passes and stages that are wanted.
        layers: transformer layers of every stage.
    """
    passes = layer_passes(gpt, plan)
    return [_of_rank(_Place(gpt, plan, rank), passes, layers) for rank in range(plan.ranks)]


def layer_passes(gpt: DenseGpt, plan: Plan) -> dict[PassKind, Work]:
    """Return the passes of a layer that ``plan`` has; B computes again where there is no R."""
    passes = layer(gpt, split=plan.split_backward)
    if "R" in passes:
        again = _without_output(passes.pop("R"))
        if plan.recomputes:
            passes["R"] = again
        else:
            passes["B"] = in_order(again, passes["B"])
    return passes


def _without_output(again: Work) -> Work:
    """Leave out the last product, and all behind it: the layer's output is known."""
    steps = enumerate(again.steps)
    last = max(i for i, step in steps if isinstance(step, Launch) and step.product)
    return Work(again.steps[:last], again.left, again.peak)


class _Place(NamedTuple):
    """A pipeline rank.

    Attributes:
        gpt: the model.
        plan: its passes and stages.
        rank: its number.
    """

    gpt: DenseGpt
    plan: Plan
    rank: int

    @property
    def is_first(self) -> bool:
        """Whether it has the first stage."""
        return self.plan.stages[0][0] == self.rank

    @property
    def is_last(self) -> bool:
        """Whether it has the last stage."""
        return self.plan.stages[-1][0] == self.rank

    @property
    def treatment(self) -> Treatment:
        """How the vocabulary layers are run."""
        return self.plan.treatment

    @property
    def rows(self) -> int:
        """Entries of a shard of the vocabulary."""
        shards = self.gpt.tensor * (self.plan.ranks if self.treatment.is_sharded else 1)
        return -(-self.gpt.vocab_size // shards)


def _of_rank(place: _Place, passes: Mapping[PassKind, Work], layers: Sequence[int]) -> RankCount:
    """Return the count of a rank, with the ``passes`` of a layer."""
    gpt, plan, rank = place
    counted: dict[tuple[PassKind, int], PassCount] = {}
    own = [layers[plan.stage_of[rank, chunk]] for chunk in range(plan.chunks)]
    for chunk, times in enumerate(own):
        for kind, work in passes.items():
            before, behind = _around(place, kind, chunk)
            counted[kind, chunk] = _joined((before, 1), (work, times), (behind, 1))
    sharded = place.treatment.is_sharded
    ends = gpt.seq_length * (not gpt.llama) * place.is_first + gpt.norm_vectors * place.is_last
    held = place.rows * (2 if sharded else place.is_first + place.is_last)
    begun, ended = _messages(place)
    if sharded:
        counted |= {(kind, 0): PassCount.of(work) for kind, work in _shard(place).items()}
        begun |= {(kind, 0): PassCount.of(work) for kind, work in _begun(place).items()}
        ended |= {(kind, 0): PassCount.of(work) for kind, work in _ended(place).items()}
    return RankCount(
        counted,
        begun,
        ended,
        Parameters(
            sum(own) * gpt.matrices, sum(own) * gpt.vectors + (ends + held) * gpt.hidden_size
        ),
        BATCH * gpt.tokens,
        HALF * gpt.tokens * place.rows * (sharded or place.is_last),
    )


def _joined(*parts: tuple[Work, int]) -> PassCount:
    """Return the pass that does works one after the other, each so many times."""
    done = tuple((work, times) for work, times in parts if times and work != NO_WORK)
    left = peak = 0
    for work, times in done:
        peak = max(peak, left + max(0, (times - 1) * work.left) + work.peak)
        left += times * work.left
    return PassCount(done, left, peak)


def _around(place: _Place, kind: PassKind, chunk: int) -> tuple[Work, Work]:
    """Return the work of a pass before the layers of a chunk, and behind them."""
    plan = place.plan
    stage = place.rank, chunk
    first, last = stage == plan.stages[0], stage == plan.stages[-1]
    if kind == "F":
        head = _head(place) if last else NO_WORK
        # The words' embeddings go once positions were added and the stage is through.
        words = place.gpt.own * (first and not place.gpt.llama)
        return _embedding(place) if first else NO_WORK, in_order(head, Work((), -words))
    whole = NO_WORK
    if last and not place.treatment.is_sharded and kind == ("W" if plan.split_backward else "B"):
        whole = whole_output_weights(place.gpt, place.rows)
    if kind == "B":
        gone = Work((), -place.gpt.own) if last else NO_WORK
        behind = _embedding_backward(place) if first else NO_WORK
        return _head_backward(place.gpt) if last else NO_WORK, in_order(whole, gone, behind)
    return NO_WORK, whole


def _embedding(place: _Place) -> Work:
    """Return the start of the first stage: looked-up embeddings, with positions and dropout."""
    gpt, whole = place.gpt, not place.treatment.is_sharded
    steps = [*_lookup(gpt), *leaving(gpt), *scattered(gpt)] if whole else []
    if not gpt.llama:
        steps.append(Launch("add", 2 * gpt.own + gpt.own // gpt.micro_batch_size))
    left = gpt.own * (whole + (not gpt.llama)) + gpt.dropout * gpt.own // 2
    return Work((*steps, *dropped(gpt)), left, left + gpt.own)


def _embedding_backward(place: _Place) -> Work:
    gpt, sharded = place.gpt, place.treatment.is_sharded
    sample = gpt.own // gpt.micro_batch_size
    steps = dropped(gpt, backward=True)
    if not gpt.llama:
        elements = gpt.seq_length * gpt.hidden_size
        steps += [Launch("sum", gpt.own + sample), Launch("select_backward", 2 * sample)]
        if gpt.splits_tokens:
            others = HALF * elements - sample
            steps += [Launch("zeros", others), Launch("cat", 2 * HALF * elements)]
        steps.append(Launch("add_", (HALF + 2 * FULL) * elements))
    steps += entering(gpt)
    left = gpt.own * (not gpt.llama) - _embedding(place).left
    if sharded:
        parts = 2 * HALF * gpt.seq_length * gpt.hidden_size
        room = parts if gpt.splits_tokens and not gpt.llama else gpt.own
        return Work(tuple(steps), left + gpt.activation - gpt.own, room)
    return Work((*steps, *_lookup_gradient(gpt)), left, 2 * gpt.activation)


def _lookup(gpt: DenseGpt) -> Steps:
    u, n = gpt.activation, gpt.tokens
    return [
        Launch("masks", MASKS * n),
        Launch("embedding", 2 * u + 8 * n),
        Launch("mul_", 2 * u + n),
    ]


def _lookup_gradient(gpt: DenseGpt) -> Steps:
    u, n = gpt.activation, gpt.tokens
    return [
        Launch("masks", MASKS * n),
        Launch("_to_copy", 3 * u),
        Launch("mul_", 4 * u + n),
        Launch("index_add_", 6 * u + 8 * n),
    ]


def _head(place: _Place) -> Work:
    """Return the end of the last stage: the last norm, and the whole output layer if it is there.

    The layer forms its input gradient at once.
    """
    gpt, u, n = place.gpt, place.gpt.activation, place.gpt.tokens
    normed: Steps = [norm(gpt, 2), *entering(gpt)]
    means = 2 * FULL * gpt.own_tokens
    scattered_own = gpt.own * gpt.splits_tokens
    if place.treatment.is_sharded:
        return Work(tuple(normed), u + means, u + means + scattered_own)
    merged = Launch("merge_input_gradient", 4 * u + (STATISTICS * gpt.tensor + 36) * n)
    steps = [*normed, *_logits(gpt, place.rows), *_exponentials(gpt, place.rows)]
    steps.append(_input_gradient(gpt, place.rows))
    if gpt.tensor > 1:
        steps.append(_gathered_statistics(gpt))
    steps += [merged, *leaving(gpt), *scattered(gpt)]
    return Work(
        tuple(steps), u + gpt.own + means + 2 * STATISTICS * n, 4 * u + means + scattered_own
    )


def _head_backward(gpt: DenseGpt) -> Work:
    """Return the backward of the last norm, whose input goes at the end of the pass."""
    means = 2 * FULL * gpt.own_tokens
    return Work(tuple(norm_backward(gpt, 3)), -means, gpt.own + norm_sums(gpt))


def whole_output_weights(gpt: DenseGpt, rows: int) -> Work:
    """Return the weight gradient of a whole output layer, which ends the backward."""
    left = -gpt.activation - 2 * STATISTICS * gpt.tokens
    return Work(tuple(_weight_gradient(gpt, rows)), left, gpt.activation)


def _logits(gpt: DenseGpt, rows: int) -> Steps:
    """Return the logits of a shard, and their maxima."""
    n = gpt.tokens
    logits, partial = HALF * n * rows, FULL * n * -(-rows // TILE_ROWS)
    return [
        Launch("new_zeros", gpt.activation + STATISTICS * n),
        product("mm", n, rows, gpt.hidden_size),
        Launch("column_maxima", logits + partial + 12 * n),
        Launch("amax", partial + FULL * n),
    ]


def _exponentials(gpt: DenseGpt, rows: int) -> Steps:
    n = gpt.tokens
    logits, partial = HALF * n * rows, FULL * n * -(-rows // TILE_ROWS)
    return [
        Launch("exponentials_", 2 * (logits + partial) + FULL * n),
        Launch("sum", partial + FULL * n),
    ]


def _input_gradient(gpt: DenseGpt, rows: int) -> Launch:
    """Return the product of exponentials and weights, whose result is in fp32."""
    n, h = gpt.tokens, gpt.hidden_size
    size = HALF * rows * (n + h) + FULL * n * h
    return product("mm", n, h, rows)._replace(bytes=size)


def _weight_gradient(gpt: DenseGpt, rows: int) -> Steps:
    u, n = gpt.activation, gpt.tokens
    return [
        Launch("scale_rows", 2 * u + STATISTICS * n),
        product("addmm", rows, gpt.hidden_size, n, adds=True),
        Launch("subtract_targets_", 5 * u + STATISTICS * n),
    ]


def _shard(place: _Place) -> dict[PassKind, Work]:
    """Return the passes of a rank's shards of the vocabulary layers."""
    gpt, rows, treatment = place.gpt, place.rows, place.treatment
    u, n = gpt.activation, gpt.tokens
    early = treatment.gradient_pass == "S"
    logits, exponentials = _logits(gpt, rows), _exponentials(gpt, rows)
    partial = FULL * n * -(-rows // TILE_ROWS)
    late = Launch("input_gradient", 3 * u + 28 * n + HALF * rows * gpt.hidden_size)
    weights, gradient = _weight_gradient(gpt, rows), _input_gradient(gpt, rows)
    passes: dict[PassKind, Work] = {}
    if treatment.maximum_first:
        passes["E"] = Work(tuple(exponentials), 0, partial)
    else:
        logits += exponentials
    left = STATISTICS * n + 2 * u * early
    passes["S"] = Work((*logits, gradient) if early else tuple(logits), left, left + partial)
    steps = weights if early else [gradient, late, *weights]
    # The input goes, on the last rank only where C0 is over; the gradient stays.
    known = 0 if place.is_last and place.plan.ranks > 1 and not treatment.synchronous else u
    left = -2 * STATISTICS * n - known + u * (not early)
    passes["T"] = Work(tuple(steps), left, u if early else 4 * u)
    passes["IF"] = Work(tuple(_lookup(gpt)), u, u)
    passes["IB"] = Work(
        tuple(_lookup_gradient(gpt)), 0 if place.is_first and place.plan.ranks > 1 else -u, 2 * u
    )
    return passes


def _messages(place: _Place) -> tuple[Communications, Communications]:
    """Return the messages between stages: a sender keeps a message until it waits for its end."""
    gpt, plan, rank = place
    begun: Communications = {}
    ended: Communications = {}
    sent = Work((Collective("send", "column", 2, gpt.own),))
    hops = enumerate(pairwise(sender for sender, _ in plan.stages))
    for stage, (before, behind) in hops:
        if before == behind:
            continue
        ways: tuple[tuple[CommKind, int, int, int], ...] = (
            ("X", stage, before, behind),
            ("G", stage + 1, behind, before),
        )
        for kind, source, sender, receiver in ways:
            if rank == sender:
                begun[kind, source] = PassCount.of(sent)
                ended[kind, source] = PassCount.of(Work((), -gpt.own))
            elif rank == receiver:
                begun[kind, source] = PassCount.of(Work((), gpt.own, gpt.own))
                ended[kind, source] = PassCount()
    return begun, ended


def _begun(place: _Place) -> dict[CommKind, Work]:
    """Return the collectives of the vocabulary when they begin."""
    gpt = place.gpt
    summed = gpt.own * (place.is_first and gpt.splits_tokens)
    own = scattered(gpt) if place.is_first else []
    works: dict[CommKind, Work] = {
        "CIF": Work((*own, Begin(_reduced(place, place.is_first))), summed, summed)
    }
    if place.plan.ranks > 1:
        works["C0"] = _broadcast(place, place.is_last)
        works["CIB"] = _broadcast(place, place.is_first)
    for barrier in place.treatment.barriers:
        works[barrier.kind] = _barrier(place, barrier)
    return works


def _ended(place: _Place) -> dict[CommKind, Work]:
    """Return the collectives of the vocabulary when a rank waits for them, and lets go."""
    gpt, u, treatment = place.gpt, place.gpt.activation, place.treatment
    kept = place.is_first and not gpt.splits_tokens
    gone: dict[CommKind, int] = {"CIF": 0 if kept else -u}
    if place.plan.ranks > 1:
        gone["C0"] = -u if place.is_last and not treatment.synchronous else 0
        gone["CIB"] = -u if place.is_first else 0
    for barrier in treatment.barriers:
        alone = barrier.carries == ("gradient",)
        gone[barrier.kind] = -u if alone and (not place.is_last or gpt.splits_tokens) else 0
    return {kind: Work((AWAIT,), left) for kind, left in gone.items()}


def _barrier(place: _Place, barrier: Barrier) -> Work:
    """Return a barrier: what is merged or copied before it, its collectives, and their memory."""
    gpt, ranks = place.gpt, place.plan.ranks
    t, u, n = gpt.tensor, gpt.activation, gpt.tokens
    root = place.is_last
    ordered = scattered(gpt) if root else []
    merged: Steps = [Launch("merge", (44 * t + 60) * n)] if t > 1 else []
    gathered = STATISTICS * n * ranks
    statistics = _lane(
        _gathered_statistics(gpt), Collective("all_gather", "column", ranks, gathered)
    )
    peak = gathered + STATISTICS * n
    match barrier.carries:
        case ("statistics", "gradient"):
            merged.append(Launch("merge_input_gradient", 4 * u + gathered + 36 * n))
            left = STATISTICS * n - 2 * u + gpt.own * root
            begun = Begin((*statistics, *_reduced(place, root)))
            return Work((*merged, *ordered, begun), left, u + peak)
        case ("statistics",):
            merged.append(Launch("merge", peak))
            return Work((*merged, Begin(statistics)), STATISTICS * n, peak)
        case ("gradient",):
            summed = gpt.own * (root and gpt.splits_tokens)
            return Work((*ordered, Begin(_reduced(place, root))), summed, summed)
    size = n * FULL * (3 if barrier.carries == ("sums",) else 1)
    sums = _lane(
        Collective("all_reduce", "tensor", t, size), Collective("all_reduce", "column", ranks, size)
    )
    return Work((Launch("clone", 2 * size), Begin(sums)), size, size)


def _gathered_statistics(gpt: DenseGpt) -> Collective:
    size = STATISTICS * gpt.tokens * gpt.tensor
    return Collective("all_gather", "tensor", gpt.tensor, size)


def _lane(*collectives: Collective) -> tuple[Collective, ...]:
    """Return the collectives of more than one rank."""
    return tuple(each for each in collectives if each.ranks > 1)


def _reduced(place: _Place, is_root: bool) -> tuple[Collective, ...]:
    """Return the sum of an activation over all ranks for those of one pipeline rank."""
    gpt, u, t = place.gpt, place.gpt.activation, place.gpt.tensor
    gathered = [_gathered(gpt)] if is_root and not gpt.splits_tokens else []
    return _lane(
        Collective("reduce_scatter", "tensor", t, u),
        Collective("reduce", "column", place.plan.ranks, u // t),
        *gathered,
    )


def _broadcast(place: _Place, is_root: bool) -> Work:
    """Return the broadcast of an activation from the ranks of one pipeline rank to all."""
    gpt, u = place.gpt, place.gpt.activation
    column = Collective("broadcast", "column", place.plan.ranks, u // gpt.tensor)
    sent = _lane(column) if is_root else _lane(column, _gathered(gpt))
    received = 0 if is_root else u
    return Work((Begin(sent),), received, received)


def _gathered(gpt: DenseGpt) -> Collective:
    return Collective("all_gather", "tensor", gpt.tensor, gpt.activation)
