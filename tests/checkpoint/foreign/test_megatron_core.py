"""Checkpoints as Megatron-Core lays them out are read by name, stacked layers or not."""

import argparse
import enum
import zipfile
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from reference.plain_gpt import GPTOptions, Parameters, parameter_shapes, random_parameters

from megatron.checkpoint import saved_model
from megatron.checkpoint.boxed import BoxedTensor
from megatron.checkpoint.choose import choose, read_model
from megatron.checkpoint.foreign import megatron_core
from megatron.checkpoint.foreign.layouts import ForeignError
from megatron.checkpoint.reading import TensorReader, read_boxes
from megatron.commands.convert_checkpoint import main
from megatron.flags.tree import values_of
from megatron.parallel.box import whole

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

OPTIONS: Final = GPTOptions(
    num_layers=3,
    num_query_groups=2,
    vocab_size=29,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    tie_embeddings=False,
)
PADDED: Final = 32
"""Rows of the vocabulary matrices with padding, which is not zero there."""


class Backend(enum.Enum):
    """A class that only the other program has."""

    FLASH = 1


ARGUMENTS: Final[dict[str, Any]] = {
    "num_layers": 3,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 4,
    "seq_length": 12,
    "max_position_embeddings": 12,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "padded_vocab_size": PADDED,
    "attention_backend": Backend.FLASH,
    "params_dtype": torch.bfloat16,
}


def write_core(
    where: Path, parameters: Parameters, *, stacked: bool, fused_norms: bool = False
) -> None:
    """Write a checkpoint with the names and shapes that ``torch_dist`` has."""
    tensors: dict[str, Any] = {}
    for name, value in parameters.items():
        if fused_norms:
            name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
            name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            value = torch.cat((value, torch.ones(PADDED - len(value), value.shape[1])))
        parts = name.split(".")
        if stacked and name.startswith("decoder.layers."):
            key = ".".join((*parts[:2], *parts[3:]))
            tensors.setdefault(key, []).append(value)
        else:
            tensors[name] = value
    content = {
        name: torch.stack(value) if isinstance(value, list) else value
        for name, value in tensors.items()
    }
    content["optimizer.state.exp_avg.output_layer.weight"] = torch.ones(3)
    dcp.save(content, checkpoint_id=where)
    torch.save({"args": argparse.Namespace(**ARGUMENTS), "iteration": 10}, where / "common.pt")


def read_back(where: Path) -> Parameters:
    """The weights of a checkpoint of ours."""
    reader, found = TensorReader(where), {}
    for name, shape in parameter_shapes(OPTIONS).items():
        found[name] = torch.empty(shape)
        boxed = BoxedTensor(found[name], shape, whole(shape))
        read_boxes({f"weight.{name}": boxed}, reader, reader.metadata)
    return found


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("fused_norms", [True, False])
def test_every_tensor_arrives(stacked: bool, fused_norms: bool, tmp_path: Path) -> None:
    parameters = random_parameters(OPTIONS, dtype=torch.float32)
    where = tmp_path / "core" / "iter_0000010"
    write_core(where, parameters, stacked=stacked, fused_norms=fused_norms)
    (tmp_path / "core" / "latest_checkpointed_iteration.txt").write_text("10")
    main(["import-core", str(tmp_path / "core"), str(tmp_path / "ours"), "--vocab-size", "29"])
    ours = choose(tmp_path / "ours", None)
    for name, value in read_back(ours).items():
        assert torch.equal(value, parameters[name]), name
    wanted = saved_model.read_model(vars(OPTIONS) | {"seq_length": ARGUMENTS["seq_length"]})
    found = values_of(read_model(ours))
    for name in ("activation", *(found.keys() & vars(OPTIONS))):
        assert found[name] == values_of(wanted)[name], name


def test_nothing_of_a_pickle_is_executed(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "exploded",)

    arguments = argparse.Namespace(bomb=Bomb(), num_layers=3)
    torch.save({"args": arguments, "state": torch.arange(9.0)}, tmp_path / "common.pt")
    found = megatron_core.arguments(tmp_path)
    assert found is not None
    assert found.num_layers == 3
    assert not (tmp_path / "exploded").exists()


class WritesWhenLoaded(torch.nn.Module):
    """TorchScript runs ``__setstate__`` when an archive is loaded; here it writes a file."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.made = torch.zeros(4)

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return self.path, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.path, self.training = state
        self.made = torch.from_file(self.path, True, 4, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_no_code_of_torchscript_is_run(tmp_path: Path) -> None:
    written = tmp_path / "exploded"
    torch.jit.script(WritesWhenLoaded(str(written))).save(str(tmp_path / "common.pt"))
    written.unlink(missing_ok=True)
    torch.jit.load(str(tmp_path / "common.pt"))
    assert written.exists(), "the archive must be a dangerous one"
    written.unlink()
    with pytest.raises(ForeignError, match="archive of TorchScript, which holds code"):
        megatron_core.arguments(tmp_path)
    assert not written.exists()


@pytest.mark.parametrize("what", ["a large pickle", "no pickle", "a list"])
def test_strange_archives_are_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "common.pt"
    torch.save([1] if what == "a list" else {"args": None}, path)
    if what == "a large pickle":
        monkeypatch.setattr(megatron_core, "_LARGEST_PICKLE", 4)
    if what == "no pickle":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("common/version", "3")
    with pytest.raises(ForeignError, match="common\\.pt cannot be read"):
        megatron_core.arguments(tmp_path)


def test_faults_are_told(tmp_path: Path) -> None:
    parameters = random_parameters(OPTIONS, dtype=torch.float32)
    where, target = tmp_path / "core", tmp_path / "ours"

    def error(*flags: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["import-core", str(where), str(target), *flags])
        text = str(ended.value.code)
        assert text.startswith("error: ")
        assert len(text.splitlines()) == 1
        return text

    assert "torch_dist" in error()
    write_core(where, parameters, stacked=True)
    assert "has shape [3, 48, 16]" in error("--ffn-hidden-size", "40")
    assert "layer 3" in error("--num-layers", "4")
    assert "embedding.word_embeddings.weight has shape [32, 16]" in error("--vocab-size", "33")
    assert "has no tensor decoder.layers.0.self_attention.q_layernorm" in error("--qk-layernorm")
    assert "--no-such-flag" in error("--no-such-flag")
    torch.save({"args": argparse.Namespace(num_experts=8)}, where / "common.pt")
    assert "mixture of experts" in error()
    (where / "common.pt").write_bytes(b"\x80\x02garbage")
    assert "common.pt cannot be read" in error()
    (where / ".metadata").write_bytes(b"\x80\x02garbage")
    (where / "common.pt").unlink()
    assert ".metadata cannot be read" in error()
    assert not target.exists() or not list(target.iterdir())


def test_no_weight_is_read_past(tmp_path: Path) -> None:
    """More tensors, more layers, or an output matrix beside a tied embedding are told by name."""
    parameters = random_parameters(OPTIONS, dtype=torch.float32)
    words = ["--vocab-size", "29"]

    def error(where: Path, *flags: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["import-core", str(where), str(tmp_path / "refused"), *words, *flags])
        return str(ended.value.code)

    for stacked in (True, False):
        where = tmp_path / f"core{stacked}"
        write_core(where, parameters, stacked=stacked)
        told = "has 3 layers, and --num-layers is 2" if stacked else "has a tensor decoder.layers.2"
        assert told in error(where, "--num-layers", "2")
    biased = {**parameters, "decoder.layers.1.mlp.linear_fc2.bias": torch.ones(16)}
    write_core(tmp_path / "biased", biased, stacked=False)
    assert "has a tensor decoder.layers.1.mlp.linear_fc2.bias, for which" in error(
        tmp_path / "biased"
    )
    tied = {"untie_embeddings_and_output_weights": False}
    with patch.dict(ARGUMENTS, tied):
        write_core(tmp_path / "other", parameters, stacked=True)
        same = {**parameters, "output_layer.weight": parameters["embedding.word_embeddings.weight"]}
        write_core(tmp_path / "same", same, stacked=True)
    told = error(tmp_path / "other")
    assert "output_layer.weight differs from embedding.word_embeddings.weight" in told
    main(["import-core", str(tmp_path / "same"), str(tmp_path / "ours"), *words])
    assert read_model(choose(tmp_path / "ours", None)).vocabulary.tie_embeddings


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    """Padding of the vocabulary is no weight of ours, whatever it holds."""
    parameters = random_parameters(OPTIONS, dtype=torch.float32)
    parameters["decoder.layers.1.mlp.linear_fc2.weight"][0, 1] = float("inf")
    where = tmp_path / "core"
    write_core(where, parameters, stacked=False)
    words = ["import-core", str(where), str(tmp_path / "ours"), "--vocab-size", "29"]
    with pytest.raises(SystemExit, match=r"layers\.1\.mlp\.linear_fc2\.weight has 0 NaN and 1 inf"):
        main(words)
    main([*words, "--allow-not-finite"])
    found = read_back(choose(tmp_path / "ours", None))
    assert found["decoder.layers.1.mlp.linear_fc2.weight"][0, 1].isinf()
