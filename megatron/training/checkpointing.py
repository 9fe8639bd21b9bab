"""Saves a run, and brings a run back to where a checkpoint was saved, whatever its layout.

Nothing random is saved: dropout and the order of the data are functions of the seed, the iteration
and the samples consumed. The learning rate is a function of the samples consumed.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from megatron.checkpoint import folder, storage
from megatron.checkpoint.background import Background
from megatron.checkpoint.boxed import BoxedTensor
from megatron.checkpoint.common import read_checked_common
from megatron.checkpoint.config import CheckpointConfig
from megatron.checkpoint.folder import DamagedError
from megatron.checkpoint.storage import SaveError
from megatron.checkpoint.train_tensors import tensors_of
from megatron.config.run_config import RunConfig
from megatron.parallel.groups import ConnectedAxis, Groups
from megatron.training.rendezvous import UserError
from megatron.training.setup import TrainState

MAY_CHANGE: Final = frozenset(
    {
        "seq_length",
        "attention_dropout",
        "hidden_dropout",
        "init_method_std",
        "label_smoothing",
        "z_loss_coeff",
    }
)
"""Fields of ``ModelConfig`` with which the weights of a checkpoint mean the same."""


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Attributes:
        iteration: finished iterations.
        consumed_samples: samples that they have used.
    """

    iteration: int = 0
    consumed_samples: int = 0


def writer_hosts(groups: Groups, config: CheckpointConfig) -> ConnectedAxis:
    """Return the ranks of the job on CPUs; every rank calls it with the same configuration.

    Asynchronous saves get a process group of their own, because others are in use meanwhile.
    """
    hosts = groups.world_hosts
    if not config.asynchronous or hosts.size == 1:
        return hosts
    return replace(hosts, group=dist.new_group(backend="gloo", group_desc="checkpoint"))


def _same_folder(one: Path | None, other: Path | None) -> bool:
    return one is not None and other is not None and one.resolve() == other.resolve()


class Checkpoints:
    """Saves and loads the state of a rank; all ranks call every method alike.

    Args:
        config: the run.
        state: this rank.
        hosts: all ranks of the job on CPUs, with a group that nothing else uses if saves are
            asynchronous.
        say: prints on the first rank.

    Attributes:
        failed: whether the last save that has ended has failed, the same on every rank.
    """

    def __init__(
        self,
        config: RunConfig,
        state: TrainState,
        hosts: ConnectedAxis,
        say: Callable[[str], None],
    ) -> None:
        self._config = config.checkpoint
        self._model = config.model
        self._optimizer = config.optimizer
        self._state = state
        self._hosts = hosts
        self._say = say
        self.failed = False
        self._background = Background()
        self._copies: dict[str, torch.Tensor] = {}
        self._of_others: set[int] = set()

    def load(self) -> Progress:
        """Load what the configuration asks for; return how far that run had come.

        Raises:
            UserError: there is no such checkpoint, it is damaged, or it is of another model.
        """
        config, progress = self._config, self._load()
        goes_on = _same_folder(config.load, config.save) and progress.iteration > 0
        if config.save is not None and not goes_on:
            self._of_others = set(folder.complete(config.save))
        return progress

    def _load(self) -> Progress:
        root = self._config.load
        if root is None:
            return Progress()
        if (root / folder.MANIFEST).is_file():
            raise UserError(
                f"--load {root} is one checkpoint: give the folder of all, {root.parent}, and "
                "--ckpt-step for a certain one"
            )
        if not root.is_dir() and not _same_folder(root, self._config.save):
            raise UserError(f"--load {root} does not exist: correct it, or leave it out")
        started = time.perf_counter()
        where = self._choose(root)
        if where is None:
            if self._config.must_load:
                raise UserError(f"--load {root} has no checkpoint (--exit-on-missing-checkpoint)")
            self._say(
                f"--load {root} has no checkpoint: training starts from random weights (with "
                "--exit-on-missing-checkpoint it ends)"
            )
            return Progress()
        try:
            progress = self._read(where)
        except DamagedError as error:
            raise UserError(f"--load {root}: {error}") from error
        seconds = time.perf_counter() - started
        self._say(f"loaded {where} in {seconds:.1f} s: iteration {progress.iteration}")
        return progress

    def save(self, progress: Progress) -> None:
        """Write a checkpoint; if that fails, say so and go on."""
        root = self._config.save
        assert root is not None, "nowhere to save"
        self.report(wait=True)
        tensors = self._tensors(moments=self._config.save_optimizer)
        common = self._common(progress)
        if not self._config.asynchronous:
            self._say(self._write(root, progress.iteration, tensors, common))
            return
        started = time.perf_counter()
        copies = self._copied(tensors)
        stalled = time.perf_counter() - started
        self._background.start(lambda: self._write(root, progress.iteration, copies, common))
        self._say(f"checkpoint of iteration {progress.iteration} begun; copied in {stalled:.2f} s")

    def report(self, *, wait: bool = False) -> None:
        """Say how an asynchronous save ended, if it has."""
        outcome = self._background.wait() if wait else self._background.finished()
        if outcome is not None:
            self._say(outcome)

    def _tensors(self, *, moments: bool) -> dict[str, BoxedTensor]:
        state = self._state
        return tensors_of(state.parameters, state.optimizer, moments=moments)

    def _copied(self, tensors: Mapping[str, BoxedTensor]) -> dict[str, BoxedTensor]:
        """Copy tensors to memory of the host, which is kept for the next copy."""
        for name, tensor in tensors.items():
            if name not in self._copies:
                own = tensor.as_subclass(torch.Tensor)
                self._copies[name] = torch.empty_like(own, device="cpu")
            self._copies[name].copy_(tensor.as_subclass(torch.Tensor))
        return {name: tensors[name].with_memory(self._copies[name]) for name in tensors}

    def _common(self, progress: Progress) -> dict[str, Any]:
        """Return what is not a tensor. The plan is for people to read: any plan goes on from it."""
        return {
            **asdict(progress),
            "optimizer_steps": self._state.optimizer.steps,
            "has_optimizer": self._config.save_optimizer,
            "model": asdict(self._model),
            "optimizer": asdict(self._optimizer),
            "plan": self._state.plan.to_text(),
        }

    def _write(
        self, root: Path, iteration: int, tensors: Mapping[str, BoxedTensor], common: Any
    ) -> str:
        """Write a checkpoint; return how it ended, in words."""
        started = time.perf_counter()
        try:
            where = storage.write(root, iteration, tensors, common, self._hosts)
        except SaveError as error:
            self.failed = True
            return f"--save: {error}; older checkpoints are as they were"
        self.failed = False
        said = [f"saved {where} in {time.perf_counter() - started:.1f} s"]
        if self._hosts.rank == 0:
            said += self._prune(root, iteration)
        return "\n".join(said)

    def _prune(self, root: Path, newest: int) -> list[str]:
        """Delete older checkpoints that are not to be kept; return what could not be deleted.

        What was there when this run started from elsewhere is of another run, and stays.
        """
        interval, left = self._config.save_retain_interval, list[str]()
        if interval is None:
            return left
        self._of_others.discard(newest)
        for iteration in folder.complete(root):
            if iteration < newest and iteration % interval and iteration not in self._of_others:
                try:
                    folder.remove(root, iteration)
                except OSError as error:
                    left.append(f"--save-retain-interval: {error}; the checkpoint stays")
        return left

    def _choose(self, root: Path) -> Path | None:
        """Return the folder to load, the same on every rank; ``None`` if there is none."""
        hosts, step = self._hosts, self._config.load_step
        if hosts.rank == 0 and _same_folder(root, self._config.save):
            for line in folder.clean_up(root):
                self._say(line)
        found = hosts.all_gather_object(folder.candidates(root) if hosts.rank == 0 else [])[0]
        if step is not None and step not in found:
            raise UserError(
                f"--ckpt-step {step}: the checkpoints in {root} are of iterations {sorted(found)}"
            )
        problems = []
        for iteration in found if step is None else [step]:
            where = folder.folder_of(root, iteration)
            problem = storage.check_files(where, hosts)
            if problem is None:
                return where
            if step is not None:
                raise UserError(f"--ckpt-step {step}: {problem}")
            self._say(f"{problem}: an older checkpoint is tried")
            problems.append(problem)
        if problems:
            raise UserError(f"--load {root}: every checkpoint there is damaged: {problems[0]}")
        return None

    def _read(self, where: Path) -> Progress:
        config, optimizer = self._config, self._state.optimizer
        common = read_checked_common(where)
        self._check_model(where, common)
        self._note_changed_rates(common)
        moments = config.load_optimizer and not config.finetune
        if moments and not common["has_optimizer"]:
            raise UserError(
                f"--load: {where} was saved with --no-save-optim; add --no-load-optim or --finetune"
            )
        storage.read(where, self._tensors(moments=moments), self._hosts)
        optimizer.loaded(int(common["optimizer_steps"]) if moments else 0)
        if config.finetune:
            return Progress()
        return Progress(int(common["iteration"]), int(common["consumed_samples"]))

    def _note_changed_rates(self, common: Mapping[str, Any]) -> None:
        """Say which values of the optimizer and the learning rate the earlier run had otherwise."""
        saved = common.get("optimizer", {})
        for name, value in asdict(self._optimizer).items():
            if not self._config.finetune and saved.get(name, value) != value:
                self._say(f"--load: {name} was {saved[name]} in the run so far, and is {value} now")

    def _check_model(self, where: Path, common: Mapping[str, Any]) -> None:
        """Refuse weights of another model, though they may have the same shapes."""
        saved = common["model"]
        for name, value in asdict(self._model).items():
            if name not in MAY_CHANGE and saved.get(name, value) != value:
                raise UserError(
                    f"--load: the model in {where} has {name} = {saved[name]}, and this run "
                    f"{value}: give the flags of the run that saved it"
                )
