"""Answers to prompts, token by token."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from megatron.inference.sampling import Sampling, choose_tokens
from megatron.parallel import collectives

if TYPE_CHECKING:  # a model reads checkpoints, whose imports training needs only to save
    from megatron.inference.model import InferenceModel, Rows


def generate(
    model: "InferenceModel",
    prompts: Sequence[Sequence[int]],
    how: Sampling,
    most_tokens: int,
    *,
    end: int | None = None,
    cached: bool = True,
    first: int = 0,
) -> Iterator[list[int | None]]:
    """Yield the next token of every prompt. All ranks take equally many steps.

    An answer ends after ``most_tokens`` tokens, or after the token ``end``. Without ``cached`` no
    keys and values are kept, and every step runs all tokens again. ``first`` is the number of the
    first prompt among all prompts, counted from 0: the number of a prompt decides what is drawn.

    Yields:
        A token for each prompt, or ``None`` for a prompt whose answer is complete. The last token
        of an answer may be ``end``.

    Raises:
        ValueError: a prompt is empty, or has a token that is not in the vocabulary.
    """
    check_prompts(prompts, model.config.vocab_size, first)
    longest = max(map(len, prompts))
    padding_b = torch.tensor([longest - len(prompt) for prompt in prompts])
    tokens_bs = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
    rows: Rows | None = None
    gather = partial(collectives.all_gather, axis=model.column)
    new_bs, running = tokens_bs, [True] * len(prompts)
    for step in range(most_tokens):
        if rows is None or not cached:
            rows, new_bs = model.start(padding_b, longest + most_tokens), tokens_bs
        logits_bv = model.logits(model.advance(rows, new_bs)[:, -1])
        chosen_b = choose_tokens(logits_bv, model.first_row, gather, how, step, first).cpu()
        yield [int(token) if on else None for token, on in zip(chosen_b, running, strict=True)]
        running = [on and int(token) != end for token, on in zip(chosen_b, running, strict=True)]
        if not any(running):
            return
        new_bs = chosen_b[:, None]
        tokens_bs = torch.cat((tokens_bs, new_bs), 1)


def answers(steps: Iterator[list[int | None]], count: int) -> list[list[int]]:
    """Return the whole answers to ``count`` prompts."""
    found: list[list[int]] = [[] for _ in range(count)]
    for chosen in steps:
        for answer, token in zip(found, chosen, strict=True):
            if token is not None:
                answer.append(token)
    return found


def check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int, first: int = 0) -> None:
    """Check that a model with a vocabulary can go on from prompts.

    ``first`` is the number of the first prompt among all prompts, counted from 0.

    Raises:
        ValueError: as in ``generate``.
    """
    for number, prompt in enumerate(prompts, first + 1):
        if not prompt:
            raise ValueError(f"prompt {number} has no tokens: a model goes on from at least one")
        wrong = [token for token in prompt if not 0 <= token < vocab_size]
        if wrong:
            raise ValueError(
                f"prompt {number} has the token {wrong[0]}, and the model's vocabulary ends at "
                f"{vocab_size - 1}: give the tokenizer that it was trained with"
            )
