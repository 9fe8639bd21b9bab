"""A run that is saved and loaded goes on as if nothing had happened, to the last bit."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
from checkpoint.test_layouts import everything
from correctness.rank_runs import CPU, Pieces
from correctness.short_runs import Job, Layout
from harness.marks import full
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions

from megatron.checkpoint import folder, storage
from megatron.checkpoint.boxed import BoxedTensor
from megatron.checkpoint.settings import CheckpointSettings
from megatron.data.microbatch import Microbatch, MicrobatchLoader
from megatron.parallel.groups import make_groups
from megatron.run.run_config import RunConfig
from megatron.training.checkpointing import Checkpoints
from megatron.training.exit_signals import ExitSignals
from megatron.training.loop import train
from megatron.training.open_checkpoints import writer_hosts
from megatron.training.open_data import Data
from megatron.training.own_tokens import kept_tokens
from megatron.training.progress import Progress, last_iteration
from megatron.training.rendezvous import UserError
from megatron.training.setup import build_train_state

JOB = Job(
    GPTOptions(num_layers=4, vocab_size=61), microbatches=4, iterations=6, sequence=12, dropout=0.1
)


class Batches(MicrobatchLoader):
    """Global batches in which every microbatch is one sample.

    Args:
        batches: of all replicas.
        replica: number of the replica, and number of replicas.
        kept: positions of a sample that the rank keeps; all by default.
    """

    def __init__(
        self,
        batches: Sequence[Sequence[Any]],
        replica: tuple[int, int] = (0, 1),
        kept: torch.Tensor | None = None,
    ) -> None:
        self._batches = batches
        self._kept = kept
        self._replica, self._replicas = replica
        self.consumed_samples = 0

    def next_batch(self) -> list[Microbatch]:
        batch = self._batches[self.consumed_samples // JOB.microbatches]
        self.consumed_samples += JOB.microbatches
        return [
            Microbatch(m.tokens, m.labels, m.loss_mask).part(self._kept)
            for m in batch[self._replica :: self._replicas]
        ]

    def digest(self, sample: int) -> str:
        batch, place = divmod(sample, JOB.microbatches)
        return str(self._batches[batch][place].tokens.tolist())


@dataclass
class Ended:
    """What a rank holds at the end, and what it printed."""

    held: Pieces
    said: str


def run_on_rank(
    rank: int, world_size: int, *, config: RunConfig, data_seed: int = 0
) -> Ended | str:
    groups = make_groups(config.parallel.grid, CPU, timedelta(seconds=60))
    state = build_train_state(config, groups)
    mine = groups.replica, kept_tokens(config, groups.context.rank)
    evaluated = {"validation": Batches(JOB.batches(seed=1) * 3, *mine)}
    data = Data(Batches(JOB.batches(data_seed), *mine), evaluated)
    with redirect_stdout(io.StringIO()) as out:
        try:
            train(config, state, data)
        except UserError as error:
            state.close()
            return str(error)
    return Ended(everything(state), out.getvalue())


def run(
    ranks: RankPool,
    layout: Layout,
    *,
    exit_interval: int | None = None,
    post_validation: bool = False,
    optimizer: Literal["adam", "sgd", "muon"] = "adam",
    dtype: torch.dtype = torch.bfloat16,
    **checkpoint: Any,
) -> list[Any]:
    config = JOB.config(layout, dtype)
    config = replace(
        config,
        train=replace(config.train, exit_interval=exit_interval, eval_interval=2),
        optimizer=replace(config.optimizer, post_validation=post_validation, optimizer=optimizer),
        log=replace(config.log, peak_tflops=1.0),
        checkpoint=CheckpointSettings(**checkpoint),
    )
    return ranks.run(run_on_rank, layout.world_size, config=config)


def assert_same(one: list[Ended], other: list[Ended]) -> None:
    for a, b in zip(one, other, strict=True):
        assert a.held.keys() == b.held.keys()
        for name, (_, parts) in a.held.items():
            for (box, value), (same_box, same) in zip(parts, b.held[name][1], strict=True):
                assert box == same_box
                assert torch.equal(value, same), name


def losses(said: str) -> list[str]:
    """Losses and validation losses as printed."""
    return [line[line.index("loss") :] for line in said.splitlines() if "loss" in line]


@pytest.mark.parametrize(
    ("layout", "post_validation", "asynchronous"),
    [
        full(Layout(1, "none"), False, False),
        (Layout(2, "vocab-2", "zb-h1"), True, True),
        full(Layout(2, "none", "zb-v"), False, True),
        full(Layout(1, "none", replicas=2), False, True),
        full(Layout(2, "none", tensor=2, sequence=True), True, True),
        full(Layout(1, "vocab-2", context=2, sharded=True), False, False),
        full(Layout(2, "none", replicas=2), False, False),
    ],
    ids=str,
)
def test_a_resumed_run_is_the_unbroken_one(
    layout: Layout, post_validation: bool, asynchronous: bool, ranks: RankPool, tmp_path: Path
) -> None:
    how: dict[str, Any] = {"post_validation": post_validation}
    unbroken = run(ranks, layout, **how)
    first = run(ranks, layout, exit_interval=3, save=tmp_path, async_save=asynchronous, **how)
    assert folder.candidates(tmp_path) == [3]
    assert "saved" in first[0].said
    second = run(ranks, layout, load=tmp_path, **how)
    assert "iteration 3" in second[0].said
    assert_same(second, unbroken)
    assert losses(first[0].said) + losses(second[0].said) == losses(unbroken[0].said)


@pytest.mark.parametrize("optimizer", [full("sgd"), "muon"])
def test_every_optimizer_goes_on_as_if_nothing_had_happened(
    optimizer: Literal["sgd", "muon"], ranks: RankPool, tmp_path: Path
) -> None:
    layout = Layout(2, "vocab-2")
    how: dict[str, Any] = {"optimizer": optimizer}
    unbroken = run(ranks, layout, **how)
    run(ranks, layout, exit_interval=3, save=tmp_path, **how)
    assert_same(run(ranks, layout, load=tmp_path, **how), unbroken)
    [alone] = run(ranks, Layout(1, "none"), load=tmp_path, **how)
    ours, expected = losses(alone.said), losses(unbroken[0].said)[-len(losses(alone.said)) :]
    for line, same in zip(ours, expected, strict=True):  # the last digits depend on the layout
        assert _numbers(line) == pytest.approx(_numbers(same), rel=1e-2)


def _numbers(line: str) -> list[float]:
    return [float(found) for found in re.findall(r"\d\.\d+(?:E[+-]\d+)?", line)]


def test_another_optimizers_state_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    layout = Layout(1, "none")
    run(ranks, layout, exit_interval=3, save=tmp_path)
    [said] = run(ranks, layout, optimizer="sgd", load=tmp_path)
    assert said.startswith("--load: ")
    assert "saved with --optimizer adam" in said
    assert "--optimizer sgd" in said
    assert "--no-load-optim" in said
    [ended] = run(ranks, layout, optimizer="sgd", load=tmp_path, load_optimizer=False)
    assert "iteration 3" in ended.said


def test_saves_come_when_due_and_old_ones_go(ranks: RankPool, tmp_path: Path) -> None:
    run(ranks, Layout(2, "vocab-2"), save=tmp_path, save_interval=1, save_retain_interval=4)
    assert folder.complete(tmp_path) == [4, 6]


def test_a_run_deletes_its_own_checkpoints_only(ranks: RankPool, tmp_path: Path) -> None:
    layout = Layout(1, "none")
    run(ranks, layout, exit_interval=3, save=tmp_path, save_interval=1)
    how: dict[str, Any] = {"save": tmp_path, "save_interval": 2, "save_retain_interval": 100}
    run(ranks, layout, exit_interval=5, **how)
    assert folder.complete(tmp_path) == [1, 3, 5], "1 and 3 are of the first run"
    run(ranks, layout, load=tmp_path, **how)
    assert folder.complete(tmp_path) == [6], "a run that goes on has none but its own"


def test_a_checkpoint_that_cannot_be_deleted_does_not_end_the_run(
    ranks: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "iter_0000002.deleted").write_text("in the way")
    how: dict[str, Any] = {"save_interval": 1, "save_retain_interval": 4, "async_save": True}
    [ended] = run(ranks, Layout(1, "none"), save=tmp_path, **how)
    assert "iter_0000002.deleted" in ended.said
    assert folder.complete(tmp_path) == [2, 4, 6]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failed_save_ends_the_run_only_if_it_is_the_last(
    asynchronous: bool, ranks: RankPool, tmp_path: Path
) -> None:
    how: dict[str, Any] = {"save": tmp_path, "save_interval": 4, "async_save": asynchronous}
    in_the_way = folder.partial_of(tmp_path, 4)
    in_the_way.write_text("no folder")
    [ended] = run(ranks, Layout(1, "none"), **how)
    assert "iter_0000004 was not written" in ended.said
    assert folder.complete(tmp_path) == [6]
    in_the_way.rename(folder.partial_of(tmp_path, 6))
    [said] = run(ranks, Layout(1, "none"), **how)
    [reason] = re.findall(
        r"--save: .*iter_0000006 was not written: (.*); make room in .*--load", said
    )
    assert "Not a directory" in reason, "the last line says what is wrong"


def test_a_folder_of_checkpoints_that_are_not_ours_is_refused(
    ranks: RankPool, tmp_path: Path
) -> None:
    (tmp_path / folder.POINTER).write_text("1000")
    (tmp_path / "iter_0001000").mkdir()
    [said] = run(ranks, Layout(1, "none"), load=tmp_path)
    assert "every checkpoint there is damaged" in said


def test_a_damaged_checkpoint_gives_way_to_an_older_one(ranks: RankPool, tmp_path: Path) -> None:
    layout = Layout(2, "vocab-2")
    run(ranks, layout, save=tmp_path, save_interval=2)
    for iteration, name in ((6, "__1_0.distcp"), (4, "common.json")):
        (folder.folder_of(tmp_path, iteration) / name).write_bytes(b"what?")
    explicit = run(ranks, layout, load=tmp_path, ckpt_step=6)
    assert all("--ckpt-step 6" in said and "__1_0.distcp has 5 bytes" in said for said in explicit)
    found = run(ranks, layout, load=tmp_path)
    assert "__1_0.distcp has 5 bytes" in found[0].said
    assert "common.json has 5 bytes" in found[0].said
    assert "iteration 2" in found[0].said
    (folder.folder_of(tmp_path, 6) / folder.MANIFEST).unlink()
    found = run(ranks, layout, load=tmp_path)
    assert "iter_0000006 has no manifest.json" in found[0].said
    assert "iteration 2" in found[0].said
    (folder.folder_of(tmp_path, 2) / ".metadata").unlink()
    for said in run(ranks, layout, load=tmp_path):
        assert "every checkpoint there is damaged" in said


def test_what_is_missing_is_told(ranks: RankPool, tmp_path: Path) -> None:
    layout = Layout(1, "none")
    (tmp_path / "none").mkdir()
    [ended] = run(ranks, layout, load=tmp_path / "none")
    assert "starts from random weights" in ended.said
    [said] = run(ranks, layout, load=tmp_path / "none", exit_on_missing_checkpoint=True)
    assert "--exit-on-missing-checkpoint" in said
    [said] = run(ranks, layout, load=tmp_path / "typo")
    assert "typo does not exist" in said
    run(ranks, layout, save=tmp_path, save_optimizer=False)
    [said] = run(ranks, layout, load=tmp_path)
    assert "--no-save-optim; add --no-load-optim or --finetune" in said
    [said] = run(ranks, layout, load=tmp_path / "iter_0000006")
    assert f"is one checkpoint: give the folder of all, {tmp_path}" in said
    [said] = run(ranks, layout, load=tmp_path, ckpt_step=5)
    assert "--ckpt-step 5" in said
    assert "[6]" in said
    [done] = run(ranks, layout, load=tmp_path, load_optimizer=False)
    assert "nothing to train" in done.said
    [tuned] = run(ranks, layout, load=tmp_path, finetune=True)
    assert "iteration 0" in tuned.said
    assert len(losses(tuned.said)) == len(losses(ended.said))


def test_a_changed_learning_rate_is_told(ranks: RankPool, tmp_path: Path) -> None:
    run(ranks, Layout(1, "none"), exit_interval=3, save=tmp_path)
    config = JOB.config(Layout(1, "none"), torch.bfloat16)
    config = replace(
        config,
        optimizer=replace(config.optimizer, min_lr=1e-9),
        log=replace(config.log, peak_tflops=1.0),
        checkpoint=CheckpointSettings(load=tmp_path),
    )
    [ended] = ranks.run(run_on_rank, 1, config=config)
    told = [line for line in ended.said.splitlines() if line.startswith("--load:")]
    assert told == [
        f"--load: min_lr was {JOB.lr / 10} in the run so far, and is 1e-09 now",
    ]


def test_another_model_of_the_same_shapes_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    run(ranks, Layout(1, "none"), save=tmp_path)
    config = JOB.config(Layout(1, "none"), torch.bfloat16)
    config = replace(
        config,
        model=config.model.replaced(norm_epsilon=1e-3, activation="swiglu", attention_dropout=0.2),
        checkpoint=CheckpointSettings(load=tmp_path),
    )
    [said] = ranks.run(run_on_rank, 1, config=config)
    assert "--norm-epsilon 1e-05 there, --norm-epsilon 0.001 here; no --swiglu there, --sw" in said
    assert "--use-checkpoint-args" in said


def test_data_in_another_order_are_told(ranks: RankPool, tmp_path: Path) -> None:
    run(ranks, Layout(1, "none"), exit_interval=3, save=tmp_path)
    config = JOB.config(Layout(1, "none"), torch.bfloat16)
    config = replace(
        config,
        log=replace(config.log, peak_tflops=1.0),
        checkpoint=CheckpointSettings(load=tmp_path),
    )
    longer = replace(config, train=replace(config.train, train_iters=9, exit_interval=4))

    def told(config: RunConfig, data_seed: int) -> list[str]:
        [ended] = ranks.run(run_on_rank, 1, config=config, data_seed=data_seed)
        return [line for line in ended.said.splitlines() if "another order" in line]

    assert not told(config, 0)
    assert not told(longer, 0), "a longer run whose data begin alike"
    [line] = told(longer, 2)
    assert "(--train-iters), 24 before and 36 now" in line
    assert "--exit-interval" in line
    [line] = told(config, 2)
    assert "--train-iters" not in line
    assert "--data-path" in line


def test_batches_of_another_size_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    run(ranks, Layout(1, "none"), save=tmp_path, exit_interval=1)
    config = JOB.config(Layout(1, "none"), torch.bfloat16)
    larger = replace(config.train, global_batch_size=2 * JOB.microbatches)
    config = replace(config, train=larger, checkpoint=CheckpointSettings(load=tmp_path))
    [said] = ranks.run(run_on_rank, 1, config=config)
    assert "--global-batch-size 8: the 1 iterations in --load have used 4 samples" in said
    assert "use 4, give its length in samples (--train-samples), or --finetune" in said


@pytest.mark.parametrize(
    ("exit_interval", "start", "last"),
    [(None, 0, 6), (None, 6, 6), (4, 0, 4), (4, 3, 4), (4, 4, 6), (2, 3, 4), (9, 0, 6)],
)
def test_a_run_ends_at_the_next_multiple(exit_interval: int | None, start: int, last: int) -> None:
    train_config = JOB.config(Layout(1, "none")).train
    train_config = replace(train_config, exit_interval=exit_interval)
    assert last_iteration(train_config, Progress(start, start * JOB.microbatches)) == last


HOLDER = """
import sys, time
from pathlib import Path
from megatron.checkpoint import lock
with lock.held(Path(sys.argv[1]), 0):
    print("held", flush=True)
    time.sleep(60)
"""


def test_two_jobs_do_not_save_to_one_folder(
    ranks: RankPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second one changes nothing there, and both of its ranks say why."""
    left = folder.begin(tmp_path, 10)
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            said = run(ranks, Layout(2, "vocab-2"), save=tmp_path, load=tmp_path)
        finally:
            other.kill()
    for line in said:
        assert f"--save: {tmp_path} is in use: process {other.pid} of " in line
        assert "end that job, or name another folder" in line
    assert left.exists()
    run(ranks, Layout(2, "vocab-2"), save=tmp_path, load=tmp_path)
    assert folder.complete(tmp_path) == [6]


def save_slowly(
    rank: int, world_size: int, *, config: RunConfig, timeout: float, lasts: float
) -> list[str]:
    """Save twice: first rank 1 takes long to write, then rank 0 to delete the older one."""
    groups = make_groups(config.parallel.grid, CPU, timedelta(seconds=timeout))
    state = build_train_state(config, groups)
    said: list[str] = []
    hosts = writer_hosts(groups, config.checkpoint)
    checkpoints = Checkpoints(config, state, hosts, said.append)

    def slow(operation: Any) -> Any:
        def run(*args: Any) -> Any:
            time.sleep(lasts)
            return operation(*args)

        return run

    for iteration in (1, 2):
        with pytest.MonkeyPatch.context() as patched:
            if rank == 1 and iteration == 1:
                patched.setattr(os, "fsync", slow(os.fsync))
            if rank == 0 and iteration == 2:
                patched.setattr(folder, "remove", slow(folder.remove))
            checkpoints.save(Progress(iteration, iteration))
            checkpoints.report(wait=True)
        groups.world_hosts.barrier()
        assert not checkpoints.fault
    state.close()
    return said


@pytest.mark.full
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_may_take_longer_than_a_collective(
    asynchronous: bool, ranks: RankPool, tmp_path: Path
) -> None:
    config = JOB.config(Layout(2, "vocab-2"))
    how = CheckpointSettings(save=tmp_path, save_retain_interval=9, async_save=asynchronous)
    config = replace(config, checkpoint=how)
    ranks.run(save_slowly, 2, config=config, timeout=3.0, lasts=4.0)
    assert folder.complete(tmp_path) == [2]


def share_on_rank(rank: int, world_size: int, *, config: RunConfig) -> tuple[int, int]:
    """Save; return the bytes that this rank has copied and written."""
    groups = make_groups(config.parallel.grid, CPU, timedelta(seconds=60))
    state = build_train_state(config, groups)
    written: list[int] = []
    checkpoints = Checkpoints(
        config, state, writer_hosts(groups, config.checkpoint), lambda text: None
    )
    with pytest.MonkeyPatch.context() as patched:
        copied = BoxedTensor.copied

        def counted(self: BoxedTensor, to: BoxedTensor | None = None) -> BoxedTensor:
            made = copied(self, to)
            written.append(made.as_subclass(torch.Tensor).nbytes)
            return made

        patched.setattr(BoxedTensor, "copied", counted)
        checkpoints.save(Progress(1, 1))
        checkpoints.report(wait=True)
    state.close()
    assert config.checkpoint.save is not None
    file = folder.folder_of(config.checkpoint.save, 1) / f"__{rank}_0.distcp"
    return sum(written), file.stat().st_size


def test_replicas_share_what_is_copied_and_written(ranks: RankPool, tmp_path: Path) -> None:
    sizes = []
    for replicas in (1, 2):
        config = JOB.config(Layout(2, "none", replicas=replicas))
        how = CheckpointSettings(save=tmp_path / str(replicas), async_save=True)
        config = replace(config, checkpoint=how)
        sizes.append(ranks.run(share_on_rank, 2 * replicas, config=config))
    one, two = sizes
    for what in (0, 1):  # copied, written
        whole, parts = ([rank[what] for rank in by_rank] for by_rank in (one, two))
        assert sum(parts) == pytest.approx(sum(whole), rel=0.05), "nothing twice"
        assert max(parts) < 0.6 * max(whole)


class SpoiltAtTheEnd(Batches):
    """Spoils a weight when the last batch is read; without a weight it says that data are bad."""

    def __init__(self, batches: Sequence[Sequence[Any]], weight: torch.Tensor | None) -> None:
        super().__init__(batches)
        self._weight = weight

    def next_batch(self) -> list[Microbatch]:
        batch = super().next_batch()
        if self.consumed_samples == JOB.microbatches * JOB.iterations:
            if self._weight is None:
                raise ValueError("iteration 6: a foreign token")
            self._weight.detach().fill_(torch.nan)
        return batch


def end_badly(rank: int, world_size: int, *, config: RunConfig, by_data: bool) -> list[int]:
    """Train with slow saves until the last iteration fails; return what is saved then."""
    groups = make_groups(config.parallel.grid, CPU, timedelta(seconds=60))
    state = build_train_state(config, groups)
    write, (parameter, *_) = storage.write, state.parameters

    def slowly(*args: Any, **options: Any) -> Path:
        time.sleep(1)
        return write(*args, **options)

    weight = None if by_data else parameter.parameter
    data = Data(SpoiltAtTheEnd(JOB.batches(0), weight))
    expected = UserError if by_data else FloatingPointError
    with (
        redirect_stdout(io.StringIO()),
        patch.object(storage, "write", slowly),
        pytest.raises(expected, match=f"iteration {JOB.iterations}: "),
    ):
        train(config, state, data)
    state.close()
    assert config.checkpoint.save is not None
    return folder.complete(config.checkpoint.save)


@pytest.mark.parametrize(
    ("post_validation", "by_data"), [(False, False), (True, False), (False, True)]
)
def test_a_bad_last_iteration_lets_an_asynchronous_save_end(
    post_validation: bool, by_data: bool, ranks: RankPool, tmp_path: Path
) -> None:
    """A step that is validated afterwards shows its loss only when all iterations are done."""
    before = JOB.iterations - 1
    config = JOB.config(Layout(2, "vocab-2"), torch.float32)
    config = replace(
        config,
        optimizer=replace(config.optimizer, post_validation=post_validation),
        log=replace(config.log, peak_tflops=1.0),
        checkpoint=CheckpointSettings(save=tmp_path, save_interval=before, async_save=True),
    )
    assert ranks.run(end_badly, 2, config=config, by_data=by_data) == [[before]] * 2


def leave_by_signal(rank: int, world_size: int, *, config: RunConfig) -> str:
    """Train until rank 1 gets a signal while it reads its third batch; return what is printed."""
    groups = make_groups(config.parallel.grid, CPU, timedelta(seconds=60))
    state = build_train_state(config, groups)
    before = signal.getsignal(signal.SIGUSR1)
    signals = ExitSignals(config.guard.exit_signals)
    loader = Batches(JOB.batches(0))
    read = loader.next_batch

    def next_batch() -> list[Microbatch]:
        batch = read()
        if rank == 1 and loader.consumed_samples == 3 * JOB.microbatches:
            os.kill(os.getpid(), signal.SIGUSR1)
        return batch

    with redirect_stdout(io.StringIO()) as said, patch.object(loader, "next_batch", next_batch):
        train(config, state, Data(loader), signals)
    signal.signal(signal.SIGUSR1, before)
    return said.getvalue()


def test_a_signal_ends_a_run_that_saves_nothing(ranks: RankPool) -> None:
    """The ranks agree one iteration after the signal; the fifth of six is never begun."""
    config = JOB.config(Layout(2, "vocab-2"), torch.float32)
    config = replace(
        config,
        log=replace(config.log, peak_tflops=1.0),
        guard=replace(config.guard, exit_signal_handler=True),
    )
    said = ranks.run(leave_by_signal, 2, config=config)[0]
    assert "exiting at iteration 4 after SIGUSR1 (--exit-signal-handler)" in said
    assert "nothing is saved, without --save" in said
    assert len(losses(said)) == 4
