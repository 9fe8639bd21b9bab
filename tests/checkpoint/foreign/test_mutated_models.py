"""A damaged folder gives one clear error, or a checkpoint; never a traceback, never half a one."""

import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from harness.damage import damage, within

pytest.importorskip("safetensors", reason="an extra: pip install safetensors")

from megatron.checkpoint import folder
from megatron.checkpoint.boxed import StreamedTensor
from megatron.checkpoint.foreign.layouts import tensor_shapes
from megatron.checkpoint.foreign.weights import write_weights
from megatron.commands.convert_checkpoint import main
from megatron.model.settings import ModelSettings

MODEL: Final = ModelSettings.of(
    num_layers=2,
    hidden_size=8,
    ffn_hidden_size=12,
    num_attention_heads=2,
    num_query_groups=1,
    kv_channels=4,
    seq_length=16,
    max_position_embeddings=16,
    vocab_size=11,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="swiglu",
    add_bias_linear=False,
    tie_embeddings=False,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)
CONFIG, INDEX = "config.json", "model.safetensors.index.json"

Mutation = Callable[[Path], None]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sound Llama in two files."""
    root = tmp_path_factory.mktemp("sound")
    streamed = {
        f"weight.{name}": StreamedTensor(shape, torch.float32, partial(torch.ones, shape))
        for name, shape in tensor_shapes(MODEL).items()
    }
    write_weights(root / "checkpoints", MODEL, streamed)
    split(root / "checkpoints", root / "model")
    return root / "model"


def split(checkpoints: Path, target: Path) -> None:
    """Export in two files, whatever the smallest size on a command line is."""
    from megatron.checkpoint.choose import choose
    from megatron.checkpoint.foreign.hugging_face import plan_export

    plan_export(choose(checkpoints, None), lambda count: None).write(target, 3000)
    assert len(list(target.glob("*.safetensors"))) >= 2


def rewritten(change: Callable[[Any], object], name: str = CONFIG) -> Mutation:
    """Change the content of a JSON file in place."""

    def mutate(model: Path) -> None:
        content = json.loads((model / name).read_text())
        change(content)
        (model / name).write_text(json.dumps(content))

    return mutate


def field(name: str, value: object) -> Mutation:
    """Give a field of ``config.json`` another value."""
    return rewritten(lambda content: content.update({name: value}))


def without(name: str) -> Mutation:
    """Leave a field of ``config.json`` out."""
    return rewritten(lambda content: content.pop(name))


def raw(name: str, content: bytes) -> Mutation:
    """Replace a file."""
    return lambda model: void((model / name).write_bytes(content))


def void(_: object) -> None:
    """Return nothing."""


def first_file(model: Path) -> Path:
    """The first file of tensors."""
    return sorted(model.glob("*.safetensors"))[0]


def bytes_changed(change: Callable[[bytes], bytes]) -> Mutation:
    """Change the bytes of the first file of tensors."""

    def mutate(model: Path) -> None:
        path = first_file(model)
        path.write_bytes(change(path.read_bytes()))

    return mutate


def header_changed(change: Callable[[dict[str, Any]], object]) -> Mutation:
    """Change the description of the tensors in the first file."""

    def on_bytes(content: bytes) -> bytes:
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + length :]

    return bytes_changed(on_bytes)


def flipped(at: float) -> Mutation:
    """Flip a bit of the first file of tensors, at a share of its length."""

    def flip(content: bytes) -> bytes:
        place = min(int(at * len(content)), len(content) - 1)
        return content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :]

    return bytes_changed(flip)


def swap_files(model: Path) -> None:
    """Give the first two files each other's names."""
    one, other, *_ = sorted(model.glob("*.safetensors"))
    one.rename(model / "aside")
    other.rename(one)
    (model / "aside").rename(other)


def first_tensor(header: dict[str, Any]) -> dict[str, Any]:
    """The description of some tensor."""
    found: dict[str, Any] = header[min(name for name in header if name != "__metadata__")]
    return found


def mutations() -> Iterator[tuple[str, Mutation]]:
    """Yield names and mutations."""
    for name in ("num_hidden_layers", "hidden_size", "vocab_size", "num_key_value_heads"):
        for value in (0, -1, 3, 10**12, 2.5, "8", None, [8], True):
            yield f"{name} {json.dumps(value)}", field(name, value)
    for name in ("model_type", "intermediate_size", "num_attention_heads", "vocab_size"):
        yield f"no {name}", without(name)
    others: tuple[tuple[str, object], ...] = (
        ("model_type", "mamba"),
        ("model_type", "mixtral"),
        ("num_local_experts", 8),
        ("hidden_act", "relu"),
        ("quantization_config", {"bits": 4}),
        ("rope_scaling", {"rope_type": "yarn"}),
        ("rope_scaling", "linear"),
        ("rope_scaling", {"rope_type": "linear", "factor": 1.5}),
        ("rope_theta", 0.5),
        ("rms_norm_eps", "small"),
        ("attention_bias", True),
        ("tie_word_embeddings", 1),
        ("tie_word_embeddings", True),
        ("head_dim", 5),
    )
    for name, other in others:
        yield f"{name} {json.dumps(other)}", field(name, other)
    yield "empty config", raw(CONFIG, b"")
    yield "half a config", raw(CONFIG, b'{"model_type": "lla')
    yield "a list as config", raw(CONFIG, b"[]")
    yield "bytes as config", raw(CONFIG, b"\xff\x00\x10")
    yield "deep config", raw(CONFIG, b"[" * 100_000)
    yield "no config", lambda model: (model / CONFIG).unlink()
    yield "no index", lambda model: (model / INDEX).unlink()
    yield "half an index", raw(INDEX, b'{"weight_map": {"a"')
    yield "an empty index", raw(INDEX, b'{"weight_map": {}}')
    yield "an index of numbers", raw(INDEX, b'{"weight_map": {"a": 3}}')
    yield "an index to elsewhere", raw(INDEX, b'{"weight_map": {"a": "../x.safetensors"}}')
    yield "no first file", lambda model: first_file(model).unlink()
    yield "swapped files", swap_files
    for size in (0, 4, 8, 100, -1):
        yield f"{size} bytes of a file", bytes_changed(itemgetter(slice(size)))
    for at in (0.0, 0.001, 0.1, 0.5, 1.0):
        yield f"a bit at {at}", flipped(at)
    yield "another shape", header_changed(lambda h: first_tensor(h).update(shape=[1]))
    yield "another type", header_changed(lambda h: first_tensor(h).update(dtype="I32"))
    yield "an unknown type", header_changed(lambda h: first_tensor(h).update(dtype="X9"))
    yield "offsets apart", header_changed(lambda h: first_tensor(h).update(data_offsets=[0, 9]))
    yield (
        "a tensor more",
        header_changed(
            lambda h: h.update(extra={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})
        ),
    )
    yield "no tensors", header_changed(lambda h: h.clear())


CASES: Final = dict(mutations())


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_model_gives_one_clear_error(case: str, sound: Path, tmp_path: Path) -> None:
    model, target = tmp_path / "model", tmp_path / "checkpoints"
    shutil.copytree(sound, model)
    CASES[case](model)
    error = import_error(model, target)
    assert (error is None) == (case in HARMLESS), error
    assert folder.complete(target) == ([0] if error is None else [])
    if error is not None:
        assert error.startswith("error: ")
        assert len(error.splitlines()) == 1
        assert str(tmp_path) in error, "it names the file"


def import_error(model: Path, target: Path) -> str | None:
    """Import a model; return the error with which the command ended, if it did."""
    try:
        main(["import", str(model), str(target)])
    except SystemExit as ended:
        return str(ended.code)
    return None


HARMLESS: Final = {
    "tie_word_embeddings true",
    "a bit at 0.5",
    "a bit at 1.0",
}
"""Mutations that leave a model: a number that was right already, or other weights."""


def test_there_are_many_mutations() -> None:
    assert len(CASES) >= 60


def test_the_sound_model_is_imported(sound: Path, tmp_path: Path) -> None:
    assert import_error(sound, tmp_path / "checkpoints") is None
    assert folder.complete(tmp_path / "checkpoints") == [0]


def read_by_others(model: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The configuration and the tensors of a folder, as Python and safetensors read them."""
    from safetensors.torch import load_file

    index = model / INDEX
    placed = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
    files = {model / name for name in placed.values()} or set(model.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return json.loads((model / CONFIG).read_text()), tensors


@pytest.mark.parametrize(
    "numbers", [range(40), pytest.param(range(40, 200), marks=pytest.mark.full)], ids=str
)
def test_damaged_bytes_are_read_right_or_told(numbers: range, sound: Path, tmp_path: Path) -> None:
    """What is imported in spite of the damage and exported again is what safetensors reads."""
    wrong = {}
    for number in numbers:
        model, ours, again = (tmp_path / str(number) / n for n in ("model", "ours", "again"))
        shutil.copytree(sound, model)
        done = damage(model, sorted(sound.iterdir()), random.Random(number))
        with within(20):
            error = import_error(model, ours)
        if error is not None:
            if "\n" in error or str(model) not in error or not error.startswith("error: "):
                wrong[number, done] = error
            continue
        main(["export", str(ours), str(again), "--family", "llama"])
        (config, tensors), (made, found) = read_by_others(model), read_by_others(again)
        same = {name: value.numpy().tobytes() for name, value in tensors.items()}
        if {name: value.numpy().tobytes() for name, value in found.items()} != same:
            wrong[number, done] = "other tensors"
        if other := [name for name in made.keys() & config.keys() if made[name] != config[name]]:
            wrong[number, done] = f"another {other}"
    assert not wrong
