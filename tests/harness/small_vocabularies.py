"""Small vocabularies of every kind, made here: nothing is downloaded."""

import base64
import io
import json
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceTrainer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from megatron.data.tokenizers.settings import TokenizerSettings

TEXT = "the quick brown fox jumps over the lazy dog"
TEXTS = [
    TEXT,
    "The 3 quick foxes' dog: it's  lazy!\n\n\t(really)",
    "\u4f60\u597d, na\u00efve \U0001f98a",
]


def sentencepiece_model(path: Path, **options: Any) -> Path:
    """A sentencepiece model of 60 pieces, or as the trainer's options say."""
    content = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT] * 3),
        model_writer=content,
        **{"model_type": "bpe", "vocab_size": 60, "minloglevel": 2, **options},
    )
    path.write_bytes(content.getvalue())
    return path


def byte_pair_encoding(special: list[str]) -> Tokenizer:
    """GPT-2's kind of encoding with some merges, trained on ``TEXTS``."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special,
        show_progress=False,
    )
    made.train_from_iterator(TEXTS * 3, trainer)
    return made


def gpt2_files(folder: Path) -> TokenizerSettings:
    """``vocab.json`` and ``merges.txt`` in a folder."""
    byte_pair_encoding(["<|endoftext|>"]).model.save(str(folder))
    return TokenizerSettings(
        "GPT2BPETokenizer", vocab_file=folder / "vocab.json", merge_file=folder / "merges.txt"
    )


def hugging_face_folder(folder: Path) -> Path:
    """What ``save_pretrained`` writes, with tokens that begin and end a text."""
    made = byte_pair_encoding(["<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    made.save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


def byte_of_character() -> dict[str, int]:
    """The character by which GPT-2's files write each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}


def tiktoken_file(path: Path) -> Path:
    """A vocabulary in the JSON form that Megatron-LM and Mistral give tiktoken's."""
    made = json.loads(byte_pair_encoding([]).to_str())["model"]
    of_character = byte_of_character()
    pieces = [bytes([byte]) for byte in range(256)]
    for pair in made["merges"]:
        piece = bytes(of_character[c] for c in "".join(pair))
        if piece not in pieces:
            pieces.append(piece)
    entries = [
        {
            "rank": rank,
            "token_bytes": base64.b64encode(piece).decode(),
            "token_str": piece.decode(errors="replace"),
        }
        for rank, piece in enumerate(pieces)
    ]
    path.write_text(json.dumps(entries))
    return path
