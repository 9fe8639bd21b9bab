"""Records, their packages, and runs that only evaluate: what their flags become, or why not."""

from pathlib import Path

import pytest

from megatron.run import records
from megatron.run.command_line import parse
from megatron.run.records import RecordSettings
from megatron.run.run_config import RunConfig

BASE = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
    "--lr 1e-3 --train-iters 9 --device cpu --mock-data --vocab-size 99 "
)


def run(flags: str) -> RunConfig:
    return parse((BASE + flags).split(), world_size=1)


def has(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Let just these packages be installed."""
    monkeypatch.setattr(records, "is_installed", lambda name: name in packages)


def test_nothing_is_recorded_by_default() -> None:
    assert run("").log.records == RecordSettings()


def test_flags_of_records(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, "tensorboard", "wandb")
    config = run(
        "--log-jsonl a.jsonl --tensorboard-dir curves --tensorboard-log-interval 5 "
        "--tensorboard-queue-size 9 --log-timers-to-tensorboard --log-memory-to-tensorboard "
        "--log-validation-ppl-to-tensorboard --log-world-size-to-tensorboard --wandb-project p "
        "--wandb-exp-name n --wandb-entity e --wandb-save-dir w --no-live-display --save s"
    )
    assert config.log.records == RecordSettings(
        log_jsonl=Path("a.jsonl"),
        tensorboard_dir=Path("curves"),
        tensorboard_log_interval=5,
        tensorboard_queue_size=9,
        log_timers_to_tensorboard=True,
        log_memory_to_tensorboard=True,
        log_validation_ppl_to_tensorboard=True,
        log_world_size_to_tensorboard=True,
        wandb_project="p",
        wandb_exp_name="n",
        wandb_entity="e",
        wandb_save_dir=Path("w"),
        no_live_display=True,
    )
    assert config.notes == ()


def test_weights_and_biases_writes_beside_the_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, "wandb")
    records = run("--wandb-project p --wandb-name n --save s").log.records
    assert records.wandb_save_dir == Path("s/wandb")
    assert records.wandb_exp_name == "n"


@pytest.mark.parametrize("package", ["tensorboard", "tensorboardX"])
def test_one_of_two_packages_writes_for_tensorboard(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    has(monkeypatch, package)
    assert run("--tensorboard-dir curves").log.records.tensorboard_dir == Path("curves")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tensorboard-dir d", "--tensorboard-dir d: .* pip install tensorboard, or use --log-"),
        ("--wandb-project p", "--wandb-project p: .* pip install wandb, or use --log-jsonl"),
        ("--skip-train", "--skip-train would evaluate random weights: add --load"),
        ("--skip-train --load x --eval-iters 0", "--skip-train evaluates nothing .*--eval-iters 0"),
        ("--skip-train --load x --split 1", "--skip-train evaluates nothing: --split 1 leaves"),
        ("--skip-train --load x --profile", "--skip-train does not go with --profile"),
    ],
)
def test_refused_with_the_way_out(
    flags: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    has(monkeypatch)
    with pytest.raises(ValueError, match=f"^{message}"):
        run(flags)


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--log-timers-to-tensorboard", "--log-timers-to-tensorboard changes nothing without"),
        ("--wandb-exp-name n", "--wandb-exp-name n changes nothing without --wandb-project"),
        ("--skip-train --load x --save y", "--save y changes nothing: --skip-train"),
    ],
)
def test_noted(flags: str, note: str) -> None:
    assert [told for told in run(flags).notes if told.startswith(note)]


def test_a_folder_of_records_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "records_of_a_run").mkdir()
    assert not records.is_installed("records_of_a_run")
    (tmp_path / "records_of_a_run" / "__init__.py").touch()
    assert records.is_installed("records_of_a_run")


@pytest.mark.parametrize(
    ("flags", "interval", "at_end"),
    [
        ("", None, ()),
        ("--eval-interval 3", 3, ("validation", "test")),
        ("--eval-interval 3 --eval-iters 0", None, ()),
        ("--eval-interval 3 --split 9,1", 3, ("validation",)),
        ("--eval-interval 3 --split 9,0,1", None, ("test",)),
        ("--skip-train --load x", None, ("validation", "test")),
        ("--skip-train --load x --eval-interval 3 --split 9,1", None, ("validation",)),
    ],
)
def test_what_is_evaluated(flags: str, interval: int | None, at_end: tuple[str, ...]) -> None:
    train = run(flags).train
    assert (train.eval_interval, train.final_sets) == (interval, at_end)


def test_without_training_weights_are_loaded_and_nothing_is_saved() -> None:
    checkpoint = run("--skip-train --load x --save y").checkpoint
    assert checkpoint.exit_on_missing_checkpoint
    assert not checkpoint.load_optimizer
    assert checkpoint.save is None


@pytest.mark.parametrize(
    ("flags", "folder"),
    [
        ("--save x", None),
        ("--save x --log-progress", Path("x")),
        ("--log-progress", None),
        ("--save x --log-progress --skip-train --load x", None),
    ],
)
def test_progress_is_written_beside_the_checkpoints(flags: str, folder: Path | None) -> None:
    assert run(flags).log.records.progress_folder == folder
