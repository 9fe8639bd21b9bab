"""The counts of a dense GPT in closed form: the explorer runs in a browser, which has no torch.

Parameters, products, attention and collectives are those of the code, which is counted directly for
all other models (``planning/count``). Activations follow arXiv 2205.05198 (table 2). Other
kernels are a number and a sum of bytes. A test shows how close these counts are to the code's.

If microbatches are cut, their slices are equally long. A slice has its own tokens, and its queries
see the keys of earlier slices too (``seen_keys.py``).

n is the number of tokens, h the hidden size, and u = 2nh the bytes of one activation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from megatron.schedules.needs import CommKind
from megatron.schedules.passes import PassKind
from megatron.schedules.plan import Plan
from megatron.simulator.costs import count
from megatron.simulator.costs.count import FULL, HALF, Launch, PassCount, Work, in_order, product
from megatron.simulator.costs.seen_keys import SeenKeys, others


class DenseGpt(NamedTuple):
    """A GPT or a Llama with separate input and output layers, and one microbatch; no dropout.

    A ``llama`` has RMSNorm, no biases, rotated queries and keys, and an MLP with a gate. The
    vocabulary is padded. If a model ``recomputes``, it keeps only the inputs of its layers.
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


def dense_counts(gpt: DenseGpt, plan: Plan, layers: Sequence[int]) -> list[count.RankCount]:
    """Return every rank's work for one microbatch; ``layers`` is their number in every stage.

    If the plan cuts the microbatch, every slice has a count. Its slices have to be equally long.
    """
    each = [_of_slice(gpt, plan, layers, number) for number in range(plan.slices)]
    if plan.slices == 1:
        return each[0]
    return [
        replace(
            count.RankCount.of_slices([replace(one, parameters=count.Parameters()) for one in own]),
            parameters=own[0].parameters,
        )
        for own in zip(*each, strict=True)
    ]


def _of_slice(
    gpt: DenseGpt, plan: Plan, layers: Sequence[int], number: int
) -> list[count.RankCount]:
    """Return every rank's work for a slice of a microbatch, or for a whole one."""
    n, h = gpt.micro_batch_size * gpt.seq_length // plan.slices, gpt.hidden_size
    u, sharded, found = HALF * n * h, plan.treatment.is_sharded, []
    v = gpt.vocab_size // (plan.ranks if sharded else 1)
    layer, vocabulary = layer_counts(gpt, plan, number), _vocabulary(n, h, v, plan)
    # The final norm keeps its input. Its B has seven small kernels of the loss, which T runs.
    norm = {"F": Work(others(1, 2 * u), u, u), "B": Work(others(4 + 7, 4 * u), -u)}
    ends = [(len(plan.stages) - 1, kind, work) for kind, work in norm.items()]
    ends += [*vocabulary.values()] * (not sharded)
    for rank in range(plan.ranks):
        passes = {(kind, 0): PassCount.of(vocabulary[kind][2]) for kind in plan.treatment.passes}
        first, last = (plan.stages[end][0] == rank for end in (0, -1))
        vectors = v * (2 if sharded else first + last) + (2 - gpt.llama) * last
        positions = gpt.seq_length * (first and not gpt.llama)
        parameters = count.Parameters(positions * h, vectors * h)
        for stage, (owner, chunk) in enumerate(plan.stages):
            if owner == rank:
                parameters = parameters.with_more(layer.parameters, layers[stage])
                for kind, work in layer.passes.items():
                    more = [(own, 1) for at, within, own in ends if (at, within) == (stage, kind)]
                    passes[kind, chunk] = PassCount.joined([(work, layers[stage]), *more])
        comms = list(_comms(n, u, plan, rank))
        begun = {(kind, stage): PassCount.of(work) for kind, stage, work, _ in comms}
        ended = {(kind, stage): PassCount.of(Work(left=-gone)) for kind, stage, _, gone in comms}
        found.append(count.RankCount(passes, begun, ended, parameters))
    return found


def layer_counts(gpt: DenseGpt, plan: Plan, number: int = 0) -> count.Segment:
    """Count a layer. If ``plan`` has no R or no W passes, their work is a part of B.

    Args:
        gpt: the model.
        plan: the passes, and the slices of a microbatch.
        number: the slice.
    """
    h, heads, groups, ffn, s, _, b, llama, recomputes = gpt
    n, plain, split, inner = b * s // plan.slices, not llama, plan.split_backward, ffn * (1 + llama)
    own, keys = HALF * n, h // heads * groups  # bytes of one number for every token
    seen, cut = SeenKeys(number, plan.slices, n, keys), plan.slices > 1
    u, qkv = own * h, h + 2 * keys
    # Queries and keys that are rotated or copied, keys and values that are copied so that nothing
    # keeps the projection, and the numbers that attention keeps of a token.
    grouped = 1 < groups < heads
    turned = h + keys if llama else h * (cut or grouped)
    copies = 0 if cut else int(llama) or 2 * grouped
    attends = h if cut else qkv
    matrices = ((qkv, h), (h, h), (inner, h), (h, ffn))
    vectors = (4 - 2 * llama) * h + plain * (qkv + inner + 2 * h)
    forward = [product(n, wide, k) for wide, k in matrices]
    inputs = [product(n, k, wide) for wide, k in matrices]
    weights = tuple(product(wide, k, n, written=2 * FULL) for wide, k in matrices)
    scores, moved = seen.scores // b * n * h, 2 * u + HALF * (seen.own + seen.earlier)
    attention = Launch("attention", moved, 4 * scores, None, 2 * scores)
    attended = Launch("attention", 2 * moved, 8 * scores, None, 5 * scores)
    width = 6 * h + inner + ffn + 2 * (turned + copies * keys)  # of norms, a sum, the activation
    again = (*forward[:3], *seen.put(), attention, *others(3 + 2 * llama + copies, own * width))
    width = 9 * h + 2 * (inner + qkv + turned) + ffn + plain * (2 * h + qkv)
    backward = (*inputs, attended, *seen.settled(), *others(10 + 8 * plain, own * width))
    factors = own * (5 * h + qkv + inner + ffn)
    stored = own * (5 * h + attends + inner + ffn)
    kept = u if recomputes else stored
    passes: dict[PassKind, Work] = {
        "F": Work(
            (*again, forward[3], *others(1, 3 * u)), kept + seen.taken, kept + seen.taken + 2 * u
        ),
        "R": Work(again * recomputes, stored - kept, stored - kept),
        "B": Work(
            backward,
            split * factors - stored + seen.left,
            max(own * (inner + split * ffn), seen.left),
        ),
        "W": Work(weights, -split * factors),
    }
    if not split:
        passes["B"] = in_order(passes["B"], passes.pop("W"))
    if not plan.recomputes:
        passes["B"] = in_order(passes.pop("R"), passes["B"])
    return count.Segment(passes, count.Parameters(sum(w * k for w, k in matrices), vectors))


def _vocabulary(n: int, h: int, v: int, plan: Plan) -> dict[PassKind, tuple[int, PassKind, Work]]:
    """Return the work of each vocabulary pass, and the stage and pass that do it if it is whole."""
    u, logits, last = HALF * n * h, HALF * n * v, len(plan.stages) - 1
    early, apart = plan.treatment.gradient_pass == "S", plan.treatment.maximum_first
    gradient = (product(n, h, v, written=FULL),)
    exponentials = others(2 + apart, 2 * logits)
    s = (product(v, n, h), *others(4, u + logits), *exponentials * (not apart))
    moved = 7 * u + (not early) * (3 * u + HALF * v * h)
    t = (*gradient * (not early), product(v, h, n, written=2 * FULL), *others(3 - early, moved))
    return {
        "IF": (0, "F", Work(others(9, 4 * u), u, u)),
        "S": (last, "F", Work(s + gradient * early, u * early, 2 * u * early, taken=(logits,))),
        "E": (last, "F", Work(exponentials * apart)),
        "T": (
            last,
            "W" if plan.split_backward else "B",
            Work(t, -u * early, (4 - 3 * early) * u, given=(logits,)),
        ),
        "IB": (0, "B", Work(others(2, 5 * u), -u)),
    }


def _comms(n: int, u: int, plan: Plan, rank: int) -> Iterator[tuple[CommKind, int, Work, int]]:
    """Yield communications of a rank: kind, stage, work, and the bytes freed after the wait."""
    send, receive = (Work((count.Collective("send", "column", 2, u),)), u), (Work((), u, u), 0)
    for stage, (one, other) in enumerate(pairwise(owner for owner, _ in plan.stages)):
        if one != other and rank in (one, other):
            yield "X", stage, *(send if rank == one else receive)
            yield "G", stage + 1, *(send if rank == other else receive)
    collective = partial(count.Collective, axis="column", ranks=plan.ranks)
    moved = {
        "statistics": collective("all_gather", bytes=4 * FULL * n * plan.ranks),
        "maximum": collective("all_reduce", bytes=FULL * n),
        "sums": collective("all_reduce", bytes=3 * FULL * n),
        "gradient": collective("reduce", bytes=u),
        "copy": collective("broadcast", bytes=u),
    }
    carried: dict[CommKind, Sequence[str]] = {"CIF": ["gradient"], "C0": ["copy"], "CIB": ["copy"]}
    carried |= {barrier.kind: barrier.carries for barrier in plan.treatment.barriers}
    for kind, payloads in carried.items() if plan.treatment.is_sharded else ():
        root = plan.stages[0 if kind in ("CIF", "CIB") else -1][0]
        taken, gone = (u * (each in payloads and rank != root) for each in ("copy", "gradient"))
        scaled = others(1, 4 * u) * (len(payloads) > 1)
        begin = count.Begin(tuple(moved[each] for each in payloads))
        yield kind, 0, Work((*scaled, begin), taken, taken), gone
