"""Saves a run, and begins a run with the checkpoint that it goes on from.

Nothing random is saved: dropout and the order of the data are functions of the seed, the iteration
and the samples consumed. The learning rate is a function of the samples consumed.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.checkpoint import folder, storage
from megatron.checkpoint.background import Background
from megatron.checkpoint.boxed import BoxedTensor
from megatron.checkpoint.lock import FolderLock
from megatron.checkpoint.saved_model import stored
from megatron.checkpoint.saved_tokenizer import SavedTokenizer
from megatron.checkpoint.share import Part, part_of, share
from megatron.checkpoint.storage import SaveError
from megatron.checkpoint.train_tensors import tensors_of, tensors_of_buffers, tensors_of_scales
from megatron.parallel.groups import ConnectedAxis
from megatron.run.run_config import RunConfig
from megatron.training.checkpoint_reading import CheckpointReader, is_same_folder
from megatron.training.metrics.records import SaveEvent
from megatron.training.progress import Progress
from megatron.training.rendezvous import UserError
from megatron.training.setup import TrainState


class Checkpoints:
    """Saves and loads the state of a rank; all ranks call the same methods in the same order.

    Args:
        config: the run.
        state: this rank.
        hosts: all ranks of the job, over a process group on CPUs that only checkpoints use.
        say: prints on the first rank.
        tell: is called when a checkpoint is begun or written.
        lock: the lock of the folder for saves, if this rank holds the lock.

    Attributes:
        fault: why the last finished save has failed, the same on every rank; empty if the save
            has succeeded.
    """

    def __init__(
        self,
        config: RunConfig,
        state: TrainState,
        hosts: ConnectedAxis,
        say: Callable[[str], None],
        tell: Callable[[SaveEvent, Progress], None] = lambda event, progress: None,
        lock: FolderLock | None = None,
    ) -> None:
        self._config = config.checkpoint
        self._model = config.model
        self._optimizer = config.optimizer
        self._reader = CheckpointReader(config, state, hosts, say)
        self._state = state
        self._hosts = hosts
        self._say = say
        self._tell = tell
        self._lock = lock
        self._being_saved = Progress()
        self.fault = ""
        self._background = Background()
        self._copies: dict[str, BoxedTensor] = {}
        self._used_tokenizer = config.data.tokenizer
        self._tokenizer: dict[str, Any] = {}
        self._parts: list[Part] = []
        self._of_others: set[int] = set()

    def load(self) -> Progress:
        """Load the checkpoint that the configuration asks for; return the progress of its run.

        Raises:
            UserError: there is no such checkpoint, it is damaged, or it is of another model.
        """
        config, progress = self._config, self._load()
        goes_on = is_same_folder(config.load, config.save) and progress.iteration > 0
        if config.save is not None and not goes_on:
            self._of_others = set(folder.complete(config.save))
        if config.save is not None and self._hosts.rank == 0:
            self._keep_tokenizer(config.save)
        if config.save is not None and config.async_save:
            self._copy(self._own_share())  # allocates the memory for the first save
        return progress

    def _keep_tokenizer(self, root: Path) -> None:
        """Copy the tokenizer's files beside the checkpoints; if that fails, say so and go on."""
        try:
            saved = SavedTokenizer.of(self._used_tokenizer)
            if saved is None:
                return
            self._tokenizer = saved.stored
            saved.copy(root, self._used_tokenizer)
        except OSError as error:
            self._say(
                f"--save: the tokenizer's files are not copied ({error}): whoever loads these "
                "checkpoints must give the flags of the tokenizer"
            )

    def _load(self) -> Progress:
        root = self._config.load
        if root is None:
            return Progress()
        if (root / folder.MANIFEST).is_file():
            raise UserError(
                f"--load {root} is one checkpoint: give the folder of all, {root.parent}, and "
                "--ckpt-step for a certain one"
            )
        if not root.is_dir() and not is_same_folder(root, self._config.save):
            raise UserError(f"--load {root} does not exist: correct it, or leave it out")
        started = time.perf_counter()
        loaded = self._reader.read_last_good(root)
        if loaded is None:
            if self._config.exit_on_missing_checkpoint:
                raise UserError(f"--load {root} has no checkpoint (--exit-on-missing-checkpoint)")
            self._say(
                f"--load {root} has no checkpoint: training starts from random weights (with "
                "--exit-on-missing-checkpoint it ends)"
            )
            return Progress()
        where, progress = loaded
        seconds = time.perf_counter() - started
        self._say(f"loaded {where} in {seconds:.1f} s: iteration {progress.iteration}")
        return progress

    def save(self, progress: Progress) -> None:
        """Write a checkpoint; if that fails, say so and go on."""
        root = self._config.save
        assert root is not None, "nowhere to save"
        self.report(wait=True)
        tensors = self._own_share()
        common = self._common(progress)
        if not self._config.async_save:
            self._say(self._write(root, progress.iteration, tensors, common))
            self._tell_unless_failed("Saved checkpoint", progress)
            return
        started = time.perf_counter()
        copies = self._copy(tensors)
        stalled = time.perf_counter() - started
        self._background.start(lambda: self._write(root, progress.iteration, copies, common))
        self._say(f"checkpoint of iteration {progress.iteration} begun; copied in {stalled:.2f} s")
        self._tell("Saving async checkpoint", progress)
        self._being_saved = progress

    def _tell_unless_failed(self, event: SaveEvent, progress: Progress) -> None:
        if not self.fault:
            self._tell(event, progress)

    def _copy(self, tensors: Mapping[str, BoxedTensor]) -> dict[str, BoxedTensor]:
        """Return copies of the tensors, in the memory of the last copies."""
        copies = {name: own.copied(self._copies.get(name)) for name, own in tensors.items()}
        self._copies = copies
        return copies

    def report(self, *, wait: bool = False) -> None:
        """Say how an asynchronous save ended, if one has ended."""
        outcome = self._background.wait() if wait else self._background.finished()
        if outcome is not None:
            self._say(outcome)
            self._tell_unless_failed("Saved async checkpoint", self._being_saved)

    def _own_share(self) -> dict[str, BoxedTensor]:
        """Return the tensors that this rank writes: a share of the replicas' tensors, no copies.

        Other ranks hold the same experts than hold the same other parameters, so the two are shared
        apart.
        """
        state, moments = self._state, self._config.save_optimizer
        counted = [part for part in state.updated if part.counts_in_norm]
        spread = [part for part in counted if part.owned.axis is not None]
        usual = [part for part in counted if part.owned.axis is None]
        by_holders = [
            tensors_of(parts, state.optimizer, moments=moments) for parts in (usual, spread)
        ]
        delayed = state.delayed_scales
        if delayed is not None and delayed.has_history and not state.groups.tensor.rank:
            by_holders[0] |= tensors_of_scales(delayed.tensors())
        if not state.groups.tensor.rank:
            by_holders[0] |= tensors_of_buffers(state.pipeline.model.owned_buffers())
        if not self._parts:
            self._parts = [part_of(tensors, self._hosts) for tensors in by_holders]
        return dict(
            item
            for tensors, part in zip(by_holders, self._parts, strict=True)
            for item in share(tensors, part).items()
        )

    def _common(self, progress: Progress) -> dict[str, Any]:
        """Return the values of a checkpoint that are not tensors.

        Only the first rank knows the tokenizer, and writes the values. The plan is for people to
        read: a run with any other plan can load the checkpoint.
        """
        return {
            **asdict(progress),
            "optimizer_steps": self._state.optimizer.steps,
            "loss_scale": self._state.loss_scaler.saved(),
            "has_optimizer": self._config.save_optimizer,
            "model": stored(self._model),
            **self._tokenizer,
            "optimizer": asdict(self._optimizer),
            "plan": self._state.plan.to_text(),
        }

    def _write(
        self, root: Path, iteration: int, tensors: Mapping[str, BoxedTensor], common: Any
    ) -> str:
        """Write a checkpoint; return how it ended, in words."""
        started = time.perf_counter()
        try:
            where = storage.write(root, iteration, tensors, common, self._hosts, lock=self._lock)
        except SaveError as error:
            self.fault = str(error)
            return f"--save: {error}; older checkpoints are as they were"
        self.fault = ""
        said = [f"saved {where} in {time.perf_counter() - started:.1f} s"]
        if self._config.save_retain_interval is not None:
            left = self._prune(root, iteration) if self._hosts.rank == 0 else []
            said += self._hosts.all_gather_object(left)[0]  # no rank goes on before rank 0
        return "\n".join(said)

    def _prune(self, root: Path, newest: int) -> list[str]:
        """Delete older checkpoints that need not be kept; return a line for every failure.

        If this run did not go on from this folder, the checkpoints that it found there belong to
        another run, and stay.
        """
        interval, left = self._config.save_retain_interval, list[str]()
        assert interval is not None, "all are kept"
        self._of_others.discard(newest)
        for iteration in folder.complete(root):
            if iteration < newest and iteration % interval and iteration not in self._of_others:
                try:
                    folder.remove(root, iteration)
                except OSError as error:
                    left.append(f"--save-retain-interval: {error}; the checkpoint stays")
        return left
