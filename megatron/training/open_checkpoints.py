"""Opens the checkpoints of a run, and imports the code for them only if the run needs it.

PyTorch's distributed checkpoints take a third of all imports of a rank. So only a run with
``--save`` or ``--load`` imports them.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch.distributed as dist

from megatron.checkpoint import lock
from megatron.checkpoint.settings import CheckpointSettings
from megatron.parallel.groups import ConnectedAxis, Groups
from megatron.run.run_config import RunConfig
from megatron.training.metrics.records import SaveEvent
from megatron.training.progress import Progress
from megatron.training.rendezvous import UserError
from megatron.training.setup import TrainState

if TYPE_CHECKING:
    from megatron.training.checkpointing import Checkpoints

Tell = Callable[[SaveEvent, Progress], None]

SAVE_TIMEOUT: Final = timedelta(hours=3)
"""How long a rank waits for another rank that writes or reads its part of a checkpoint."""


def writer_hosts(groups: Groups, config: CheckpointSettings) -> ConnectedAxis:
    """Return the ranks of the job on CPUs; every rank calls it with the same configuration.

    Saving and loading have a process group of their own, for two reasons. During an asynchronous
    save, training uses the other groups. And a rank may be busy with its files for longer than any
    other collective may wait.
    """
    hosts = groups.world_hosts
    if hosts.size == 1 or not _uses_any(config):
        return hosts
    group = dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT, group_desc="checkpoint")
    return replace(hosts, group=group)


@contextmanager
def sole_writer(
    config: CheckpointSettings, hosts: ConnectedAxis
) -> Iterator[lock.FolderLock | None]:
    """Keep other jobs from saving to the same folder while the block runs; every rank calls it.

    Yields:
        The lock on the rank that holds it, else ``None``.

    Raises:
        UserError: another job saves to the folder, or the folder cannot be locked.
    """
    with ExitStack() as stack:
        fault, own = None, None
        if config.save is not None and hosts.rank == 0:
            try:
                own = stack.enter_context(lock.held(config.save))
                if own.note:
                    print(f"--save: {own.note}", flush=True)
            except lock.InUseError as error:
                fault = f"--save: {error}; end that job, or name another folder"
            except lock.NoLockError as error:
                fault = f"--save: {error}, or name another folder"
            except OSError as error:
                fault = f"--save: {error}; let this user write there, or name another folder"
        if fault := hosts.all_gather_object(fault)[0]:
            raise UserError(fault)
        yield own


class NoCheckpoints:
    """Takes the place of ``Checkpoints`` in a run that neither saves nor loads."""

    fault = ""

    def load(self) -> Progress:
        """Return the progress of a new run."""
        return Progress()

    def save(self, progress: Progress) -> None:
        """Refuse: there is nowhere to save."""
        raise AssertionError(f"nowhere to save iteration {progress.iteration}")

    def report(self, *, wait: bool = False) -> None:
        """Say nothing."""


def import_checkpoints(config: CheckpointSettings) -> None:
    """Import the code for checkpoints, if the run needs it, before the ranks meet."""
    if _uses_any(config):
        import megatron.training.checkpointing  # noqa: F401 - see the module's first lines


def open_checkpoints(
    config: RunConfig,
    state: TrainState,
    hosts: ConnectedAxis,
    say: Callable[[str], None],
    tell: Tell,
    own_lock: lock.FolderLock | None = None,
) -> "NoCheckpoints | Checkpoints":
    """Return the object that saves and loads a rank; for the arguments, see ``Checkpoints``."""
    if not _uses_any(config.checkpoint):
        return NoCheckpoints()
    from megatron.training.checkpointing import Checkpoints  # see the module's first lines

    return Checkpoints(config, state, hosts, say, tell, own_lock)


def _uses_any(config: CheckpointSettings) -> bool:
    return config.save is not None or config.load is not None
