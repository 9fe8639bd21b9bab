"""The adapter answers lm-evaluation-harness's three kinds of requests."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the reference: pip install transformers")

import transformers
from harness.small_vocabularies import hugging_face_folder
from inference.imported import imported

from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.settings import TokenizerSettings
from tools.conversions_table import random_model, random_model_of, their_logits

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers are none of ours


ADAPTER = "megatron.inference.harness"


class StubLM:
    """What the adapter takes of ``lm_eval.api.model.LM``."""


def register_model(*names: str) -> Callable[[Any], Any]:
    """Note the names of a model, as the registry of the harness does."""

    def note(model: Any) -> Any:
        model.names = names
        return model

    return note


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The adapter, over a stand-in for the harness's base class."""
    for name, content in (
        ("lm_eval", {}),
        ("lm_eval.api", {}),
        ("lm_eval.api.model", {"LM": StubLM}),
        ("lm_eval.api.registry", {"register_model": register_model}),
    ):
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules.pop(ADAPTER, None)
    yield importlib.import_module(ADAPTER).VocabParallelLM
    del sys.modules[ADAPTER]


def request(*args: Any) -> SimpleNamespace:
    """A request as a task makes it."""
    return SimpleNamespace(args=args)


def test_it_answers_as_the_model_does(adapter: Any, tmp_path: Path) -> None:
    assert adapter.names == ("vocab-parallel",)
    theirs = random_model("qwen 3")
    where = imported(theirs, tmp_path)
    model = adapter(str(where.parent), max_length=24, batch_size=1, device=None)
    context, choices = [5, 17, 33, 8], [[90, 41], [3], [64, 12, 7]]
    words = [" ".join(map(str, tokens)) for tokens in (context, *choices)]
    wanted = []
    for choice in choices:
        row = torch.tensor([[*context, *choice]])
        log_sv = their_logits(theirs, row)[0].double().log_softmax(-1)[len(context) - 1 : -1]
        wanted.append(float(log_sv.gather(1, torch.tensor(choice)[:, None]).sum()))
    requests = [request(words[0], f" {choice}") for choice in words[1:]]
    found = model.loglikelihood(requests)
    assert [total for total, _ in found] == pytest.approx(wanted, abs=1e-3)
    assert [greedy for _, greedy in found] == [False] * len(choices)

    [answer] = model.generate_until([request(words[0], {"until": ["xyz"], "max_gen_toks": 5})])
    tokens = [int(word) for word in answer.split()]
    assert len(tokens) == 5
    [(_, greedy)] = model.loglikelihood([request(words[0], f" {answer}")])
    assert greedy, "what it says is what it finds likeliest"

    draws = request(words[0], {"max_gen_toks": 5, "do_sample": True, "temperature": 5.0})
    drawn = model.generate_until([draws] * 4)
    assert len(set(drawn)) == 4, "each request has its own noise"
    assert model.generate_until([draws] * 2) == drawn[:2]

    text = [int(i * 7 % 90) for i in range(60)]  # longer than a row
    [total] = model.loglikelihood_rolling([request(" ".join(map(str, text)))])
    assert total == pytest.approx(rolling(theirs, [98, *text], 24), abs=1e-2)


def test_texts_are_words_of_the_tokenizer_that_the_checkpoint_remembers(
    adapter: Any, tmp_path: Path
) -> None:
    theirs = random_model_of(
        transformers.LlamaConfig(
            vocab_size=400, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
        )
    )  # fmt: skip
    (tmp_path / "theirs").mkdir()
    folder = hugging_face_folder(tmp_path / "theirs")
    root = imported(theirs, tmp_path).parent
    named = TokenizerSettings("HuggingFaceTokenizer", folder)
    tokens = build_tokenizer(named).tokenize
    texts = "the quick", " brown fox"
    context, both = (" ".join(map(str, tokens(text))) for text in (texts[0], "".join(texts)))
    by_words, by_ids, by_flags = (
        adapter(str(root), **options)
        for options in (
            {},
            {"ids": True},
            {"tokenizer_type": named.tokenizer_type, "tokenizer_model": str(folder)},
        )
    )
    wanted = by_ids.loglikelihood([request(context, both.removeprefix(context))])
    assert by_words.loglikelihood([request(*texts)]) == wanted
    assert by_flags.loglikelihood([request(*texts)]) == wanted


def test_a_tokenizers_file_without_its_kind_is_refused(adapter: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tokenizer_model=t has no effect without tokenizer_type"):
        adapter(str(tmp_path), tokenizer_model="t")


def rolling(theirs: Any, tokens: list[int], longest: int) -> float:
    """The log-probability of all tokens but the first, in rows that overlap as little as can be."""
    total, done = 0.0, 1
    while done < len(tokens):
        end = min(done + longest, len(tokens))
        row = torch.tensor(tokens[max(0, end - longest - 1) : end])
        log_sv = their_logits(theirs, row[None])[0].double().log_softmax(-1)[:-1]
        total += float(log_sv.gather(1, row[1:, None])[-(end - done) :].sum())
        done = end
    return total
