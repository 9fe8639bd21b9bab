"""Reads a checkpoint into a run of any layout, or refuses it with the reason."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

from megatron.checkpoint import folder, storage
from megatron.checkpoint.boxed import BoxedTensor
from megatron.checkpoint.common import read_checked_common
from megatron.checkpoint.folder import DamagedError
from megatron.checkpoint.saved_model import differences, differences_of_dense
from megatron.checkpoint.storage import OtherModelError
from megatron.checkpoint.train_tensors import tensors_of, tensors_of_buffers, tensors_of_scales
from megatron.checkpoint.upcycle import Upcycling
from megatron.parallel.groups import ConnectedAxis
from megatron.run.run_config import RunConfig
from megatron.training.progress import Progress
from megatron.training.rendezvous import UserError
from megatron.training.setup import TrainState

_ASKED: Final = "optimizer_impl"
"""The flag that asks for an AdamW; a checkpoint also has the AdamW that the machine allowed."""

_EARLIER_SCALE: Final = {
    "constant": "loss_scale",
    "initial": "initial_loss_scale",
    "minimum": "min_loss_scale",
    "window": "loss_scale_window",
}
"""Values of a loss scale by their names in checkpoints of 2026-11 and before."""


def renewed_optimizer(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's values as a checkpoint keeps them, by the names of today.

    Muon's values had no prefix once, and values of the loss scale had other names. Before there was
    a ``muon_tp_mode``, every rank formed whole updates.
    """
    renewed, muon, scale = dict(saved), saved.get("muon"), saved.get("loss_scale")
    if muon is not None:
        named = {f"muon_{name.removeprefix('muon_')}": own for name, own in muon.items()}
        renewed["muon"] = {"muon_tp_mode": "duplicated"} | named
    if scale is not None:
        renewed["loss_scale"] = {_EARLIER_SCALE.get(name, name): own for name, own in scale.items()}
    return renewed


def is_same_folder(one: Path | None, other: Path | None) -> bool:
    """Return whether two flags name the same folder."""
    return one is not None and other is not None and one.resolve() == other.resolve()


class CheckpointReader:
    """Reads checkpoints into a rank; all ranks call it together.

    The arguments are as for ``Checkpoints``.
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
        self._seed = config.train.seed
        self._state = state
        self._hosts = hosts
        self._say = say

    def read_last_good(self, root: Path) -> tuple[Path, Progress] | None:
        """Read the newest undamaged checkpoint, the same on every rank.

        Returns:
            The checkpoint's folder and the progress of its run; ``None`` if there is none.
        """
        hosts, step = self._hosts, self._config.ckpt_step
        if hosts.rank == 0 and is_same_folder(root, self._config.save):
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
            try:
                return where, self._read(where)
            except DamagedError as error:
                problem = str(error)
            except OtherModelError as error:
                raise UserError(f"--load {root}: {error}") from error
            if step is not None:
                raise UserError(f"--ckpt-step {step}: {problem}")
            self._say(f"{problem}: an older checkpoint is tried")
            problems.append(problem)
        if problems:
            raise UserError(f"--load {root}: every checkpoint there is damaged: {problems[0]}")
        return None

    def _read(self, where: Path) -> Progress:
        config, state, optimizer = self._config, self._state, self._state.optimizer
        if problem := storage.check_files(where, self._hosts):
            raise DamagedError(problem)
        common = self._read_common(where)
        upcycling = self._upcycling(where, common)
        if upcycling is None:
            self._check_model(where, common)
        self._note_changed_rates(common)
        weights_alone = config.finetune or upcycling is not None
        moments = config.load_optimizer and not weights_alone
        if moments and not common["has_optimizer"]:
            raise UserError(
                f"--load: {where} was saved with --no-save-optim; add --no-load-optim or --finetune"
            )
        if moments:
            self._check_optimizer(where, common)
        scales = self._saved_scales(where, moments)
        tensors = tensors_of(state.updated, optimizer, moments=moments)
        wanted = tensors if upcycling is None else upcycling.dense_tensors(tensors)
        storage.read(where, wanted | scales | self._saved_buffers(where), self._hosts)
        if upcycling is not None:
            upcycling.fill(tensors, wanted)
        if scales and state.delayed_scales is not None:
            state.delayed_scales.loaded()
        optimizer.loaded(int(common["optimizer_steps"]) if moments else 0)
        if weights_alone:
            return Progress()
        state.loss_scaler.load(common.get("loss_scale"), with_scale=moments)
        known = {field.name for field in fields(Progress)} & common.keys()
        return Progress(**{name: common[name] for name in known})

    def _saved_scales(self, where: Path, moments: bool) -> dict[str, BoxedTensor]:
        """Return the saved scales of products in 8 bits; if any is missing, say so, return none."""
        delayed = self._state.delayed_scales
        if delayed is None:
            return {}
        wanted = tensors_of_scales(delayed.tensors())
        if moments and not storage.lacks(where, wanted, self._hosts):
            return wanted
        self._say(
            "--fp8-recipe delayed begins anew: its history was not loaded, or is of other layers "
            "or of another --fp8-amax-history-len; in the first iteration tensors are scaled by "
            "themselves"
        )
        return {}

    def _saved_buffers(self, where: Path) -> dict[str, BoxedTensor]:
        """Return the biases of experts to read; if the checkpoint has none, say so."""
        if not self._model.balance.moe_router_enable_expert_bias:
            return {}
        wanted = tensors_of_buffers(self._state.pipeline.model.owned_buffers())
        if not storage.lacks(where, wanted, self._hosts):
            return wanted
        self._say(f"--moe-router-enable-expert-bias begins at 0: {where} has no such bias")
        return {}

    def _read_common(self, where: Path) -> dict[str, Any]:
        """Return the values that are not tensors; if one rank cannot read them, all ranks raise."""
        common, problem = dict[str, Any](), None
        try:
            common = read_checked_common(where)
        except DamagedError as error:
            problem = str(error)
        if told := next(filter(None, self._hosts.all_gather_object(problem)), None):
            raise DamagedError(told)
        return common

    def _check_optimizer(self, where: Path, common: Mapping[str, Any]) -> None:
        """Refuse the state of another optimizer, which the optimizer of this run cannot use."""
        saved = {"optimizer": "adam"} | common.get("optimizer", {})
        theirs, ours = saved["optimizer"], self._optimizer.optimizer
        if theirs != ours:
            raise UserError(
                f"--load: {where} was saved with --optimizer {theirs}, whose state --optimizer "
                f"{ours} cannot use: use that one, or load the weights only (--no-load-optim)"
            )
        if ours == "sgd" and self._optimizer.sgd_momentum and not saved["sgd_momentum"]:
            raise UserError(
                f"--load: {where} was saved without momentum (--sgd-momentum 0): keep that, or "
                "start with none (--no-load-optim)"
            )

    def _note_changed_rates(self, common: Mapping[str, Any]) -> None:
        """Say which values of the optimizer and learning rate differ from the earlier run."""
        own = self._config
        if not own.trains or own.finetune or own.upcycling:
            return
        saved = renewed_optimizer(common.get("optimizer", {}))
        for name, value in asdict(self._optimizer).items():
            if name != _ASKED and saved.get(name, value) != value:
                self._say(f"--load: {name} was {saved[name]} in the run so far, and is {value} now")

    def _upcycling(self, where: Path, common: Mapping[str, Any]) -> Upcycling | None:
        """Return how a dense checkpoint becomes a mixture; ``None``: it is of this run's model."""
        parts, dense = self._config.upcycling, common["model"]
        if not parts:
            return None
        if dense.get("num_experts"):
            self._say(f"--moe-use-upcycling changes nothing: {where} has experts already")
            return None
        upcycling = Upcycling(self._model, parts, self._seed)
        found = differences_of_dense(dense, self._model)
        fault = upcycling.fault(dense)
        if found or fault:
            raise UserError(f"--load: the model in {where}: {fault or '; '.join(found)}")
        return upcycling

    def _check_model(self, where: Path, common: Mapping[str, Any]) -> None:
        """Refuse weights of another model, even if they have the same shapes."""
        found = differences(common["model"], self._model)
        if found:
            raise UserError(
                f"--load: the model in {where} is another one: {'; '.join(found)}. Give the flags "
                "of the run that saved it, or --use-checkpoint-args in place of all of them"
            )
