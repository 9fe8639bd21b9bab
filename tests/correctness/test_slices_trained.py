"""Microbatches cut into slices train what one process trains with whole ones.

``test_slice_cover`` has all that goes with slices, in every pair.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from correctness.agreement import check, trained
from correctness.model_kinds import LIKE
from correctness.rank_runs import RankRun, assemble, check_agreement, train_on_rank
from correctness.short_runs import EIGHT_LAYER_GPT, EIGHT_LAYER_LLAMA, Job, Layout
from correctness.test_schedules import evaluated
from correctness.test_tensor_parallel import RECOMPUTED, job_of, name_of
from harness.marks import full
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions
from reference.plain_training import Training

from megatron.layers.slices import SeenKeys, SequenceSlice
from megatron.planning.count import subject
from megatron.runtime import units
from megatron.training import own_tokens

ITERATIONS = 4
SEQUENCE = 16
GPT = replace(EIGHT_LAYER_GPT, num_layers=4, max_position_embeddings=SEQUENCE)
LLAMA = replace(EIGHT_LAYER_LLAMA, num_layers=4, num_query_groups=2, qk_layernorm=True)
WINDOWS = replace(
    LLAMA,
    position_embedding_type="alibi",
    window_size=5,
    window_pattern=(1, 0),
    attn_logit_softcapping=2.0,
    softmax_type="learnable",
)
ALL_PARTS = RECOMPUTED["selective"]

LAYOUTS = [
    (Layout(2, "vocab-2", "zb-v", slices=4, recomputation=ALL_PARTS), WINDOWS, 1),
    (Layout(2, "none", "interleaved", slices=2, tensor=2, sequence=True), GPT, 2),
    (
        Layout(
            2,
            "vocab-1",
            slices=8,
            replicas=2,
            sharded=True,
            overlap=True,
            recomputation=RECOMPUTED["full"],
            recompute_ahead=1,
        ),
        LLAMA,
        1,
    ),
    (Layout(2, "vocab-2", "zb-v", slices=4, context=2, recomputation=ALL_PARTS), WINDOWS, 1),
    full(Layout(1, "none", slices=2, context=4), LLAMA, 2),
]


def job(options: GPTOptions, samples: int, iterations: int) -> Job:
    """Eight microbatches, of which every second has none that counts."""
    return replace(job_of(options, samples, iterations), sequence=SEQUENCE)


@pytest.mark.parametrize(("layout", "options", "samples"), LAYOUTS, ids=name_of)
def test_slices_train_what_one_process_trains(
    layout: Layout,
    options: GPTOptions,
    samples: int,
    ranks: RankPool,
    alone: Callable[[Job], Training],
) -> None:
    """An evaluation finds the loss of the weights."""
    own = job(options, samples, ITERATIONS)
    by_rank = trained(ranks, own, layout)
    check(by_rank, alone(own))
    final = assemble([own.final for own in by_rank])
    assert by_rank[0].evaluations == pytest.approx([evaluated(own, final)], rel=1e-5)


@pytest.mark.parametrize("kind", [name if name == "gpt-oss" else full(name) for name in LIKE])
def test_kinds_of_layers_are_sliced(
    kind: str, ranks: RankPool, alone: Callable[[Job], Training]
) -> None:
    layout = Layout(2, "vocab-2", "zb-h1", slices=4, tensor=2, sequence=True)
    sizes = {"num_layers": 4, "vocab_size": 37, "max_position_embeddings": SEQUENCE}
    own = job(GPTOptions(**{**sizes, **LIKE[kind]}), 2, 2)
    own = replace(own, microbatches=4, masked_out=(1, 3))
    by_rank = ranks.run(
        train_on_rank, layout.world_size, config=own.config(layout), batches=own.batches()
    )
    check_agreement(by_rank)
    check(by_rank, alone(own))


def with_lengths(
    rank: int, world_size: int, *, lengths: tuple[int, ...], **arguments: Any
) -> RankRun:
    """Train with slices of given lengths; ``balanced`` ones are longer than these samples."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (own_tokens, subject):  # what a rank keeps, and what it counts
            patch.setattr(module, "lengths_of_slices", lambda *_: lengths)
        return train_on_rank(rank, world_size, **arguments)


def test_slices_may_have_other_lengths(ranks: RankPool, alone: Callable[[Job], Training]) -> None:
    layout = Layout(2, "vocab-1", "zb-h1", slices=3, tensor=2, sequence=True)
    own = job(LLAMA, 2, 2)
    by_rank = ranks.run(
        with_lengths, 4, config=own.config(layout), batches=own.batches(), lengths=(8, 6, 2)
    )
    check_agreement(by_rank)
    check(by_rank, alone(own))


def test_evaluations_and_hidden_dropout_are_those_of_whole_microbatches(ranks: RankPool) -> None:
    """Attention drops by slices, so here it drops nothing."""
    own = replace(job(GPT, 2, 2), microbatches=3, masked_out=(), dropout=0.3)
    losses = []
    for layout in (
        Layout(1, "none"),
        Layout(1, "none", tensor=2, sequence=True, slices=4, context=2),
    ):
        config = own.config(layout)
        by_rank: list[RankRun] = ranks.run(
            train_on_rank,
            layout.world_size,
            config=replace(config, model=config.model.replaced(attention_dropout=0.0)),
            batches=own.batches(),
            evaluation_batches=own.batches(seed=1),
            evaluate_after=(1,),
        )
        losses.append((*by_rank[0].losses, *by_rank[0].evaluations))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.full
def test_dropout_of_attention_is_drawn_again_when_it_is_computed_again(ranks: RankPool) -> None:
    own, losses = replace(job(GPT, 2, 3), dropout=0.3), []
    for recomputed in ("none", "selective", "full"):
        layout = Layout(2, "vocab-2", slices=4, recomputation=RECOMPUTED[recomputed])
        by_rank = ranks.run(train_on_rank, 2, config=own.config(layout), batches=own.batches())
        losses.append(by_rank[0].losses)
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.full
def test_steps_validated_later_change_no_bit(ranks: RankPool) -> None:
    """With clipping at work, so that some guesses are wrong, and passes without values run."""
    own, layout, found = job(GPT, 1, 6), Layout(2, "vocab-2", "zb-v", slices=4), []
    for guess in (False, True):
        config = own.config(layout)
        optimizer = replace(config.optimizer, post_validation=guess)
        by_rank = ranks.run(
            train_on_rank, 2, config=replace(config, optimizer=optimizer), batches=own.batches()
        )
        check_agreement(by_rank)
        found.append((by_rank[0], assemble([own.final for own in by_rank])))
    (waited, one), (guessed, another) = found
    assert any(norm > own.adamw.clip_grad for norm in waited.gradient_norms)
    assert guessed.losses == waited.losses
    assert guessed.gradient_norms == waited.gradient_norms
    assert all(torch.equal(another[name], one[name]) for name in one)


FAULTS = [
    "a slice reads keys of a later one",
    "one slice leaves no gradients of keys",
    full("gradients that were left are not fetched"),
    full("positions from 0 on"),
]


def with_fault(rank: int, world_size: int, *, fault: str, **arguments: Any) -> RankRun:
    """Train with something broken on purpose."""
    extend, settle, unit = SeenKeys.extend, SeenKeys.settle, units._unit

    def look_ahead(
        self: SeenKeys, layer: int, part: SequenceSlice, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Let slice 1 of 4 see the keys of slice 2 in the place of its own."""
        seen = extend(self, layer, part, k, v)
        if part.first != 4:
            return seen
        later = self._both_2bsgd[layer].data[:, :, 8:12].nan_to_num().clamp(-1, 1)
        return torch.cat((seen[:, :, :4], later), 2)

    def forgetful(
        self: SeenKeys, layer: int, part: SequenceSlice, grads: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        k_grad, v_grad = grads
        if fault == "one slice leaves no gradients of keys" and part.first == 8:
            k_grad = torch.cat((torch.zeros_like(k_grad[:, :8]), k_grad[:, 8:]), 1)
        if fault == "gradients that were left are not fetched":
            self._left_2bsgd.clear()
        return settle(self, layer, part, (k_grad, v_grad))

    with pytest.MonkeyPatch.context() as patch:
        if fault == "a slice reads keys of a later one":
            patch.setattr(SeenKeys, "extend", look_ahead)
        elif fault == "positions from 0 on":
            patch.setattr(units, "_unit", lambda *own: replace(unit(*own), positions_bs=None))
        else:
            patch.setattr(SeenKeys, "settle", forgetful)
        return train_on_rank(rank, world_size, **arguments)


@pytest.mark.parametrize("fault", FAULTS)
def test_injected_faults_are_found(
    fault: str, ranks: RankPool, alone: Callable[[Job], Training]
) -> None:
    layout, own = Layout(1, "none", slices=4), job(GPT, 2, ITERATIONS)
    expected = alone(own)
    by_rank = ranks.run(
        with_fault, 1, config=own.config(layout), batches=own.batches(), fault=fault
    )
    with pytest.raises(AssertionError):
        check(by_rank, expected)
