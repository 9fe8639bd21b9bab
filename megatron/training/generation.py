"""Text that the model writes between iterations of training, in any layout.

Every new token costs a forward of the rows so far, through the passes of an evaluation. So nothing
of training is different here: no keys are kept, no rank has more of the model than in training, and
a token is chosen over the shards of the output layer where they are.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from megatron.inference.generate import answers
from megatron.inference.sampling import Sampling, choose_tokens
from megatron.parallel import collectives
from megatron.run.generate import GenerateSettings
from megatron.runtime.token_rows import TokenRows, row_length
from megatron.training.metrics.log import Log
from megatron.training.metrics.meter import Meter
from megatron.training.metrics.records import Generated, GeneratedText, now
from megatron.training.open_prompts import Prompts
from megatron.training.setup import TrainState

MOST_SHORT_ROWS: Final = 64
"""Rows shorter than samples that run at once.

A row's next token is chosen from logits in fp32, with noise or the candidates of all ranks beside
them: several numbers for every entry of the vocabulary. A microbatch of long samples has the tokens
of thousands of short rows, and memory was planned for training.
"""


@dataclass(frozen=True)
class Generation:
    """Writes texts, and records them; all ranks call every method alike, between iterations.

    Attributes:
        config: which texts, and when.
        prompts: from which texts go on; ``None``: there are no texts.
        seed: of what is drawn. Every time the same is drawn, so only the weights change a text.
        state: with weights that are final.
        micro_batch_size: samples of a microbatch, b.
        meter: in it, the time of texts counts for no iteration.
        log: gets the records.
    """

    config: GenerateSettings
    prompts: Prompts | None
    seed: int
    state: TrainState
    micro_batch_size: int
    meter: Meter
    log: Log

    def is_due(self, iteration: int) -> bool:
        """Whether there are texts after ``iteration``, counted from 0."""
        interval = self.config.generate_interval
        return interval is not None and self.prompts is not None and (iteration + 1) % interval == 0

    def after(self, iteration: int, consumed_samples: int) -> None:
        """Write texts after ``iteration``, counted from 0; its step must be final."""
        assert self.prompts is not None, "texts go on from prompts"
        own, started = self.config, time.perf_counter()
        how = Sampling(own.generate_temperature, own.generate_top_k, own.generate_top_p, self.seed)
        with self.meter.paused():
            found = continued(
                self.state,
                self.prompts.tokens,
                how,
                own.generate_max_new_tokens,
                self.prompts.words.end,
                self.micro_batch_size,
            )
        words = self.prompts.words
        texts = tuple(
            GeneratedText(prompt, words.text(answer), tuple(answer))
            for prompt, answer in zip(self.prompts.texts, found, strict=True)
        )
        seconds = time.perf_counter() - started
        self.log.write(Generated(now(), iteration + 1, consumed_samples, seconds, texts))


def continued(
    state: TrainState,
    prompts: Sequence[Sequence[int]],
    how: Sampling,
    most_tokens: int,
    end: int | None,
    micro_batch_size: int,
) -> list[list[int]]:
    """Return the tokens with which the model goes on from prompts, the same on every rank.

    Args:
        state: of this rank.
        prompts: their tokens; each has room for ``most_tokens`` more in a sample.
        how: rule by which tokens are chosen.
        most_tokens: tokens of an answer.
        end: token that ends an answer; ``None``: no token does.
        micro_batch_size: samples of a microbatch in training.
    """
    pipeline, most = state.pipeline, state.pipeline.model.config.seq_length
    longest = max(map(len, prompts)) + most_tokens
    length = row_length(pipeline.model, pipeline.train_program.plan.slices, longest)
    at_once = rows_at_once(len(prompts), length, micro_batch_size, most)
    rows, found = pipeline.token_rows(at_once, length), list[list[int]]()
    for first in range(0, len(prompts), at_once):
        own = prompts[first : first + at_once]
        steps = _steps(state, rows, own, first, how, most_tokens, end)
        found += answers(steps, len(own))
    return found


def rows_at_once(prompts: int, length: int, micro_batch_size: int, seq_length: int) -> int:
    """Return how many rows of ``length`` tokens run at once: no more tokens than a microbatch has.

    Rows as long as samples are as many as samples: products in 8 bits take such a microbatch.
    """
    if length == seq_length:
        return micro_batch_size
    return min(micro_batch_size * seq_length // length, prompts, MOST_SHORT_ROWS)


def _steps(
    state: TrainState,
    rows: TokenRows,
    prompts: Sequence[Sequence[int]],
    first: int,
    how: Sampling,
    most_tokens: int,
    end: int | None,
) -> Iterator[list[int | None]]:
    """Yield the next token of every prompt, as ``inference.generate`` does.

    There are no more prompts than rows, and prompt number ``first`` is the first of them.
    """
    tokens_bs = torch.zeros(rows.samples, rows.length, dtype=torch.int64)
    last_b = torch.zeros(rows.samples, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens_bs[row, : len(prompt)] = torch.tensor(prompt)
        last_b[row] = len(prompt) - 1
    running = [True] * len(prompts)
    for step in range(most_tokens):
        outputs_bh = rows.outputs(tokens_bs, last_b)
        own_bh = None if outputs_bh is None else outputs_bh[: len(prompts)]
        chosen_b = _chosen(state, own_bh, len(prompts), how, step, first)
        chosen = chosen_b.tolist()
        yield [token if on else None for token, on in zip(chosen, running, strict=True)]
        running = [on and token != end for token, on in zip(chosen, running, strict=True)]
        if step + 1 == most_tokens or not any(running):
            return
        last_b[: len(prompts)] += 1
        tokens_bs[torch.arange(len(prompts)), last_b[: len(prompts)]] = chosen_b.cpu()


def _chosen(
    state: TrainState, x_bh: Tensor | None, count: int, how: Sampling, step: int, first: int
) -> Tensor:
    """Return the next token of every row, int64 [b], the same on every rank.

    Every rank takes the tokens of one rank. If two replicas round differently, their tokens must
    not differ: then one of them could stop while the other waits.

    Args:
        state: of this rank.
        x_bh: input of the output layer, on ranks that have a part of the layer.
        count: rows b.
        how: rule of the choice.
        step: number of tokens that were chosen before in each row.
        first: number of the prompt of the first row.
    """
    groups, plan = state.groups, state.plan
    layer = state.pipeline.model.output_layer
    if x_bh is None or layer is None:
        chosen_b = torch.empty(count, dtype=torch.int64, device=groups.device)
    else:

        def gather(own: Tensor) -> Tensor:
            of_row = collectives.all_gather(own, groups.tensor_sums)
            if not plan.treatment.is_sharded:
                return of_row
            return collectives.all_gather(of_row, groups.pipeline).flatten(0, 1)

        chosen_b = choose_tokens(
            layer.logits(x_bh), layer.shard.first_row, gather, how, step, first
        )
    root = groups.grid.axis("pipeline", 0).ranks[plan.stages[-1][0]]
    return collectives.broadcast(chosen_b, root, groups.world)
