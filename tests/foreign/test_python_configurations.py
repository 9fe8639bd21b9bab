"""Configurations in Python are read as data: known values are a run's, and nothing is run."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.commands import from_megatron
from megatron.foreign.launches import Launch
from megatron.foreign.python_data import PythonData
from megatron.foreign.python_values import Computed, Record, Value
from megatron.foreign.read import read_source

TITAN = """
from somewhere import Trainer, model_registry

STEPS = 2 * 500


def small() -> Trainer.Config:
    \"\"\"A small one.\"\"\"
    return Trainer.Config(
        hf_assets_path="./assets/own-1B",
        model_spec=model_registry("1B"),
        optimizer=Optimizers.Config(lr=3e-4),
        training=TrainingConfig(local_batch_size=4, seq_len=2048, steps=STEPS),
        metrics=Metrics.Config(log_freq=5),
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=4,
            tensor_parallel_degree=2,
            data_parallel_shard_degree=2,
            pipeline_parallel_schedule="Interleaved1F1B",
        ),
        activation_checkpoint=Recomputation(mode="full"),
    )


def larger() -> Trainer.Config:
    config = small()
    config.model_spec = model_registry("3B")
    config.training.seq_len = 4096
    config.optimizer.lr = find_rate(3)
    if is_big():
        config.training.steps = 7
    return config


def helper(x):
    return x + 1
"""

BRIDGE = """
import torch

LONG = 16384


def own_pretrain_config() -> ConfigContainer:
    cfg = _common()
    cfg.model = Bridge.from_hf("own/Model-1B").provider(load_weights=False)
    cfg.model.tensor_model_parallel_size = 2
    cfg.model.pipeline_model_parallel_size = 4
    cfg.model.pipeline_model_parallel_layout = None
    cfg.model.sequence_parallel = True
    cfg.dataset.seq_length = LONG
    cfg.train.train_iters = 1000
    cfg.train.global_batch_size = 64
    cfg.train.micro_batch_size = 1
    cfg.optimizer.main_grads_dtype = torch.float32
    cfg.ddp.use_distributed_optimizer = True
    return cfg


def with_arguments(tensor: int = 2, *, lr: float = 3e-4, **more) -> "ConfigContainer":
    model = provider(tensor, act=F.gelu)
    cfg = ConfigContainer(
        model=model,
        train=TrainingConfig(train_iters=100, global_batch_size=32, micro_batch_size=2),
        optimizer=OptimizerConfig(lr=lr, betas=(0.9, 0.95), **unknown),
        dataset=DatasetConfig(seq_length=4096, blend=None),
        logger=None,
    )
    if cfg.logger is None:
        cfg.logger = LoggerConfig(log_interval=10)
    else:
        cfg.logger.log_interval = 3
    return cfg


def provider(t, act):
    return Provider(
        num_layers=24, hidden_size=2048, num_attention_heads=16, gated_linear_unit=True,
        activation_func=act, tensor_model_parallel_size=t,
    )
"""


def read(tmp_path: Path, text: str, **given: str) -> tuple[Launch, ...]:
    path = tmp_path / "config.py"
    path.write_text(text)
    return read_source(path, given)[1]


def flags(launch: Launch) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for word in launch.words:
        if word.startswith("--"):
            own = found.setdefault(word, [])
        else:
            own.append(word)
    return found


def test_functions_of_torchtitan_are_trainings(tmp_path: Path) -> None:
    small, larger = read(tmp_path, TITAN)
    assert (small.line, small.program) == (7, "small (a configuration of torchtitan)")
    own = flags(small)
    assert {
        name: own[name][0]
        for name in ("--lr", "--seq-length", "--train-iters", "--log-interval",
                     "--pipeline-model-parallel-size", "--tensor-model-parallel-size",
                     "--pipeline-schedule", "--global-batch-size", "--recompute-granularity")
    } == {
        "--lr": "0.0003", "--seq-length": "2048", "--train-iters": "1000", "--log-interval": "5",
        "--pipeline-model-parallel-size": "4", "--tensor-model-parallel-size": "2",
        "--pipeline-schedule": "interleaved", "--global-batch-size": "8",
        "--recompute-granularity": "full",
    }  # fmt: skip
    assert any("the sizes of the model small 1B stand in" in note for note in small.notes)
    assert not any("computed" in note for note in small.notes)
    assert flags(larger)["--seq-length"] == ["4096"]


def test_what_a_function_computes_is_told_by_line_and_its_flag_is_left_out(tmp_path: Path) -> None:
    _, larger = read(tmp_path, TITAN)
    own = flags(larger)
    assert "--lr" not in own
    assert "--train-iters" not in own
    rate = TITAN.splitlines().index("    config.optimizer.lr = find_rate(3)") + 1
    assert f"line {rate}: optimizer.lr = find_rate(3): computed, and not read" in larger.notes
    assert any(note.startswith(f"line {rate + 1}: if is_big()") for note in larger.notes)
    assert any(note.startswith(f"line {rate + 2}: training.steps = ") for note in larger.notes)
    left = [note for note in larger.notes if note.startswith("left out, because a run")]
    assert left == ["left out, because a run computes them: --train-iters, --lr"]
    taken = [note for note in larger.notes if note.startswith("torchtitan's defaults")]
    assert "optimizer.lr" not in taken[0]
    assert "optimizer.beta1 = 0.9" in taken[0]


def test_a_section_that_is_computed_leaves_all_of_its_flags_out(tmp_path: Path) -> None:
    text = TITAN.replace("Optimizers.Config(lr=3e-4)", "make_optimizer(3e-4)")
    text = text.replace("local_batch_size=4", "local_batch_size=size()")
    small, _ = read(tmp_path, text)
    own = flags(small)
    assert own.keys().isdisjoint({"--lr", "--weight-decay", "--optimizer", "--global-batch-size"})
    assert "--train-iters" in own
    assert own["--micro-batch-size"] == ["1"], "torchtitan's default in a pipeline"


def test_functions_of_megatron_bridge_are_trainings(tmp_path: Path) -> None:
    own, with_arguments = read(tmp_path, BRIDGE)
    assert flags(own) == {
        "--tensor-model-parallel-size": ["2"], "--pipeline-model-parallel-size": ["4"],
        "--sequence-parallel": [], "--seq-length": ["16384"], "--train-iters": ["1000"],
        "--global-batch-size": ["64"], "--micro-batch-size": ["1"], "--main-grads-dtype": ["fp32"],
        "--use-distributed-optimizer": [],
    }  # fmt: skip
    computed = [note for note in own.notes if "computed" in note]
    assert computed == [
        "line 8: values from _common(): computed, and not read",
        "line 9: values of model from Bridge.from_hf('own/Model-1B').provider(load_weights=False): "
        "computed, and not read",
    ]
    assert any("give --model config.json" in note for note in own.notes)
    assert any("config.to_yaml('config.yaml')" in note for note in own.notes)
    assert flags(with_arguments) == {
        "--num-layers": ["24"], "--hidden-size": ["2048"], "--num-attention-heads": ["16"],
        "--tensor-model-parallel-size": ["2"], "--geglu": [], "--train-iters": ["100"],
        "--global-batch-size": ["32"], "--micro-batch-size": ["2"], "--lr": ["0.0003"],
        "--adam-beta1": ["0.9"], "--adam-beta2": ["0.95"], "--seq-length": ["4096"],
        "--log-interval": ["10"],
    }  # fmt: skip
    assert any("optimizer.** = unknown: computed" in note for note in with_arguments.notes)


def test_arguments_are_given_by_set(tmp_path: Path) -> None:
    _, own = read(tmp_path, BRIDGE, tensor="8", lr="1e-4", other="3")
    assert flags(own)["--tensor-model-parallel-size"] == ["8"]
    assert flags(own)["--lr"] == ["0.0001"]
    source, _ = read_source(tmp_path / "config.py", {"other": "3"})
    assert "--set other: no function has this argument" in source.notes


def test_a_variable_of_plain_keys_is_a_training(tmp_path: Path) -> None:
    text = (
        'ARGS = {"num_layers": 4, "hidden_size": 64, "bf16": True, "lr": rate()}\nOTHER = {"x": 1}'
    )
    (own,) = read(tmp_path, text)
    assert own.words == ("--num-layers", "4", "--hidden-size", "64", "--bf16")
    assert any("line 1: lr = rate(): computed" in note for note in own.notes)


def test_the_command_answers_for_one_of_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.py"
    path.write_text(TITAN)
    from_megatron.main([str(path), "--launch", "2"])
    page = capsys.readouterr().out
    assert page.startswith(f"{path}, line 25: larger (a configuration of torchtitan)\n")
    assert "configurations (--launch N chooses one): 1 small, 2 larger" in page
    from_megatron.main([str(path), "--json"])
    found = json.loads(capsys.readouterr().out)["launches"]
    assert [own["program"].split()[0] for own in found] == ["small", "larger"]
    assert any("left out, because a run" in note for note in found[1]["notes"])
    assert not any("left out, because a run" in note for note in found[0]["notes"])


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("def f(:\n", "is no Python that can be read"),
        ("x = 1", "no configuration of plain data in it"),
        ("def f(): return make()", "config.to_yaml('config.yaml')"),
        ("def f(): return ConfigContainer(x=1)", "no configuration of plain data in it"),
        ("def f(): return f()", "functions that call each other without end"),
        ("def f(): return g(g(0))\ndef g(x): return f()", "functions that call each other without"),
        (
            "".join(f"def f{n}(): return [f{n + 1}(), f{n + 1}()]\n" for n in range(19))
            + "def f19(): return [1]\n" * 1,
            "functions that call each other too often",
        ),
        ("x = " + "-" * 5000 + "1", "config.py: "),
        ("x = " + "a." * 20_000 + "b", "config.py: "),
        ("x = " + "[" * 5000, "config.py: "),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_way_out(
    text: str, fault: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=re.escape(fault)) as refused:
        read(tmp_path, text)
    assert "config.py" in str(refused.value)


def test_nothing_is_run(tmp_path: Path) -> None:
    made = tmp_path / "made"
    text = (
        f"import pathlib\nX = open({str(made)!r}, 'w')\n"
        f"def f(a=pathlib.Path({str(made)!r}).touch()) -> ConfigContainer:\n"
        f"    __import__('os').system('touch {made}')\n"
        "    return ConfigContainer(num_layers=1, hidden_size=2)\n"
    )
    (own,) = read(tmp_path, text)
    assert own.words == ("--num-layers", "1", "--hidden-size", "2")
    assert any(note.startswith("line 4: __import__('os').system(") for note in own.notes)
    assert not made.exists()


def test_numbers_that_grow_without_end_are_computed() -> None:
    rows = "".join("x = x * x\n" for _ in range(40))
    found = PythonData(f"x = 3\n{rows}y = 10 ** 10 ** 10\nz = 1 / 0").names
    assert all(isinstance(found[name], Computed) for name in "xyz")


MADE = "cfg = ConfigContainer(model=Model(num_layers=4, hidden_size=8), train=dict(a=[1]))"
BIG = "def big(c):\n    c.model.num_layers = 80\n"


def layers(*body: str) -> Value:
    """The number of layers of a configuration that a function makes and then changes."""
    lines = "\n".join(f"    {line}" for own in (MADE, *body) for line in own.splitlines())
    found = PythonData(f"{BIG}def config(x=mode()):\n{lines}\n    return cfg\n").call("config")
    assert isinstance(found, Record)
    model = found.values["model"]
    return model.values["num_layers"] if isinstance(model, Record) else model


@pytest.mark.parametrize(
    "change",
    [
        "big(cfg)",
        "big(c=cfg)",
        "big(*[cfg])",
        "y = big(cfg)",
        "own = cfg.model\nown.num_layers = 80",
        "own = cfg['model']\nown['num_layers'] = 80",
        "if big(cfg) is None:\n    pass",
        "cfg.model.__dict__['num_layers'] = 80",
        "cfg.__dict__['model'].__dict__['num_layers'] = 80",
        "own = cfg.model.__dict__\nown['num_layers'] = 80",
    ],
)
def test_functions_of_the_file_change_records_as_a_run_does(change: str) -> None:
    assert layers(change) == 80


@pytest.mark.parametrize(
    "change",
    [
        "other(cfg)",
        "y = other([cfg.model])",
        "cfg.model.update(num_layers=80)",
        "del cfg.model.num_layers",
        "del cfg.model",
        "cfg.model += other()",
        "getattr(cfg, 'model').num_layers = 80",
        "cfg.model[x] = 80",
        "own = cfg[x]\nown.num_layers = 80",
        "own = cfg.model if x else cfg.train\nown.num_layers = 80",
        "own = cfg.model or x\nown.num_layers = 80",
        "if x:\n    cfg.model['num_layers'] = 80",
        "if x:\n    cfg['model'].num_layers = 80",
        "if x:\n    big(cfg)",
        "if x:\n    own = cfg.model\n    own.num_layers = 80",
        "for n in x:\n    cfg.model['num_layers'] = n",
        "for own in [cfg.model]:\n    own.num_layers = 80",
        "with x:\n    cfg.model.update(num_layers=80)",
        "try:\n    big(cfg)\nexcept ValueError:\n    pass",
        "def inner():\n    cfg.model.num_layers = 80\ninner()",
        "inner = lambda: big(cfg)\ninner()",
        "(lambda: big(cfg))()",
        "big(*x)\nother(*[cfg])",
        "setattr(cfg.model, 'num_layers', 80)",
        "for n in x:\n    setattr(cfg.model, n, 80)",
        "for own in (cfg.model, cfg.train):\n    setattr(own, x, 80)",
        "for n, own in {'m': cfg.model}.items():\n    setattr(own, n, 80)",
        "cfg.model.__dict__.update(num_layers=80)",
        "own = cfg.model.__dict__\nown.update(num_layers=80)",
        "for n in x:\n    cfg.model.__dict__.update({n: 80})",
        "dict.update(cfg.model.__dict__, num_layers=80)",
        "for own in cfg.__dict__.values():\n    own.num_layers = 80",
        "cfg.model.__dict__ = x",
        "cfg.model.__dict__ |= x",
        "vars(cfg.model).update(num_layers=80)",
        "change = cfg.model.__setattr__\nchange('num_layers', 80)",
        "change = cfg.model.__dict__.update\nchange(num_layers=80)",
        "exec('cfg.model.num_layers = 80')",
        "locals()['cfg'].model.num_layers = 80",
        "vars()['cfg'].model.num_layers = 80",
        "every = globals\nevery()['cfg'].model.num_layers = 80",
        "run = exec\nrun('cfg.model.num_layers = 80')",
        "builtins.exec('cfg.model.num_layers = 80')",
    ],
)
def test_what_a_statement_that_is_not_followed_may_change_is_not_known(change: str) -> None:
    assert isinstance(layers(change), Computed)
    assert layers(change, "cfg.model = dict(num_layers=5)") == 5


@pytest.mark.parametrize(
    "harmless", ["print(cfg)", "if x is cfg:\n    y = 3", "y = other(cfg.model.num_layers)"]
)
def test_what_changes_no_record_leaves_it_known(harmless: str) -> None:
    assert layers(harmless) == 4


def test_a_value_that_code_may_change_is_told_by_line_and_is_no_flag(tmp_path: Path) -> None:
    text = (
        "def own() -> ConfigContainer:\n"
        "    cfg = ConfigContainer(model=Model(num_layers=4), train=dict(micro_batch_size=2))\n"
        "    cfg.dataset.seq_length = 64\n"
        "    for name, value in overrides():\n"
        "        setattr(cfg.model, name, value)\n"
        "    cfg.train.__dict__.update(overrides())\n"
        "    cfg.train.global_batch_size = 8\n"
        "    return cfg\n"
    )
    (launch,) = read(tmp_path, text)
    assert launch.words == ("--global-batch-size", "8", "--seq-length", "64")
    by_code = "... (may be changed by this line, which is not followed)"
    assert f"line 5: model.num_layers = {by_code}: computed, and not read" in launch.notes
    assert f"line 6: train.micro_batch_size = {by_code}: computed, and not read" in launch.notes


def test_a_value_is_judged_by_the_type_of_its_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.py"
    path.write_text(
        "def own() -> ConfigContainer:\n"
        "    cfg = ConfigContainer(optimizer=dict(lr='abc', weight_decay=True, clip_grad=[1, 2]))\n"
        "    cfg.train = dict(train_iters=10.5, micro_batch_size='2')\n"
        "    return cfg\n"
    )
    from_megatron.main([str(path), "--json"])
    (found,) = json.loads(capsys.readouterr().out)["launches"]
    lines = {own["flag"].split()[0]: own["line"] for own in found["flags"]}
    assert lines["--lr"] == "--lr abc: must be a number"
    assert lines["--weight-decay"].startswith("--weight-decay: takes one value")
    assert lines["--clip-grad"] == "--clip-grad [1,2]: must be a number"
    assert lines["--train-iters"] == "--train-iters 10.5: must be a whole number"
    assert lines["--micro-batch-size"] is None


def test_a_function_that_may_change_a_record_of_the_file_leaves_it_unknown() -> None:
    text = "M = dict(a=1)\ndef f():\n    M.update(a=2)\ndef config(x=y()):\n    if x:\n        f()"
    found = PythonData(f"{text}\n    return dict(m=M)\n").call("config")
    assert isinstance(found, Record)
    assert isinstance(found.values["m"], Record)
    assert isinstance(found.values["m"].values["a"], Computed)


BLOCKS = {
    "if": "if x:\n        return 8",
    "else": "if x:\n        pass\n    else:\n        return 8",
    "nested": "if True:\n        if x:\n            return 8",
    "try": "try:\n        return 8\n    finally:\n        pass",
    "with": "with x:\n        return 8",
    "for": "for _ in x:\n        return 8",
    "match": "match x:\n        case 1:\n            return 8",
}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_a_return_that_is_not_followed_leaves_the_function_unknown(block: str) -> None:
    text = f"def f(c, x=mode()):\n    {block}\n    c.a = 2\n    return 4\n"
    data = PythonData(f"{text}def config():\n    c = dict(a=1)\n    return dict(b=f(c), c=c)\n")
    found = data.call("config")
    assert isinstance(found, Record)
    assert isinstance(found.values["b"], Computed)
    assert isinstance(found.values["c"], Record)
    assert isinstance(found.values["c"].values["a"], Computed)
    assert [note for note in data.notes if "it may return, so the value" in note]


def test_a_return_of_an_inner_function_is_none_of_the_outer() -> None:
    text = "def f(x=mode()):\n    if x:\n        def g():\n            return 8\n    return 4\n"
    assert PythonData(text).call("f") == 4


def test_a_training_whose_function_may_return_early_is_told(tmp_path: Path) -> None:
    early = (
        "def early(x=mode()) -> ConfigContainer:\n    if x:\n        return make()\n    return y\n"
    )
    with pytest.raises(ValueError, match=r"early is left out: line 2: a function that if x may"):
        read(tmp_path, early)
    launches = read(tmp_path, early + BRIDGE)
    assert len(launches) == 2
    source, _ = read_source(tmp_path / "config.py", {})
    assert any(note.startswith("early is left out: line 2:") for note in source.notes)


@pytest.mark.parametrize(
    ("call", "known"),
    [
        ("f(*xs)", {}),
        ("f(7, *xs)", {"a": 7}),
        ("f(*xs, d=9)", {"d": 9}),
        ("f(*[7, 8])", {"a": 7, "b": 8, "c": 3, "d": 4}),
        ("f(7, **xs)", {"a": 7}),
        ("f(7, **dict(b=8))", {"a": 7, "b": 8, "c": 3, "d": 4}),
    ],
)
def test_arguments_that_may_be_given_are_not_their_defaults(
    call: str, known: Mapping[str, int]
) -> None:
    text = "def f(a=1, b=2, c=3, *, d=4):\n    return dict(a=a, b=b, c=c, d=d)\n"
    found = PythonData(f"{text}def g():\n    return {call}\n").call("g")
    assert isinstance(found, Record)
    told = {name for name, own in found.values.items() if isinstance(own, Computed)}
    kept = {"d": 4} if "*xs" in call and "**" not in call else {}
    assert {n: v for n, v in found.values.items() if n not in told} == {**kept, **known}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("d = dict(a=1)\n" + "d = dict(a=d, b=d)\n" * 30, "more than 5,000 values"),
        ("import copy\nd = dict(a=1)\n" + "d = dict(a=d, b=d)\n" * 30 + "e = copy.deepcopy(d)",
         "more than 5,000 values"),
        ("cfg = dict(num_layers=1)\ncfg.me = cfg", "me is a record that holds itself"),
        ("cfg = dict(a=dict())\ncfg.a.b = cfg\ncfg.c = other(cfg)", "a.b is a record that holds"),
        ("d = dict(a=1)\n" + "d = dict(a=d)\n" * 4000, "nested too deeply"),
    ],
)  # fmt: skip
def test_records_without_end_are_refused(text: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(fault)):
        read(tmp_path, text)


def test_a_list_that_is_partly_computed_is_no_flag(tmp_path: Path) -> None:
    text = 'ARGS = {"num_layers": 4, "hidden_size": 64, "betas": [0.9, f()]}'
    (own,) = read(tmp_path, text)
    assert own.words == ("--num-layers", "4", "--hidden-size", "64")
    assert any("betas has f(): computed" in note for note in own.notes)


def test_a_configuration_of_torchtitan_that_a_run_may_change_takes_no_defaults(
    tmp_path: Path,
) -> None:
    text = TITAN.replace("    config.training.seq_len = 4096", "    other(config)")
    path = tmp_path / "config.py"
    path.write_text(text)
    source, (small,) = read_source(path, {})
    assert small.program.startswith("small ")
    assert any(note.startswith("larger is left out: line 28: ") for note in source.notes)


HOSTILE = """
def whole() -> Trainer.Config:
    config = base()
    config.training.steps = 100
    config.metrics.log_freq = 5
    return config


def precision() -> Trainer.Config:
    return Trainer.Config(
        training=Training.Config(mixed_precision_param=choose(), steps=100),
        parallelism=Parallelism.Config(data_parallel_shard_degree=2),
    )


def sections() -> Trainer.Config:
    config = Trainer.Config(
        training=Training.Config(steps=100),
        parallelism=Parallelism.Config(data_parallel_shard_degree=2),
    )
    config.optimizer = make_optimizer()
    config.activation_checkpoint = make_mode()
    config.lr_scheduler.decay_ratio = ratio()
    return config


def batch() -> Trainer.Config:
    return Trainer.Config(
        training=Training.Config(local_batch_size=4, steps=find_steps()),
        lr_scheduler=Scheduler.Config(decay_ratio=0.5),
        parallelism=Parallelism.Config(
            data_parallel_shard_degree=2, data_parallel_replicate_degree=copies()
        ),
        checkpoint=Checkpoint.Config(enable=True, interval=every()),
    )
"""
"""Functions of which some values are not in the file."""


@pytest.mark.parametrize(
    ("name", "unknown", "known"),
    [
        (
            "whole",
            "--optimizer --bf16 --use-distributed-optimizer --recompute-activations --lr "
            "--clip-grad --lr-decay-style --micro-batch-size --global-batch-size --adam-beta1 "
            "--seq-length",
            "--train-iters --log-interval",
        ),
        ("precision", "--bf16", "--optimizer --lr --train-iters --recompute-activations"),
        (
            "sections",
            "--optimizer --lr --adam-eps --weight-decay --recompute-activations --lr-decay-style",
            "--bf16 --train-iters --lr-warmup-iters --use-distributed-optimizer",
        ),
        (
            "batch",
            "--train-iters --lr-wsd-decay-iters --global-batch-size --save-interval",
            "--micro-batch-size --lr-wsd-decay-style --save --load --optimizer",
        ),
    ],
)
def test_a_default_of_torchtitan_that_other_code_may_change_is_no_flag(
    tmp_path: Path, name: str, unknown: str, known: str
) -> None:
    (launch,) = (own for own in read(tmp_path, HOSTILE) if own.program.startswith(f"{name} "))
    assert flags(launch).keys().isdisjoint(unknown.split())
    assert flags(launch).keys() >= {*known.split()}
    told = [note for note in launch.notes if note.startswith("left out, because a run")]
    assert len(told) == 1
    assert {*told[0].partition(": ")[2].split(", ")} >= {*unknown.split()}
    assert not any("x replicas" in note for note in launch.notes)
    assert any(note.endswith("computed, and not read") for note in launch.notes)


def test_ranks_are_not_told_where_a_degree_is_not_known(tmp_path: Path) -> None:
    launches = {own.program.split()[0]: own for own in read(tmp_path, HOSTILE)}
    assert launches["precision"].ranks.per_machine == 2
    assert launches["batch"].ranks.per_machine is None


NAMES = st.sampled_from("abc")
NUMBERS = st.integers(-20, 20).map(str)
LEAVES = st.one_of(
    NUMBERS, st.floats(0.5, 9).map(repr), st.sampled_from(["True", "False", "None", "'x'", "LONG"])
)
SUMS = st.tuples(NUMBERS, st.sampled_from(["+", "-", "*"]), NUMBERS).map(
    lambda own: f"({own[0]} {own[1]} {own[2]})"
)
VALUES: st.SearchStrategy[str] = st.recursive(
    LEAVES | SUMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2).map(lambda own: f"[{', '.join(own)}]"),
        st.dictionaries(NAMES, inner, max_size=2).map(
            lambda own: f"Made({', '.join(f'{n}={v}' for n, v in own.items())})"
        ),
        st.dictionaries(NAMES, inner, max_size=2).map(
            lambda own: f"dict({', '.join(f'{n}={v}' for n, v in own.items())})"
        ),
        st.tuples(inner, LEAVES, inner).map(lambda own: f"({own[0]} if {own[1]} else {own[2]})"),
        inner.map(lambda own: f"built({own})"),
        inner.map(lambda own: f"built(u={own}, t=3)"),
    ),
    max_leaves=6,
)
STATEMENTS = st.one_of(
    st.tuples(NAMES, VALUES).map(lambda own: f"cfg.{own[0]} = {own[1]}"),
    st.tuples(NAMES, NAMES).map(lambda own: f"cfg.{own[0]} = cfg.{own[1]}"),
    st.tuples(NAMES, VALUES, VALUES, NAMES).map(
        lambda own: (
            f"if cfg.{own[0]} is None:\n        cfg.{own[3]} = {own[1]}\n"
            f"    else:\n        cfg.{own[3]} = {own[2]}"
        )
    ),
    st.tuples(NAMES, VALUES).map(lambda own: f"cfg.inner.{own[0]} = {own[1]}"),
    st.tuples(VALUES, VALUES).map(lambda own: f"cfg.a, cfg.b = {own[0]}, {own[1]}"),
)


class Made(SimpleNamespace):
    """Stands in for every class of a configuration."""


def as_data(value: Any) -> Any:
    """A value of a run in plain types."""
    if isinstance(value, SimpleNamespace | dict):
        values = value if isinstance(value, dict) else vars(value)
        return {name: as_data(own) for name, own in values.items()}
    return [as_data(own) for own in value] if isinstance(value, list | tuple) else value


def as_read(value: Value) -> Any:
    if isinstance(value, Record):
        return {name: as_read(own) for name, own in value.values.items()}
    assert not isinstance(value, Computed), value
    return [as_read(own) for own in value] if isinstance(value, list) else value


@given(st.lists(STATEMENTS, max_size=6))
def test_known_values_are_those_of_a_run(statements: list[str]) -> None:
    """The test's own harmless file is run beside; in it no value is computed."""
    body = "\n    ".join(["cfg = Made(a=None, b=1, c=LONG, inner=Made())", *statements])
    text = (
        "LONG = 2 * 64\n\n\ndef built(t, u=5):\n    made = Made(a=t)\n    made.b = u\n"
        f"    return made\n\n\ndef config():\n    {body}\n    return cfg\n"
    )
    run: Mapping[str, Any] = {"Made": Made}
    exec(text, run)  # type: ignore[arg-type]
    assert as_read(PythonData(text).call("config")) == as_data(run["config"]())
