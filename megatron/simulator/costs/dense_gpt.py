"""The counts of a dense GPT in closed form: the explorer runs in a browser, which has no torch.

A rank has whole layers, those of a GPT or of a Llama, without dropout. Of kernels that are neither
a product nor attention only their number and the sum of their bytes count. Activations are those of
table 2 of arXiv 2205.05198 with flash attention. Other models are counted from the code
(``training/planning/count``), and a test holds both equal.

n tokens, h hidden size; u = 2nh bytes is one activation.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from megatron.schedules.needs import CommKind
from megatron.schedules.passes import PassKind
from megatron.schedules.plan import Plan
from megatron.simulator.costs import count
from megatron.simulator.costs.count import FULL, HALF, Launch, PassCount, Work, in_order, product

STATISTICS: Final = 4 * FULL
"""Bytes of a token's maximum, sum of exponentials and target's logit, with one number of room."""

Works = dict[PassKind, Work]


class DenseGpt(NamedTuple):
    """A dense GPT with separate input and output layers, and one microbatch.

    ``ffn_hidden_size`` is the width of each half of an MLP that is gated, as that of a ``llama``
    is, which has RMSNorm, no biases, and rotated queries and keys. The vocabulary is padded. Where
    a model ``recomputes``, the backward computes every layer again.
    """

    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    ffn_hidden_size: int
    seq_length: int
    vocab_size: int
    micro_batch_size: int = 1
    llama: bool = False
    recomputes: bool = False


class _Rank(NamedTuple):
    """A pipeline rank; entries of its vocabulary; whether it has the first and the last stage."""

    gpt: DenseGpt
    plan: Plan
    number: int
    rows: int
    first: bool
    last: bool
    n: int
    u: int


def dense_counts(gpt: DenseGpt, plan: Plan, layers: Sequence[int]) -> list[count.RankCount]:
    """Return the work of every rank of ``plan`` for one microbatch; ``layers`` of every stage."""
    n, layer = gpt.micro_batch_size * gpt.seq_length, layer_counts(gpt, plan)
    sharded = plan.treatment.is_sharded
    rows, u = -(-gpt.vocab_size // (plan.ranks if sharded else 1)), HALF * n * gpt.hidden_size
    found = []
    for number in range(plan.ranks):
        first, last = (plan.stages[stage][0] == number for stage in (0, -1))
        rank = _Rank(gpt, plan, number, rows, first, last, n, u)
        vocabulary = _vocabulary(rank)
        passes = {(kind, 0): PassCount.of(work) for kind, work in vocabulary.items() if sharded}
        vectors = gpt.seq_length * (first and not gpt.llama) + (2 - gpt.llama) * last
        vectors += rows * (2 if sharded else first + last)
        parameters = count.Parameters(0, vectors * gpt.hidden_size)
        for chunk in range(plan.chunks):
            stage = plan.stage_of[number, chunk]
            parameters = parameters.with_more(layer.parameters, layers[stage])
            for kind, work in layer.passes.items():
                ahead, behind = _around(rank, kind, stage, vocabulary)
                parts = (ahead, 1), (work, layers[stage]), (behind, 1)
                passes[kind, chunk] = PassCount.joined([own for own in parts if own[1]])
        comms = list(_communications(rank))
        begun = {comm: PassCount.of(work) for comm, work, _ in comms}
        ended = {comm: PassCount(left=-gone) for comm, _, gone in comms}
        logits = HALF * n * rows * (sharded or last)
        found.append(count.RankCount(passes, begun, ended, parameters, 20 * n, logits))
    return found


def _others(kernels: int, size: int) -> tuple[Launch, ...]:
    """Return so many kernels without products, which move ``size`` bytes together."""
    return (Launch("others", size // kernels),) * kernels


def layer_counts(gpt: DenseGpt, plan: Plan) -> count.Segment:
    """Count a layer, with the passes of ``plan``; B computes again where there is no R."""
    h, heads, groups, ffn, s, _, b, llama, recomputes = gpt
    n, plain, split, inner = b * s, not llama, plan.split_backward, ffn * (1 + llama)
    keys, numbers = h // heads * groups, HALF * n  # bytes of a number of every token
    qkv, grouped = h + 2 * keys, 1 < groups < heads  # queries that do not adjoin are copied
    matrices = ((qkv, h), (h, h), (inner, h), (h, ffn))
    vectors = (4 - 2 * llama) * h + plain * (qkv + inner + 2 * h)
    forward = [product(n, wide, k, bias=plain * wide) for wide, k in matrices]
    inputs = [product(n, k, wide) for wide, k in matrices]
    weights = tuple(product(wide, k, n, written=2 * FULL) for wide, k in matrices)
    scores, sums, moved = n * s * h, FULL * n * heads, numbers * (h + qkv)
    attention = Launch("attention", moved + sums, 4 * scores, None, 2 * scores)
    attended = Launch("attention", 2 * moved + sums, 8 * scores, None, 5 * scores)
    rotated = llama * (h + keys)
    turned = 2 * rotated + llama * 4 * h // heads // b  # with angles in fp32
    # Norms move 2 h and 4 h numbers of a token, the MLP's activation its input and its output.
    width = (6 + 2 * grouped) * h + inner + ffn + turned
    again = (*forward[:3], attention, *_others(3 + 2 * llama + grouped, numbers * width))
    # In the backward a norm moves 4 h, and fp32 sums of its vectors' gradients twice.
    # Queries, keys and values are joined; biases' gradients are sums, the MLP's over 64 tokens.
    width = 8 * h + (1 + plain) * h // 2 + 2 * inner + ffn + 2 * qkv + turned
    width += plain * (2 * h + qkv + inner // 16)
    others = _others(10 + 8 * plain, numbers * width + 10 * vectors)
    factors = numbers * (5 * h + qkv + inner + ffn)
    stored = factors + numbers * (rotated + plain * grouped * h) + STATISTICS * n + sums + 1024
    kept, peak = stored, stored + 2 * numbers * h
    if recomputes:
        kept, peak = numbers * h, numbers * (4 * h + inner + ffn)
    room = numbers * (inner + plain * inner // 32 + split * ffn)  # of the MLP's gradients
    backward = (*inputs, attended, *others, *weights * (not split))
    passes: dict[PassKind, Work] = {
        "F": Work((*again, forward[3], *_others(1, 3 * numbers * h)), kept, peak),
        "B": Work(backward, split * factors - stored, room),
    }
    if split:
        passes["W"] = Work(weights, -factors)
    if recomputes and plan.recomputes:
        passes["R"] = Work(again, stored - kept, stored)
    elif recomputes:
        passes["B"] = in_order(Work(again, stored - kept, stored), passes["B"])
    return count.Segment(passes, count.Parameters(sum(w * k for w, k in matrices), vectors))


def _vocabulary(rank: _Rank) -> dict[PassKind, Work]:
    """Return the passes of the vocabulary layers, of which whole ones are parts of F, B and W."""
    gpt, plan, _, rows, first, last, n, u = rank
    treatment, h, searched = plan.treatment, gpt.hidden_size, 94 * n  # for the shard's tokens
    early, apart = treatment.gradient_pass == "S", treatment.maximum_first
    spread = treatment.is_sharded and plan.ranks > 1
    logits, partial = HALF * n * rows, FULL * n * -(-rows // 512)  # of tiles of 512 entries
    gradient = (product(n, h, rows, written=FULL),)
    late = (*gradient, *_others(1, 3 * u + 28 * n + HALF * rows * h))
    exponentials = _others(2 + apart, 2 * logits + 3 * partial + 8 * n)
    s = (product(rows, n, h), *_others(4, u + logits + 2 * partial + 32 * n))
    s += exponentials * (not apart) + gradient * early
    t = (product(rows, h, n, written=2 * FULL), *_others(9 if last else 2, 7 * u + 32 * n))
    left = STATISTICS * n + 2 * u * early
    gone = 2 * STATISTICS * n + u * (not (last and spread and not treatment.synchronous))  # see C0
    passes: dict[PassKind, Work] = {
        "S": Work(s, left, left + partial),
        "T": Work(t + late * (not early), u * (not early) - gone, (4 - 3 * early) * u),
        "IF": Work(_others(9, 4 * u + searched), u, u),
        "IB": Work(_others(10, 13 * u + searched), -u * (not (first and spread)), 2 * u),
    }
    return passes | ({"E": Work(exponentials, 0, partial)} if apart else {})


def _around(rank: _Rank, kind: PassKind, stage: int, own: Works) -> tuple[Work, Work]:
    """Return what a pass does before the layers of its stage, and behind them."""
    plan, n, u, b = rank.plan, rank.n, rank.u, rank.gpt.micro_batch_size
    first, last = stage == 0, stage == len(plan.stages) - 1
    whole, plain = not plan.treatment.is_sharded, not rank.gpt.llama
    if kind == "F":
        positions = [Work(_others(1, 2 * u + u // b), u, 2 * u)] * plain
        words = [Work((), -u)] * plain  # without positions: they go at the end
        loss = [own["S"], Work(_others(1, 4 * u + 52 * n), STATISTICS * n - u, u)] * whole
        behind = [Work(_others(1, 2 * u), u, u), *loss] * last + words * first
        return in_order(*([own["IF"]] * whole + positions) * first), in_order(*behind)
    weights = [own["T"]] * (last and whole and kind == ("W" if plan.split_backward else "B"))
    if kind != "B":
        return count.NO_WORK, in_order(*weights)
    sums, gone = (1 + plain) * u // 8, Work((), -u)  # of vectors' gradients; the norm's input
    norm = Work(_others(3 + plain, 3 * u + 2 * sums), 0, u + sums)
    positions = [Work(_others(3, u + 8 * u // b), 0, u)] * plain
    behind = weights + [gone] * last + (positions + [own["IB"]] * whole) * first
    return in_order(*[norm] * last), in_order(*behind)


def _communications(rank: _Rank) -> Iterator[tuple[tuple[CommKind, int], Work, int]]:
    """Yield communications: what is done at the begin, and bytes that go when it was waited for."""
    _, plan, own, _, first, last, n, u = rank
    statistics, alone, treatment = STATISTICS * n, plan.ranks == 1, plan.treatment
    message = Work((count.Collective("send", "column", 2, u),)), Work((), u, u)
    for stage, hop in enumerate(pairwise(number for number, _ in plan.stages)):
        if own in hop and hop[0] != hop[1]:
            yield ("X", stage), message[own == hop[1]], u * (own == hop[0])
            yield ("G", stage + 1), message[own == hop[0]], u * (own == hop[1])
    if not treatment.is_sharded:
        return

    def begin(kind: count.CollectiveKind, size: int) -> count.Begin:
        moved = count.Collective(kind, "column", plan.ranks, size)
        return count.Begin(() if alone else (moved,))

    reduced, spread = begin("reduce", u), (begin("broadcast", u),)
    gathered = begin("all_gather", statistics * plan.ranks)
    yield ("CIF", 0), Work((reduced,)), u * (not first)
    if not alone:
        taken, gone = u * (not last), u * (last and not treatment.synchronous)
        yield ("C0", 0), Work(spread, taken, taken), gone
        yield ("CIB", 0), Work(spread, u * (not first), u * (not first)), u * first
    for barrier in treatment.barriers:
        work, gone = Work((reduced,)), u * (not last)
        if "statistics" in barrier.carries:
            gradient, gone = "gradient" in barrier.carries, 0
            merged = statistics * (plan.ranks + 1)
            kernels = _others(1 + alone, merged + gradient * (4 * u + 20 * n))
            left = statistics - gradient * (2 - last) * u
            work = Work((*kernels, gathered, *[reduced] * gradient), left, merged + gradient * u)
        elif barrier.carries != ("gradient",):
            size, gone = FULL * n * (3 if barrier.carries == ("sums",) else 1), 0
            work = Work((*_others(1, 2 * size), begin("all_reduce", size)), size, size)
        yield (barrier.kind, 0), work, gone
