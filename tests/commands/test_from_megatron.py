"""The command from-megatron: its page, its data, its files, its faults and its prediction."""

import importlib
import itertools
import json
import shlex
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from megatron.commands import from_megatron
from megatron.planning.run_plan import asked
from megatron.run.line import Line
from megatron.simulator.costs.gpus import gpu

FLAGS = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 128 "
    "--max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 32 --train-iters 10 "
    "--lr 1e-3 --bf16 --eval-iters 1 --pipeline-model-parallel-size 4"
)
SCRIPT = f"""#!/bin/bash
NNODES=${{NNODES:-2}}
TP=${{1:-2}}
if [ $TP -gt 1 ]; then EXTRA="--sequence-parallel"; fi
[ -d /data ] && EXTRA="$EXTRA --log-throughput"
export NCCL_DEBUG=INFO
torchrun --nproc_per_node 8 --nnodes $NNODES pretrain_gpt.py {FLAGS} \\
    --tensor-model-parallel-size $TP $EXTRA --save "$OUT" --swap-optimizer \\
    --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model t.model --data-path d
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    return path


def page(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    from_megatron.main(list(map(str, words)))
    return capsys.readouterr().out


def data(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    return json.loads(page(capsys, *words, "--json"))["launches"]


def faults(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit) as ended:
        from_megatron.main(list(map(str, words)))
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_the_page_tells_ranks_decisions_answers_and_both_lines(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = page(capsys, script)
    for part in (
        "line 7: torchrun starts pretrain_gpt.py",
        "2 machines x 8 ranks = 16; t 2, c 1, p 4, d 2",
        "line 4: if [ $TP -gt 1 ]: true, its branch is read",
        "line 5: [ -d /data ] && EXTRA=",
        "defaults of the script (--set NAME=VALUE gives others): NNODES=2, 1=2",
        "not known: --save $OUT (--set OUT=...)",
        "exported, and no part of the line: NCCL_DEBUG",
        "left out: --swap-optimizer: ",
        "the line to run:",
        "with the vocabulary split over 8 ranks (p x t): --vocab-parallel vocab-2 is added",
    ):
        assert part in told
    assert told.count("torchrun --nnodes 2 --nproc-per-node 8") == 2
    assert told.count("    --vocab-parallel vocab-2") == 1


def test_values_of_the_command_line_count_in_place_of_the_scripts(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--set", "NNODES=4", "--set", "1=1", "--set", "OUT=/out dir", "--gpus-per-node", "4")
    (found,) = data(capsys, script, *words)
    assert found["ranks"]["layout"] == {"t": 1, "c": 1, "p": 4, "e": 1, "d": 4}
    assert "--save '/out dir'" in found["as_is"]["line"]
    assert "--sequence-parallel" not in found["as_is"]["words"]
    assert not found["not_known"]
    assert "the script has no NOSUCH" in page(capsys, script, "--set", "NOSUCH=1")


def test_the_data_say_what_the_page_says(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = data(capsys, script)
    answers = {own["flag"]: own["answer"] for own in found["flags"]}
    assert answers["--num-layers 8"] == "accepted"
    assert answers["--log-throughput"] == "noted"
    assert answers["--swap-optimizer"] == "refused"
    assert found["split"]["added"] == ["--vocab-parallel", "vocab-2"]
    told = page(capsys, script)
    assert found["as_is"]["line"] in told
    assert found["split"]["line"] in told


def test_lines_are_written_as_scripts_that_a_shell_runs(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, split = tmp_path / "own.sh", tmp_path / "split.sh"
    page(capsys, script, "--set", "OUT=/o", "--nodes", 1, "-o", own, "--output-split", split)
    for path in (own, split):
        run = f'torchrun() {{ printf "%s\\0" "$@"; }}\n. {shlex.quote(str(path))}'
        done = subprocess.run(["bash", "-c", run], capture_output=True, text=True, check=True)
        words = done.stdout.split("\0")
        assert words[:4] == ["--standalone", "--nproc-per-node", "8", "pretrain_gpt.py"]
        assert ("vocab-2" in words) == (path == split)
    assert "this is the script that is read" in faults(capsys, script, "-o", script)
    assert script.read_text() == SCRIPT


def test_several_trainings_have_a_page_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sweep.sh"
    path.write_text(
        "python tools/preprocess_data.py --input x\n"
        f"for lr in 1e-3 1e-4; do\n  torchrun --nproc_per_node 8 pretrain_gpt.py {FLAGS} --lr $lr\n"
        f"done\ndeepspeed --num_gpus 4 pretrain_gpt.py {FLAGS}\n"
    )
    found = data(capsys, path)
    assert [(own["line"], own["launcher"]) for own in found] == [
        (3, "torchrun"),
        (3, "torchrun"),
        (5, "deepspeed"),
    ]
    assert data(capsys, path, "--launch", "3")[0]["launcher"] == "deepspeed"
    assert "--launch 1 to 3" in faults(capsys, path, "-o", tmp_path / "x.sh")
    assert "--launch 4" in faults(capsys, path, "--launch", "4")


def test_the_page_says_nothing_of_dry_runs_that_the_user_has_not_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.sh"
    line = f"pretrain_gpt.py {FLAGS} --use-distributed-optimizer --data-path d --load c"
    path.write_text(f"torchrun --nproc_per_node 4 {line}\n")
    told = page(capsys, path)
    assert "--use-distributed-optimizer: changes nothing: there is one replica" in told
    assert "dry" not in told
    path.write_text(f"torchrun --nproc_per_node $N {line}\n")
    assert "one replica" not in page(capsys, path)


def test_a_prediction_is_that_of_a_dry_run(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--predict", "h100", "--vocab-size", "32000", "--set", "1=1", "--nodes", "1")
    (found,) = data(capsys, script, *words)
    predicted = found["predicted"]
    seconds = []
    for name in ("as_is", "split"):
        dry = ("--vocab-size", "32000", "--dry-run", "--dry-run-gpu", "H100")
        more = ("--dry-run-replicas", "2", "--ranks-per-node", "8")
        line = Line.of([*found[name]["words"], *dry, *more], 1)
        forecast = asked(line.run(gpu("H100")))[0].forecast
        assert forecast is not None
        seconds.append(forecast.outcome.seconds)
    whole, split = predicted["whole"]["seconds"], predicted["split"]["seconds"]
    assert [whole, split] == pytest.approx(seconds, rel=0.1)  # by a plan of fewer microbatches
    assert predicted["split_gains"] == pytest.approx(whole / split - 1)
    assert "the split makes the job" in page(capsys, script, *words)


def test_a_prediction_needs_what_the_script_leaves_open(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = page(capsys, script, "--predict", "H100")
    assert "no prediction: --predict needs the entries of the vocabulary: add --vocab-size" in told


@pytest.mark.parametrize("word", ["NAME", "A B=1", "=1", "$(x)", "A-B=1"])
def test_a_wrong_setting_is_refused(
    word: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"--set {word}" in faults(capsys, script, "--set", word)


TITAN = """
[model]
name = "llama3"
flavor = "8B"
[optimizer]
lr = 3e-4
[training]
local_batch_size = 4
seq_len = 8192
steps = 1000
[parallelism]
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
tensor_parallel_degree = 2
data_parallel_shard_degree = 2
[activation_checkpoint]
mode = "full"
[float8]
recipe_name = "rowwise"
"""
NEMO = """
trainer: {devices: 8, num_nodes: 4, precision: bf16, max_steps: 100, gradient_clip_val: 1.0}
model:
  micro_batch_size: 1
  global_batch_size: 64
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: ${PP}
  encoder_seq_length: 2048
  num_layers: 8
  hidden_size: 1024
  num_attention_heads: 16
  masked_softmax_fusion: false
  add_bias_linear: false
  kv_channels: null
  qk_clip: true
  optim:
    name: distributed_fused_adam
    lr: 1e-4
    betas: [0.9, 0.95]
    sched: {name: CosineAnnealing, warmup_steps: 10, min_lr: 1e-5}
  data: {data_prefix: [0.5, a, 0.5, b]}
"""


def words_by_flag(words: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            last = found.setdefault(word, [])
        else:
            last.append(word)
    return found


def test_a_file_of_torchtitan_becomes_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tomllib")
    path = tmp_path / "llama3_8b.toml"
    path.write_text(TITAN)
    (found,) = data(capsys, path, "--gpus-per-node", "8")
    flags = words_by_flag(found["as_is"]["words"])
    assert found["ranks"]["layout"] == {"t": 2, "c": 1, "p": 4, "e": 1, "d": 2}
    assert found["ranks"]["machines"] == 2
    assert flags["--pipeline-schedule"] == ["interleaved"]
    assert flags["--global-batch-size"] == ["8"]
    assert flags["--micro-batch-size"] == ["1"]
    assert flags["--adam-beta2"] == ["0.95"]
    assert "not translated: float8.recipe_name = 'rowwise'" in found["notes"]
    assert any("--num-layers is missing" in line for line in found["as_is"]["changes"])


def test_a_yaml_file_with_names_of_arguments_becomes_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "gpt.yaml"
    path.write_text(NEMO)
    (found,) = data(capsys, path, "--set", "PP=4")
    flags = words_by_flag(found["as_is"]["words"])
    assert found["ranks"]["layout"] == {"t": 2, "c": 1, "p": 4, "e": 1, "d": 4}
    assert flags["--train-iters"] == ["100"]
    assert flags["--lr-decay-style"] == ["cosine"]
    assert (flags["--adam-beta1"], flags["--adam-beta2"]) == (["0.9"], ["0.95"])
    assert flags["--data-path"] == ["0.5", "a", "0.5", "b"]
    assert "--disable-bias-linear" in flags
    assert "--no-masked-softmax-fusion" in flags
    assert "not translated: model.qk_clip = True" in found["notes"]
    assert data(capsys, path)[0]["not_known"] == [
        {"flag": "--pipeline-model-parallel-size ${PP}", "set": ["PP"]}
    ]


WRITTEN: Final = """
_target_: megatron.bridge.training.config.ConfigContainer
ddp: {_target_: d.DistributedDataParallelConfig, use_distributed_optimizer: true}
model:
  _target_: megatron.bridge.models.Provider
  activation_func: {_call_: false, _target_: torch.nn.functional.ACTIVATION}
  attention_backend: {_args_: [1], _call_: true, _name_: flash, _target_: m.AttnBackend}
  gated_linear_unit: GATED
  hidden_size: 64
  init_method: {_args_: [], _partial_: true, _target_: torch.nn.init.normal_, std: 0.02}
  num_attention_heads: 4
  num_layers: 8
  pipeline_dtype: null
  seq_length: 128
  transformer_layer_spec: {_call_: false, _target_: megatron.bridge.specs.layer}
optimizer:
  lr: 0.001
  main_grads_dtype: {_call_: false, _target_: torch.bfloat16}
train: {global_batch_size: 8, micro_batch_size: 1, train_iters: 10}
"""
"""In the form in which ``ConfigContainer.to_yaml`` writes functions, types and enumerations."""


@pytest.mark.parametrize(
    ("function", "gated", "flag"),
    [
        ("silu", True, "--swiglu"),
        ("gelu", True, "--geglu"),
        ("gelu", False, None),
        ("relu", False, "--relu"),
        ("tanh", True, "--swiglu"),
    ],
)
def test_a_configuration_that_megatron_bridge_has_written_becomes_flags(
    function: str, gated: bool, flag: str | None, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    pytest.importorskip("yaml")
    path = tmp_path / "config.yaml"
    path.write_text(WRITTEN.replace("ACTIVATION", function).replace("GATED", str(gated).lower()))
    (found,) = data(capsys, path)
    flags = words_by_flag(found["as_is"]["words"])
    assert flags.keys() & {"--swiglu", "--geglu", "--relu"} == ({flag} if flag else set())
    assert flags["--main-grads-dtype"] == ["bf16"]
    assert flags["--attention-backend"] == ["flash"]
    assert flags["--num-layers"] == ["8"]
    [left] = [note for note in found["notes"] if note.startswith("not translated: ")]
    assert "model.init_method = torch.nn.init.normal_" in left
    assert "model.transformer_layer_spec = megatron.bridge.specs.layer" in left
    assert ("model.activation_func" in left) == (function == "tanh")


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("a.toml", "x = [", "a.toml: "),
        ("a.toml", "x = 1", "with the sections [model] and [training]"),
        ("a.toml", "[model]\n[training]\nsteps = 'many'", "training.steps = 'many': must be"),
        ("a.toml", "[model]\n[training]\nx = " + "[" * 50_000, "a.toml: "),
        ("a.yaml", "a: [", "is no YAML that can be read"),
        ("a.yaml", "- 1", "there are no keys in it"),
        ("a.yaml", "a: !!python/object/apply:os.system [id]", "is no YAML that can be read"),
        ("a.yaml", "a: " + "[" * 50_000, "is no YAML that can be read"),
        ("a.yaml", "x: 1", "no key in it is a flag"),
        (
            "a.yaml",
            "a: &a {x: 1, y: 1}\n"
            + "".join(
                f"{own}: &{own} {{x: *{last}, y: *{last}, z: *{last}}}\n"
                for last, own in itertools.pairwise("abcdefghij")
            ),
            "more than 5,000 keys",
        ),
    ],
)  # fmt: skip
def test_damaged_configurations_are_refused(
    name: str, text: str, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tomllib" if name.endswith("toml") else "yaml")
    path = tmp_path / name
    path.write_text(text)
    assert fault in faults(capsys, path)


@pytest.mark.parametrize(("name", "way"), [("tomllib", "newer Python"), ("yaml", "pip install")])
def test_a_missing_reader_is_told_with_the_way_out(
    name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def missing(asked_for: str) -> None:
        raise ModuleNotFoundError(name=asked_for)

    monkeypatch.setattr(importlib, "import_module", missing)
    path = tmp_path / ("a.toml" if name == "tomllib" else "a.yaml")
    path.write_text("")
    assert way in faults(capsys, path)
