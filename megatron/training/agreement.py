"""Checks that all ranks are about to run the same job.

Ranks that run different things wait for each other for ever, or train wrong. Every rank reads its
own command line and its own files, runs its own copy of the code, and plans by itself. Everything
that decides the run is hashed into named digests, which must be equal on all ranks. Values that may
differ between machines, such as the paths of files, are left out of the digests.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.data.microbatch import MicrobatchLoader
from megatron.flags.tree import values_of
from megatron.planning.planned_run import RunPlan
from megatron.run.run_config import RunConfig
from megatron.run.train import TrainSettings
from megatron.schedules.lower import Instruction, Program, Run, lower
from megatron.schedules.plan import evaluation_plan
from megatron.training.open_data import Data
from megatron.training.own_code import SOURCES, digests_of_files, is_version, unlike_files
from megatron.training.rendezvous import Rendezvous, UserError

Digests = Mapping[str, str]
"""Name to digest of everything that decides a run; causes come before their consequences."""

_SAME_FLAGS = (
    "start every rank with the same command line, the same tokenizer and the same packages"
)
_SAME_CODE = "install the same version of Megatron, and of the script, on every machine"
_SAME_PACKAGES = "install the same versions on every machine (constraints.txt names them)"
_UNLIKE_GPUS = (
    "GPUs of different kinds, or with other builds of PyTorch, may draw different weights from one "
    "seed; add --use-cpu-initialization"
)
_SAME_PLAN = (
    "give every rank the same files of --schedule-file and --measured-costs; where unlike machines "
    "plan differently, save one plan with tools/simulate.py --save-plan FILE and give all ranks "
    "--schedule-file FILE"
)
_SAME_DATA = "give every rank the same files of --data-path"
_SAME_PROMPTS = "give every rank the same file of --generate-prompts-file and the same tokenizer"
_WHICH_FILES = "which files?"
_GPU = "GPU that draws initial weights"
_PROMPTS = "prompts"


def run_digests(config: RunConfig, run_plan: RunPlan) -> dict[str, str]:
    """Return the digests of a configuration and of the plan that was made for it."""
    found = {
        f"{part}.{name}": repr(_without_paths(value))
        for part in (
            "model",
            "parallel",
            "train",
            "optimizer",
            "data",
            "guard",
            "log",
            "checkpoint",
        )
        for name, value in values_of(getattr(config, part)).items()
    }
    plan, costs = run_plan.plan, run_plan.costs
    found["layers of the stages"] = repr(run_plan.layers)
    found["plan"] = plan.to_text()
    found["order of communication in training"] = _text(lower(plan, costs))
    found["order of communication in evaluation"] = _text(lower(evaluation_plan(plan), costs))
    return {name: _digest([text.encode()]) for name, text in found.items()}


def data_digests(train: TrainSettings, data: Data) -> dict[str, str]:
    """Return the digests of the data.

    The first training batch is hashed, as many samples at the end of the training data, the first
    batch of every set that is evaluated, and the prompts of texts with the token that ends a text.

    Raises:
        ValueError: a batch holds a token outside the vocabulary.
        OSError: the data cannot be read.
    """
    size = train.batches.at(0)  # a run may end before its batches have their full size
    ends = (0, train.dataset_samples - size)
    found = {"training data": _batches(data.train, ends, size)}
    for name, loader in data.validation.items():
        found[f"{name} data"] = _batches(loader, (0,))
    if data.test is not None:
        found["test data"] = _batches(data.test, (0,))
    if data.prompts is not None:
        own = data.prompts.tokens, data.prompts.words.end  # the end of a text decides on a forward
        found[_PROMPTS] = _digest([repr(own).encode()])
    return found


def gpu_digests(config: RunConfig, local_rank: int) -> dict[str, str]:
    """Return the digest of the kind of GPU that draws the initial weights, if a GPU draws them.

    Some ranks must draw equal weights: replicas, the two stages of tied embeddings, and
    tensor-parallel ranks for weights that are not split. So all GPUs must draw alike, unless a
    checkpoint replaces all drawn weights.

    ``local_rank`` is the number of this rank's GPU.
    """
    own_weights = config.checkpoint.load is None or not config.checkpoint.exit_on_missing_checkpoint
    draws = own_weights and not config.train.use_cpu_initialization
    if config.parallel.devices.device != "cuda" or not draws:
        return {}
    found = torch.cuda.get_device_properties(local_rank)
    threads = found.multi_processor_count, found.max_threads_per_multi_processor
    return {_GPU: _digest([repr((found.name, threads, torch.__version__)).encode()])}


def check_agreement(rendezvous: Rendezvous, digests: Digests) -> None:
    """Refuse a job whose ranks would run different things; every rank calls this function.

    Rank 0 compares the digests, and tells the other ranks the result.

    Raises:
        UserError: on every rank; the message names the differences, their ranks and the way out.
    """
    gathered = rendezvous.gather(json.dumps(digests))
    by_rank = None if gathered is None else list(map(json.loads, gathered))
    found = None if by_rank is None else disagreement(by_rank) or ""
    if by_rank and len({own.get(SOURCES) for own in by_rank}) > 1:
        found = _WHICH_FILES
    fault = rendezvous.broadcast(found)
    if fault == _WHICH_FILES:
        own_keys = dist.PrefixStore("sources", rendezvous.store)
        fault = _unlike_sources(replace(rendezvous, store=own_keys))
    if fault:
        raise UserError(fault)


def _unlike_sources(rendezvous: Rendezvous) -> str:
    """Return a message on sources that differ; every rank sends its list of files to rank 0."""
    gathered = rendezvous.gather(json.dumps(digests_of_files()))
    found = None if gathered is None else unlike_files(list(map(json.loads, gathered)))
    return rendezvous.broadcast(
        found and f"{found} than rank 0, and all must run the same: {_SAME_CODE}"
    )


def disagreement(by_rank: Sequence[Digests]) -> str | None:
    """Return a message with the differences between ranks and the way out; ``None`` if equal."""
    names = list(dict.fromkeys(name for own in by_rank for name in own))
    differing: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for rank, own in enumerate(by_rank):
        found = tuple(name for name in names if own.get(name) != by_rank[0].get(name))
        if found:
            differing[found].append(str(rank))
    if not differing:
        return None
    first = min((found[0] for found in differing), key=names.index)
    what = "; ".join(
        f"{', '.join(_told(name, by_rank[int(ranks[0])]) for name in found)} "
        f"of rank {', '.join(ranks)}"
        for found, ranks in differing.items()
    )
    return f"{what} differ from rank 0's, and all must run the same: {_way_out(first)}"


def _told(name: str, own: Digests) -> str:
    """Return the name of a digest, with the version if it is one."""
    return f"{name} ({own.get(name)})" if is_version(name) else name


def _way_out(name: str) -> str:
    """Return the way out of the first difference, which may be the cause of all others."""
    if name == _GPU:
        return _UNLIKE_GPUS
    if name == _PROMPTS:
        return _SAME_PROMPTS
    if is_version(name):
        return _SAME_PACKAGES
    if name == SOURCES:
        return _SAME_CODE
    if "." in name:
        return _SAME_FLAGS
    return _SAME_DATA if name.endswith("data") else _SAME_PLAN


def _without_paths(value: object) -> object:
    """Return ``value`` with every path replaced by fixed words, as machines may differ in paths.

    Sets become sorted tuples, because the order of a set differs from process to process.
    """
    if isinstance(value, Path):
        return "a path"
    if isinstance(value, tuple):
        return tuple(map(_without_paths, value))
    if isinstance(value, frozenset):
        return tuple(sorted(value))
    if is_dataclass(value):
        return {f.name: _without_paths(getattr(value, f.name)) for f in fields(value)}
    return value


def _name(step: Instruction) -> str:
    if not isinstance(step, Run):
        return str(step.comm)
    return step.name if step.turns is None else f"{step.name} {step.turns}"


def _text(program: Program) -> str:
    return "\n".join(
        " ".join(f"{type(step).__name__} {_name(step)}" for step in row) for row in program.rows
    )


def _batches(loader: MicrobatchLoader, firsts: Iterable[int], size: int | None = None) -> str:
    """Return the digest of the global batches that begin with the samples ``firsts``.

    A batch has ``size`` samples; ``None``: as many as the loader's batches.
    """
    return _digest(
        tensor.numpy().tobytes()
        for first in firsts
        for microbatch in loader.global_batch(first, size=size)
        for tensor in (microbatch.tokens, microbatch.labels, microbatch.loss_mask)
    )


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]
