"""Ways from JSON lines to token ids on disk that are compared: each is a process of its own.

``ways.py WAY TEXT MODEL OUTPUT WORKERS`` prints in JSON two numbers of seconds from the end of its
imports until its files are written: by the clock, and of the processors. The packages of a way are
imported only in it, and this file stands alone, because megatron-core shares its name with this
project.
"""

import importlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

Seconds = tuple[float, float]
"""Seconds by the clock, and those that the processors worked, in all processes together."""

_MEGATRON_TOKENIZERS = "megatron.core.tokenizers.text.utils.build_tokenizer"
_CHUNK = 32  # lines that Megatron-LM's tool hands to a worker at a time


class Clock:
    """Seconds from its making on."""

    def __init__(self) -> None:
        self._begin = time.perf_counter(), self._processors()

    def read(self) -> Seconds:
        """The seconds; of child processes those that have ended count."""
        return time.perf_counter() - self._begin[0], self._processors() - self._begin[1]

    @staticmethod
    def _processors() -> float:
        # Workers are children of Python's fork server, whose seconds count once it has ended.
        importlib.import_module("multiprocessing.forkserver")._forkserver._stop()
        return sum(os.times()[:4])


def ours(text: Path, model: Path, output: Path, workers: int) -> Seconds:
    """tools/preprocess_data.py without its command line."""
    from megatron.data.preparation.encode import EncodeConfig
    from megatron.data.preparation.preprocess import PreprocessConfig, preprocess
    from megatron.data.tokenizers.settings import TokenizerSettings

    clock = Clock()
    tokenizer = TokenizerSettings(type_of(model), model)
    encode = EncodeConfig(tokenizer, append_eod=True)
    preprocess(PreprocessConfig((text,), output, encode, workers, restarts=True), lambda _: None)
    return clock.read()


class MegatronEncoder:
    """A worker of Megatron-LM's tools/preprocess_data.py, with the package's tokenizer.

    Args:
        model: of the tokenizer.
    """

    tokenizer: ClassVar[Any]

    def __init__(self, model: Path) -> None:
        self._model = model

    def build(self) -> Any:
        """Make the tokenizer of megatron-core."""
        made = importlib.import_module(_MEGATRON_TOKENIZERS)
        given = SimpleNamespace(
            tokenizer_type=type_of(self._model),
            tokenizer_model=str(self._model),
            tokenizer_special_tokens=None,
            tokenizer_sentencepiece_legacy=False,
            tokenizer_metadata=None,
            tokenizer_hf_use_fast=True,
            tokenizer_hf_include_special_tokens=False,
            trust_remote_code=False,
            vocab_file=None,
            merge_file=None,
            vocab_size=None,
        )
        return made.build_tokenizer(given)

    def initialize(self) -> None:
        """Begin a worker."""
        MegatronEncoder.tokenizer = self.build()

    def encode(self, line: str) -> tuple[dict[str, list[int]], dict[str, list[int]], int]:
        """Return a line's ids, their number, and the line's length."""
        ids = MegatronEncoder.tokenizer.tokenize(json.loads(line)["text"])
        if ids:
            ids = [*ids, MegatronEncoder.tokenizer.eod]
        return {"text": ids}, {"text": [len(ids)] if ids else []}, len(line)


def megatron(text: Path, model: Path, output: Path, workers: int) -> Seconds:
    """The steps of Megatron-LM's tool: a pool that encodes lines, and the package's builder."""
    indexed = importlib.import_module("megatron.core.datasets.indexed_dataset")
    importlib.import_module(_MEGATRON_TOKENIZERS)
    clock = Clock()
    encoder = MegatronEncoder(model)
    dtype = indexed.DType.optimal_dtype(encoder.build().vocab_size)
    builder = indexed.IndexedDatasetBuilder(f"{output}_text_document.bin", dtype=dtype)
    with (
        multiprocessing.Pool(workers, encoder.initialize) as pool,
        text.open(encoding="utf-8") as lines,
    ):
        for ids, lengths, _ in pool.imap(encoder.encode, lines, _CHUNK):
            builder.add_document(ids["text"], lengths["text"])
    builder.finalize(f"{output}_text_document.idx")
    return clock.read()


def datasets(text: Path, model: Path, output: Path, workers: int) -> Seconds:
    """Hugging Face's datasets and tokenizers: map over batches, and save as Arrow files."""
    library = importlib.import_module("datasets")
    tokenizers = importlib.import_module("tokenizers")
    library.disable_progress_bars()
    clock = Clock()
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    end = tokenizer.token_to_id("</s>")

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        found = tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"input_ids": [[*encoding.ids, end] for encoding in found]}

    cache = str(output.parent / "cache")
    rows = library.load_dataset("json", data_files=str(text), split="train", cache_dir=cache)
    made = rows.map(encode, batched=True, num_proc=workers, remove_columns=rows.column_names)
    made.save_to_disk(str(output), num_proc=workers)
    return clock.read()


def type_of(model: Path) -> str:
    """Return the type of a tokenizer, by its file."""
    return "HuggingFaceTokenizer" if model.is_dir() else "GPTSentencePieceTokenizer"


WAYS: dict[str, Callable[[Path, Path, Path, int], Seconds]] = {
    "ours": ours,
    "megatron": megatron,
    "datasets": datasets,
}


def ways_for(model: Path) -> Iterator[str]:
    """Return the ways that can use a tokenizer."""
    return (way for way in WAYS if way != "datasets" or model.is_dir())


if __name__ == "__main__":
    name, model, text, folder, count = sys.argv[1:]
    print(json.dumps(WAYS[name](Path(model), Path(text), Path(folder), int(count))))
