"""Documents kept apart in a sample train as if each were a sample of its own.

The reference runs the plain GPT on every document by itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from correctness.model_kinds import LIKE
from correctness.rank_runs import (
    CPU,
    assemble,
    connected,
    factor,
    gradient_pieces,
    parameter_values,
    pieces,
)
from correctness.short_runs import Job, Layout
from harness.marks import full
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions, Parameters, logits
from reference.plain_loss import token_losses

from megatron.data.microbatch import Microbatch, document_starts
from megatron.layers.recompute import PARTS, Recomputation
from megatron.run.run_config import RunConfig
from megatron.runtime.batch import to_device
from megatron.training.own_tokens import kept_tokens
from megatron.training.setup import build_train_state

EOD = 3
POSITIONS = "embedding.position_embeddings.weight"
GPT = GPTOptions(num_layers=4, vocab_size=37)
LLAMA = GPTOptions(**{"num_layers": 4, "vocab_size": 37, **LIKE["mistral"], "window_size": None})
WINDOWS = replace(LLAMA, window_size=3, window_pattern=(1, 0), attn_logit_softcapping=1.5)
BLOOM = GPTOptions(**{"num_layers": 4, "vocab_size": 37, **LIKE["bloom"]})
ATTENTION, BOTH = ("attention",), ("attention", "positions")


def job_of(options: GPTOptions) -> Job:
    return Job(options, micro_batch_size=2, microbatches=4, iterations=1, sequence=12)


def batch_of(job: Job, resets: Sequence[str]) -> list[Microbatch]:
    """Samples of a few documents; one begins with an end, one has two ends in a row and at the end.

    The loss of ends is masked, as by --eod-mask-loss.
    """
    batch = []
    for number, drawn in enumerate(job.batches()[0]):
        stream = torch.cat((drawn.tokens, drawn.labels[:, -1:]), 1)
        stream[stream == EOD] = EOD + 1
        stream[0, [4 + number, 9]] = EOD
        if number == 1:
            stream[1, [0, 6, 7, 11]] = EOD
        tokens, labels = stream[:, :-1].contiguous(), stream[:, 1:].contiguous()
        starts = document_starts(tokens, EOD)
        batch.append(
            Microbatch(
                tokens,
                labels,
                (tokens != EOD).float(),
                starts if "attention" in resets else None,
                torch.arange(job.sequence) - starts if "positions" in resets else None,
            )
        )
    return batch


def documents_of(microbatch: Microbatch) -> Iterator[tuple[int, slice]]:
    """Sample and place of every document, told from the tokens."""
    for sample, row in enumerate(microbatch.tokens.tolist()):
        begin = 0
        for place, token in enumerate(row):
            if token == EOD or place == len(row) - 1:
                yield sample, slice(begin, place + 1)
                begin = place + 1


def expected(
    parameters: Parameters, batch: Sequence[Microbatch], options: GPTOptions, resets: Sequence[str]
) -> tuple[float, Parameters]:
    """Loss and gradients of the plain GPT on one document after the other."""
    leaves = {name: value.double().requires_grad_() for name, value in parameters.items()}
    valid = sum(float(m.loss_mask.sum()) for m in batch)
    total = torch.zeros((), dtype=torch.float64)
    for microbatch in batch:
        for sample, place in documents_of(microbatch):
            own = dict(leaves)
            if POSITIONS in own and "positions" not in resets:
                own[POSITIONS] = own[POSITIONS][place]
            tokens, labels, mask = (
                t[sample : sample + 1, place]
                for t in (microbatch.tokens, microbatch.labels, microbatch.loss_mask)
            )
            losses = token_losses(logits(own, tokens, options), labels, options)
            total = total + (losses * mask).sum() / valid
    gradients = torch.autograd.grad(total, list(leaves.values()))
    return float(total.detach()), dict(zip(leaves, gradients, strict=True))


def on_rank(
    rank: int, world_size: int, *, config: RunConfig, batch: Sequence[Microbatch]
) -> tuple[float, Any, Any, float]:
    """Loss and gradients of a batch, the initial weights, and the loss that an evaluation finds."""
    groups = connected(config)
    state = build_train_state(config, groups)
    initial = pieces(state, parameter_values)
    (number, replicas), kept = groups.replica, kept_tokens(config, groups.context.rank)
    share = [microbatch.part(kept) for microbatch in batch[number::replicas]]
    on_device = to_device(share, CPU, replicas=groups.data.size)
    loss = state.pipeline.train(on_device, 0)
    assert loss is not None
    whole = to_device(batch, CPU)
    gradients = gradient_pieces(state, whole)
    losses = torch.cat((loss, state.pipeline.evaluate(on_device))).double() * factor(whole)
    groups.world.all_reduce(losses)
    state.pipeline.close()
    trained, evaluated = losses.tolist()
    return trained, gradients, initial, evaluated


FULL = Recomputation(group=1)
CASES = [
    (Layout(1, "none"), GPT, BOTH),
    full((Layout(1, "none"), WINDOWS, BOTH)),
    full((Layout(2, "none"), GPT, ATTENTION)),
    (Layout(2, "vocab-2", "zb-v"), LLAMA, BOTH),
    full((Layout(2, "none", "zb-v", recomputation=FULL), GPT, BOTH)),
    full((Layout(2, "vocab-2", "interleaved", recomputation=FULL), WINDOWS, BOTH)),
    (Layout(2, "vocab-2", recomputation=Recomputation(parts=frozenset(PARTS))), LLAMA, ATTENTION),
    full((Layout(1, "none", tensor=2, sequence=True), GPT, BOTH)),
    full((Layout(2, "vocab-2", tensor=2, sequence=True), LLAMA, BOTH)),
    full((Layout(2, "none", "zb-v", tensor=2, sequence=True), GPT, BOTH)),
    (Layout(2, "vocab-2", "zb-v", replicas=2), WINDOWS, ATTENTION),
    full((Layout(2, "none", replicas=2, sharded=True, overlap=True), GPT, BOTH)),
    (Layout(2, "vocab-2"), BLOOM, ATTENTION),
    (Layout(1, "none", tensor=2, sequence=True, context=2), GPT, BOTH),
    full((Layout(2, "vocab-2", "zb-v", context=2, recomputation=FULL), WINDOWS, ATTENTION)),
    (Layout(2, "none", context=2, exchange="p2p"), BLOOM, ATTENTION),
    full((Layout(1, "none", context=3, exchange="p2p"), WINDOWS, BOTH)),
    full((Layout(1, "none", tensor=2, sequence=True, context=2, exchange="p2p"), LLAMA, BOTH)),
    (Layout(2, "vocab-2", slices=3, recomputation=FULL), WINDOWS, BOTH),
    full((Layout(2, "none", "zb-v", tensor=2, sequence=True, slices=2), GPT, ATTENTION)),
    full((Layout(2, "vocab-1", "interleaved", slices=4), BLOOM, ATTENTION)),
    full((Layout(1, "none", context=2, slices=3), WINDOWS, BOTH)),
    full((Layout(2, "vocab-2", context=2, slices=3, exchange="a2a"), LLAMA, BOTH)),
]


def name_of(case: tuple[Layout, GPTOptions, tuple[str, ...]]) -> str:
    layout, options, resets = case
    model = {id(GPT): "gpt", id(LLAMA): "llama", id(WINDOWS): "windows", id(BLOOM): "bloom"}
    return f"{layout}-{model[id(options)]}-{'-'.join(resets)}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_documents_train_as_samples_of_their_own(
    case: tuple[Layout, GPTOptions, tuple[str, ...]], ranks: RankPool
) -> None:
    layout, options, resets = case
    job = job_of(options)
    batch = batch_of(job, resets)
    results = ranks.run(on_rank, layout.world_size, config=job.config(layout), batch=batch)
    parameters = assemble([initial for _, _, initial, _ in results])
    loss, gradients = expected(parameters, batch, options, resets)
    for trained, _, _, evaluated in results:
        assert trained == pytest.approx(loss, rel=1e-5)
        assert evaluated == pytest.approx(loss, rel=1e-5)
    own = assemble([held for _, held, _, _ in results])
    assert own.keys() == gradients.keys()
    for name, value in gradients.items():
        assert float((own[name].double() - value).norm()) < 1e-5 * float(value.norm()), name


def test_positions_begin_anew_in_a_sample_that_is_seen_whole(ranks: RankPool) -> None:
    """Without --reset-attention-mask documents see each other, as in Megatron-LM."""
    job = job_of(GPT)
    batch = batch_of(job, ("positions",))
    layout = Layout(2, "vocab-2", tensor=2, sequence=True)
    results = ranks.run(on_rank, layout.world_size, config=job.config(layout), batch=batch)
    initial = assemble([initial for _, _, initial, _ in results])
    leaves = {name: value.double().requires_grad_() for name, value in initial.items()}
    valid = sum(float(m.loss_mask.sum()) for m in batch)
    loss = torch.zeros((), dtype=torch.float64)
    for m in batch:
        assert m.positions is not None
        for sample in range(len(m.tokens)):
            own = leaves | {POSITIONS: leaves[POSITIONS][m.positions[sample]]}
            one = slice(sample, sample + 1)
            losses = token_losses(logits(own, m.tokens[one], GPT), m.labels[one], GPT)
            loss = loss + (losses * m.loss_mask[one]).sum() / valid
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    assert results[0][0] == pytest.approx(float(loss.detach()), rel=1e-5)
    own = assemble([held for _, held, _, _ in results])
    for name, value in zip(leaves, gradients, strict=True):
        assert float((own[name].double() - value).norm()) < 1e-5 * float(value.norm()), name
