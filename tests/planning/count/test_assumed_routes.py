"""How many tokens a count assumes at the experts of the busiest rank."""

from dataclasses import replace
from itertools import combinations
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning.count.counting import LLAMA, counted, run_of

from megatron.layers.experts.sinkhorn import ASSUMED_ROUNDS
from megatron.parallel.settings import Dispatcher, ExpertRankSettings
from megatron.planning.count.assumed_routes import assumed_rows, busiest, visitors
from megatron.run.dry_run import DryRunSettings
from megatron.schedules.passes import PassKind
from megatron.simulator.costs.count import HOST_WAIT, Collective, Launch, RankCount

MIXTURE: Final = LLAMA.replaced(
    num_layers=2, num_experts=8, moe_ffn_hidden_size=32, moe_router_topk=2
)
RANKS: Final = 4


@given(st.integers(0, 100), st.integers(1, 6), st.floats(1, 9), st.data())
def test_every_rank_sends_all_its_rows_and_keeps_what_comes_from_itself(
    leaving: int, ranks: int, imbalance: float, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, ranks - 1))
    found = assumed_rows(leaving, rank, ranks, 2, imbalance)
    sent, arriving = found[:ranks], found[ranks:]
    if ranks > 1:
        assert sum(sent) == leaving
    assert arriving == [sent[rank]] * (2 * ranks)
    others = [*sent[:rank], *sent[rank + 1 :]]
    assert all(sent[rank] >= other - 1 for other in others)
    assert busiest(leaving, ranks, imbalance) == sent[rank] <= leaving


def of(dispatcher: Dispatcher, imbalance: float) -> RankCount:
    """Return the count of a rank whose experts are spread over ``RANKS`` replicas."""
    run = run_of(MIXTURE, sizes={"experts": ExpertRankSettings(RANKS, 1, dispatcher)})
    [found] = counted(
        replace(run, dry_run=DryRunSettings(dry_run_expert_imbalance=imbalance)), (2,)
    )
    return found


def exchanged(count: RankCount) -> int:
    """Return the bytes of rows that F exchanges."""
    steps = (step for work, _ in count.passes["F", 0].parts for step in work.steps)
    return sum(s.bytes for s in steps if isinstance(s, Collective) and s.kind == "all_to_all")


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall", "flex"])
def test_the_busiest_rank_multiplies_and_holds_more_by_the_factor(dispatcher: Dispatcher) -> None:
    usual, more = (of(dispatcher, factor) for factor in (1.0, 1.5))
    slots = 2 * MIXTURE.seq_length
    per_slot = 2 * 3 * MIXTURE.hidden_size * 32
    products: dict[PassKind, int] = {"F": 1, "B": 2}
    for kind, times in products.items():
        grown = more.passes[kind, 0].flops - usual.passes[kind, 0].flops
        assert grown == MIXTURE.num_layers * times * per_slot * slots // 2
    assert more.passes["F", 0].left > usual.passes["F", 0].left
    assert more.parameters == usual.parameters


def test_more_rows_take_longer_to_arrive() -> None:
    """Rows of activations go there and back; their weights, in fp32, only there."""
    hidden = 2 * MIXTURE.hidden_size * 2 * MIXTURE.seq_length
    grown = exchanged(of("alltoall", 1.5)) - exchanged(of("alltoall", 1.0))
    weights = 2 * MIXTURE.seq_length * 4
    assert grown == MIXTURE.num_layers * (2 * hidden + weights) // 2


Moved = list[tuple[str, str, int]]
"""Kind, axis and bytes of exchanges."""


def there(width: int, e: int, etp: int, dispatcher: Dispatcher) -> Moved:
    """What brings ``width`` bytes of every rank to the experts, if all ranks have equally many."""
    if dispatcher == "allgather":
        first = "all_gather", "experts", e * width
    else:
        first = "all_to_all", "experts", width
    return [first, ("all_gather", "expert_tensor", etp * first[2])][: 1 + (etp > 1)]


def home(width: int, e: int, etp: int, dispatcher: Dispatcher) -> Moved:
    kinds = {"all_gather": "reduce_scatter", "all_to_all": "all_to_all"}
    forth = there(width, e, etp, dispatcher)
    return [(kinds[kind], axis, size) for kind, axis, size in reversed(forth)]


@pytest.mark.parametrize("etp", [1, 2])
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_bytes_of_every_exchange_are_those_of_the_tokens(dispatcher: Dispatcher, etp: int) -> None:
    """Before tokens leave, ranks tell each other choices (gathering) or numbers of rows, in int64.

    The weights of choices travel in fp32. In the backward nothing has to be told.
    """
    e, choices = RANKS // etp, 2 * MIXTURE.seq_length
    rows = 2 * MIXTURE.hidden_size * (MIXTURE.seq_length if dispatcher == "allgather" else choices)
    told = 8 * (choices if dispatcher == "allgather" else 8)
    layout = e, etp, dispatcher
    wanted: dict[PassKind, Moved] = {
        "F": there(told, *layout) + there(rows, *layout) + there(4 * choices, *layout)
        + home(rows, *layout),
        "B": there(rows, *layout) + home(4 * choices, *layout) + home(rows, *layout),
    }  # fmt: skip
    run = run_of(MIXTURE, sizes={"experts": ExpertRankSettings(e, etp, dispatcher)})
    [found] = counted(replace(run, dry_run=DryRunSettings()), (2,))
    for kind, moved in wanted.items():
        steps = [step for work, _ in found.passes[kind, 0].parts for step in work.steps]
        of_experts = [
            (step.kind, step.axis, step.bytes) for step in steps if isinstance(step, Collective)
        ]
        assert of_experts == MIXTURE.num_layers * moved


@pytest.mark.parametrize("ranks", [1, RANKS])
def test_a_package_that_multiplies_makes_the_host_wait_once_more_in_every_layer(ranks: int) -> None:
    """The kernels need no numbers from the host, and launches are counted as theirs."""
    run = run_of(MIXTURE, sizes={"experts": ExpertRankSettings(ranks, 1, "alltoall")})
    by_package = replace(run, train=replace(run.train, grouped_package="grouped_gemm"))
    own, other = (counted(each, (2,))[0].passes for each in (run, by_package))
    further: dict[PassKind, int] = {"F": MIXTURE.num_layers, "B": 0}
    for kind, waits in further.items():
        steps = [
            [s for work, _ in each[kind, 0].parts for s in work.steps] for each in (own, other)
        ]
        assert steps[1].count(HOST_WAIT) - steps[0].count(HOST_WAIT) == waits
        assert [s for s in steps[1] if s != HOST_WAIT] == [s for s in steps[0] if s != HOST_WAIT]


def test_the_host_waits_for_every_assumed_round_of_sinkhorn() -> None:
    """Beside the waits, rounds are launches; without sinkhorn the host never waits."""
    balanced = MIXTURE.replaced(
        moe_router_topk=1,
        moe_router_load_balancing_type=("sinkhorn",),
        moe_aux_loss_coeff=(0.0,),
    )
    plain = MIXTURE.replaced(moe_router_topk=1, moe_router_score_function="sigmoid")
    steps = {
        model: [
            step
            for work, _ in counted(run_of(model), (2,))[0].passes["F", 0].parts
            for step in work.steps
        ]
        for model in (balanced, plain)
    }
    rounds = ASSUMED_ROUNDS * MIXTURE.num_layers
    assert steps[balanced].count(HOST_WAIT) == rounds
    assert steps[plain].count(HOST_WAIT) == 0
    launches = [sum(isinstance(s, Launch) for s in steps[model]) for model in (balanced, plain)]
    assert launches[0] - launches[1] > 5 * rounds


@given(st.integers(1, 200), st.integers(1, 5), st.integers(1, 4), st.sampled_from([1, 2, 4]))
def test_the_mean_of_visitors_is_that_of_all_choices(
    tokens: int, choices: int, own: int, ranks: int
) -> None:
    experts = own * ranks
    choices = min(choices, experts)
    every = list(combinations(range(experts), choices))
    share = sum(min(chosen) < own for chosen in every) / len(every)  # of the first rank
    assert visitors(tokens, choices, experts, ranks) == pytest.approx(tokens * share, abs=1)
    assert visitors(tokens, choices, experts, ranks, imbalance=100) <= tokens


def test_deep_ep_sends_a_token_once_to_a_rank_and_the_host_waits_once() -> None:
    """Per layer: in F tokens with choices and weights, and sums; in B gradients, twice rows."""
    count, (tokens, hidden) = of("flex", 1.0), (MIXTURE.seq_length, MIXTURE.hidden_size)
    rows = RANKS * visitors(tokens, 2, 8, RANKS)
    row, choices, weights = 2 * hidden * rows, 2 * 8 * rows, 2 * 4 * rows
    wanted: dict[PassKind, tuple[int, list[int]]] = {
        "F": (1, [row + choices + weights, row]),
        "B": (0, [row, row + weights]),
    }
    for kind, (waits, sizes) in wanted.items():
        steps = [s for work, _ in count.passes[kind, 0].parts for s in work.steps]
        sent = [s.bytes for s in steps if isinstance(s, Collective) and s.kind == "all_to_all"]
        assert sent == sizes * MIXTURE.num_layers
        assert steps.count(HOST_WAIT) == waits * MIXTURE.num_layers


def test_with_deep_ep_a_package_that_multiplies_makes_the_host_wait_no_more() -> None:
    run = run_of(MIXTURE, sizes={"experts": ExpertRankSettings(RANKS, 1, "flex")})
    by_package = replace(run, train=replace(run.train, grouped_package="grouped_gemm"))
    own, other = (counted(each, (2,))[0].passes["F", 0].parts for each in (run, by_package))
    assert [work.steps for work, _ in own] == [work.steps for work, _ in other]
