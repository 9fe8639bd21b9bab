"""A trained model for lm-evaluation-harness (the package ``lm_eval``, an extra).

Import this module to register the model ``vocab-parallel``. Under torchrun every rank is given all
requests, and all ranks together answer each request. The harness takes them for one process.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from megatron.checkpoint.choose import choose, read_model
from megatron.data.tokenizers.settings import TokenizerSettings
from megatron.inference.generate import generate
from megatron.inference.model import InferenceModel, connected
from megatron.inference.sampling import Sampling
from megatron.inference.score import Scored, score, windows
from megatron.inference.words import Words
from megatron.parallel.environment import launched


class Request(Protocol):
    """One question of a task.

    ``args`` are the arguments of the method that answers the question.
    """

    args: tuple[Any, ...]


@register_model("vocab-parallel")
class VocabParallelLM(LM):  # type: ignore[misc] # the harness has no types here
    """The model of a checkpoint.

    Args:
        checkpoints: folder of checkpoints, as ``--save`` writes it.
        tokenizer_type: as in training; ``None``: the tokenizer that the checkpoint remembers, and
            without one, texts are token ids with blanks between them.
        tokenizer_model: as in training.
        vocab_size: as in training.
        ids: whether texts are token ids, whatever the checkpoint remembers.
        step: iteration of the checkpoint; ``None``: the last.
        max_length: tokens of a row; ``None``: as in training.
        dtype: ``float32`` or ``bfloat16``.
        **_: further arguments of the harness, such as the size of batches; they have no effect.

    Raises:
        ValueError: a ``tokenizer_model`` without a ``tokenizer_type``.
    """

    def __init__(
        self,
        checkpoints: str,
        tokenizer_type: str | None = None,
        tokenizer_model: str | None = None,
        vocab_size: int | None = None,
        ids: bool = False,
        step: int | None = None,
        max_length: int | None = None,
        dtype: str = "float32",
        **_: Any,
    ) -> None:
        super().__init__()
        if tokenizer_model is not None and tokenizer_type is None:
            raise ValueError(
                f"tokenizer_model={tokenizer_model} has no effect without tokenizer_type: give "
                "both, or neither for the checkpoint's own tokenizer"
            )
        where = choose(Path(checkpoints), step, checked=False)
        config = read_model(where)
        self.max_length = max_length or config.seq_length
        entries, place = config.vocab_size, launched()
        model = None if tokenizer_model is None else Path(tokenizer_model)
        named = TokenizerSettings(tokenizer_type, model, vocab_size=vocab_size)
        speak = place.rank == 0
        found = None if ids else Words.of_checkpoint(where, named, None, entries, speak=speak)
        self._words = found or Words.ids(entries - 1)
        groups = connected(place)
        self._model = InferenceModel(where, groups, getattr(torch, dtype), self.max_length + 1)

    def loglikelihood(self, requests: Sequence[Request]) -> list[tuple[float, bool]]:
        """Return each continuation's log-probability after its context, and whether it is greedy.

        A continuation is greedy if each of its tokens is the likeliest one.
        """
        return [self._continuation(*request.args) for request in requests]

    def _continuation(self, context: str, continuation: str) -> tuple[float, bool]:
        before = self._words.tokens(context) or [self._words.tokenizer.eod]
        both = self._words.tokens(context + continuation) if context else []
        wanted = self._words.tokens(continuation)
        if both[: len(before)] == before and len(both) > len(before):
            wanted = both[len(before) :]  # the tokens of the continuation behind its context
        found = self._scored([*before, *wanted][-(self.max_length + 1) :], len(wanted))
        return found.total, all(found.likeliest)

    def _scored(self, row: list[int], count: int) -> Scored:
        if not 0 < count < len(row):
            raise ValueError(
                f"a continuation of {count} tokens, and max_length is {self.max_length}: give more"
            )
        return score(self._model, row, count)

    def loglikelihood_rolling(self, requests: Sequence[Request]) -> list[float]:
        """Return the log-probability of each text, as a document that follows another document."""
        return [self._rolling(request.args[0]) for request in requests]

    def _rolling(self, text: str) -> float:
        tokens = [self._words.tokenizer.eod, *self._words.tokens(text)]
        rows = windows(tokens, self.max_length + 1, self.max_length)
        return sum(self._scored(row, count).total for row, count in rows)

    def generate_until(self, requests: Sequence[Request]) -> list[str]:
        """Return for each (context, options) the answer up to the first stop word.

        The number of a request decides what is drawn, so repeated requests have other answers.
        """
        return [self._answer(number, *request.args) for number, request in enumerate(requests)]

    def _answer(self, number: int, context: str, options: dict[str, Any]) -> str:
        stops = options.get("until") or []
        stops = [stops] if isinstance(stops, str) else stops
        most = min(int(options.get("max_gen_toks", 256)), self.max_length - 1)
        prompt = self._words.tokens(context) or [self._words.tokenizer.eod]
        how = Sampling(float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0)
        found: list[int] = []
        text = ""
        context_tokens = prompt[-(self.max_length - most) :]
        rest = generate(self._model, [context_tokens], how, most, end=self._words.end, first=number)
        for [token] in rest:
            assert token is not None, "the only answer is not complete"
            found.append(token)
            text = self._words.text(found)
            if any(stop in text for stop in stops):
                break  # all ranks stop here, because all see the same text
        return min((text.split(stop)[0] for stop in stops), key=len, default=text)
