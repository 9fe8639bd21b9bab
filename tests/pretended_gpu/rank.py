"""One rank of a job on a pretended GPU: some iterations, and what is found in them."""

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    redirect_stdout,
)
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from pretended_gpu.deadlock import name_of
from pretended_gpu.deep_ep import deep_ep
from pretended_gpu.gpu import DEVICE, PretendedGpu
from pretended_gpu.nccl import PretendedNccl, Transfer, start_together
from pretended_gpu.order import Issued, Step
from pretended_gpu.pooled import PooledSlot
from torch import Tensor

from megatron.data.microbatch import Microbatch, MicrobatchLoader
from megatron.inference.sampling import Sampling
from megatron.optimizer.lr_schedule import Rates
from megatron.parallel import turns
from megatron.parallel.experts import ExchangingExperts, GatheringExperts
from megatron.parallel.grid import Tiling
from megatron.parallel.groups import ConnectedAxis, connect_grid
from megatron.planning.count.assumed_routes import assumed_rows, busiest
from megatron.planning.planned_run import RunPlan
from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig
from megatron.runtime.batch import DeviceMicrobatch, to_device
from megatron.runtime.communicator import links_of
from megatron.runtime.embedding_copies import ranks_with_copies
from megatron.runtime.feed import Feed
from megatron.runtime.observer import NamedRanges
from megatron.runtime.timeline import Recorder
from megatron.simulator.simulate import Span
from megatron.training import setup
from megatron.training.generation import continued
from megatron.training.loop import train
from megatron.training.open_data import Data
from megatron.training.own_tokens import kept_tokens
from megatron.training.post_validated_step import make_train_step
from megatron.training.setup import TrainState, build_train_state
from megatron.training.step import Iteration
from megatron.training.warm_up import warm_up

_RATES = Rates(1e-3, 1e-3, 0.01)


@dataclass
class Findings:
    """What became of one rank.

    Attributes:
        faults: of the streams, of memory, of the host; in words, each once.
        journal: what the host has put on the streams, in order.
        held: bytes after every iteration.
        waits: how often the host has waited in every iteration for numbers of rows that travel.
        peak: most bytes held.
        host: most bytes of the host that tensors held.
        pinned: most of them that were pinned.
        ranges: names of NVTX ranges of the last iteration, if it was observed.
        spans: the recorded timeline of the last iteration, if it was observed.
        waits_within: how often each pass of ``spans`` has waited for a collective of its own.
        restored: steps that were undone.
        warm: communicators that were used before the first iteration.
        warm_forms: forms of programs that were used before the first iteration.
        forms: all that were used.
        workspaces: how many cuBLAS was lent: one for each thread and stream that multiplied.
        texts: tokens that were written.
    """

    faults: list[str] = field(default_factory=list)
    journal: list[Step] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    peak: int = 0
    host: int = 0
    pinned: int = 0
    ranges: list[str] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    waits_within: list[int] = field(default_factory=list)
    restored: int = 0
    warm: set[str] = field(default_factory=set)
    warm_forms: set[str] = field(default_factory=set)
    forms: set[str] = field(default_factory=set)
    workspaces: int = 0
    texts: list[list[int]] = field(default_factory=list)

    @property
    def issued(self) -> list[Issued]:
        """Communications, in order."""
        return [step.issued for step in self.journal if step.issued is not None]


def run_rank(
    config: RunConfig,
    rank: int,
    *,
    observed: bool = False,
    iterations: int = 3,
    valid: bool = True,
    writes: bool = False,
    number_of_others: float = 1.0,
    pooled: bool = False,
) -> Findings:
    """Train some iterations as ``rank`` of ``config``'s job, and evaluate once.

    Args:
        config: the run; its device and backend are CUDA's here.
        rank: which to be.
        observed: name and record the last iteration.
        iterations: of training.
        valid: whether to evaluate.
        writes: whether to write two texts of three tokens.
        number_of_others: what other ranks send to this one's host.
        pooled: whether captured passes have memory of their own (``pooled``).
    """
    gpu, found, config = PretendedGpu(number_of_others), Findings(), _on_cuda(config)
    slots = patch.object(setup, "CudaSlot", partial(PooledSlot, gpu)) if pooled else nullcontext()
    with warnings.catch_warnings(), alone(gpu), gpu, of_pairs_too(gpu):
        warnings.simplefilter("error")
        with slots:
            state = _state(gpu, config, rank)
        warm_up(config, state)
        found.warm = {step.issued.group for step in gpu.streams.journal if step.issued}
        found.warm_forms = set(gpu.forms)
        let_no_schedule_wait(gpu, state)
        step = make_train_step(config.optimizer, state)
        recorder, batches = Recorder(rank, DEVICE), _batches(gpu, config, state)
        restore = Mock(wraps=state.optimizer.restore)
        vars(state.optimizer)["restore"] = restore
        for number in range(iterations):
            last = observed and number == iterations - 1
            gpu.ranges.clear()
            observer = NamedRanges(DEVICE, recorder) if last else None
            before = gpu.named_waits
            step.train(Iteration(number, next(batches), lambda _: _RATES, 0), observer)
            found.waits.append(gpu.named_waits - before)
            found.held.append(gpu.memory.held)
        found.ranges, found.spans = list(gpu.ranges), recorder.spans()
        assert len(recorder.waits_within()) == sum(s.lane == "compute" for s in found.spans)
        found.waits_within = [len(m.within) for m in recorder._marks if m.lane == "compute"]
        step.settle()
        if valid:
            state.pipeline.evaluate(_batch(gpu, config, state))
        if writes:
            how = Sampling(0.9, top_k=5)
            found.texts = continued(state, ((1, 2), (3,)), how, 3, None, 1)
        state.close()
    found.forms, found.workspaces = gpu.forms, len(gpu.multiplying)
    found.restored = restore.call_count
    found.journal = gpu.streams.journal
    found.faults, found.peak = list(dict.fromkeys(gpu.faults)), gpu.memory.peak
    found.host, found.pinned = gpu.host.peak, gpu.host.pinned
    return found


@contextmanager
def of_pairs_too(gpu: PretendedGpu) -> Iterator[None]:
    """Let the device be that of the second thread of a pair, too."""
    found = turns._current_stream

    def here() -> Callable[[], AbstractContextManager[object]]:
        stream = found()

        @contextmanager
        def within() -> Iterator[None]:
            with gpu.in_other_thread(), stream():
                yield

        return within

    with patch.object(turns, "_current_stream", here):
        yield


def run_loop(config: RunConfig, rank: int) -> tuple[str, list[str]]:
    """Go through the whole training loop as ``rank``; return what it prints, and the faults."""
    gpu, printed, config = PretendedGpu(), io.StringIO(), _on_cuda(config)
    replaced = (
        alone(gpu),
        patch.object(torch.cuda, "get_device_name", lambda device: "NVIDIA H200"),
        patch.object(torch.cuda, "max_memory_allocated", lambda device: gpu.memory.peak),
        patch.object(torch.cuda, "max_memory_reserved", lambda device: gpu.memory.peak),
    )
    with ExitStack() as stack:
        for context in (*replaced, redirect_stdout(printed), gpu):
            stack.enter_context(context)
        state = _state(gpu, config, rank)
        let_no_schedule_wait(gpu, state)
        train(config, state, Data(_Loader(config), {"validation": _Loader(config)}))
    return printed.getvalue(), gpu.faults


@contextmanager
def alone(gpu: PretendedGpu) -> Iterator[None]:
    """Let all ranks answer what this one says, and every expert have equally many tokens.

    A fake tensor cannot say how many tokens an expert has. The host waits for these numbers, and
    may do so.
    """

    def wait() -> None:
        gpu.host_waits("for numbers of rows", named=True)

    def read_rows(ranks: GatheringExperts, rows: Tensor, most: int) -> list[int]:
        wait()
        if isinstance(ranks, ExchangingExperts):
            return assumed_rows(most, ranks.rank, ranks.size, ranks.tensor_size)
        return [busiest(most, ranks.size, 1.0)]

    with (
        patch.object(ConnectedAxis, "all_gather_object", lambda self, own: [own] * self.size),
        patch.object(GatheringExperts, "read_rows", read_rows),
        deep_ep(wait),
        patch.object(dist, "P2POp", Transfer),
        patch.object(dist, "batch_isend_irecv", start_together),
    ):
        yield


class _Loader(MicrobatchLoader):
    """In place of ``MicrobatchLoader``."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.consumed_samples = 0

    def next_prepared(self, prepare: Callable[[list[Microbatch]], Any]) -> Any:
        self.consumed_samples += self._config.train.global_batch_size
        return prepare(_microbatches(self._config))


def _on_cuda(config: RunConfig) -> RunConfig:
    devices = replace(config.parallel.devices, device="cuda", distributed_backend="nccl")
    return replace(config, parallel=replace(config.parallel, devices=devices))


def let_no_schedule_wait(gpu: PretendedGpu, state: TrainState) -> None:
    """Make it a fault if the host waits for the device between the ends of a schedule."""

    def watched(run: Callable[..., Any]) -> Callable[..., Any]:
        def watching(*args: Any, **kwargs: Any) -> Any:
            with gpu.without_waiting():
                return run(*args, **kwargs)

        return watching

    pipeline = state.pipeline
    vars(pipeline).update(train=watched(pipeline.train), evaluate=watched(pipeline.evaluate))


def _state(gpu: PretendedGpu, config: RunConfig, rank: int) -> TrainState:
    """Return what ``set_up`` would, with groups that are not there."""
    grid, run_plan = config.parallel.grid, _planned(config)

    def connect(use: str, tiling: Tiling) -> PretendedNccl:
        own = next((ranks for ranks in tiling if rank in ranks), tiling[0])
        name = name_of(use, own, grid.world_size)
        return PretendedNccl(gpu, name, own.index(rank) if rank in own else 0, len(own))

    ends = ranks_with_copies(run_plan.plan, tied=config.model.vocabulary.tie_embeddings)
    groups = connect_grid(grid, rank, DEVICE, ends, connect, links_of(run_plan.plan))
    return build_train_state(config, groups, run_plan)


@lru_cache(maxsize=4)
def _planned(config: RunConfig) -> RunPlan:
    """Return the plan, which all ranks of a job share."""
    return make_run_plan(config)


def _batches(
    gpu: PretendedGpu, config: RunConfig, state: TrainState
) -> Iterator[list[DeviceMicrobatch]]:
    """Yield every iteration's microbatches; if they are read ahead, the next one's begin then."""
    if not config.data.prefetch:
        while True:
            yield _batch(gpu, config, state)
    kept = 2 if config.optimizer.post_validation else 1
    feed, own = Feed(DEVICE, kept), _own(config, state)
    staged = feed.stage(own)
    while True:
        with gpu.without_waiting():
            batch = feed.take(staged, replicas=config.train.replicas)
            staged = feed.stage(own)
        yield batch


def _batch(gpu: PretendedGpu, config: RunConfig, state: TrainState) -> list[DeviceMicrobatch]:
    """Return an iteration's microbatches, copied to the device without waiting for it."""
    with gpu.without_waiting():
        return to_device(_own(config, state), DEVICE, replicas=config.train.replicas)


def _own(config: RunConfig, state: TrainState) -> list[Microbatch]:
    """Return an iteration's microbatches, with the tokens that this rank has of them."""
    kept = kept_tokens(config, state.groups.context.rank)
    return [each.part(kept, config.model.further.mtp_num_layers) for each in _microbatches(config)]


def _microbatches(config: RunConfig) -> list[Microbatch]:
    shape = (config.train.micro_batch_size, config.model.seq_length)
    return [
        Microbatch(
            tokens=torch.zeros(shape, dtype=torch.int64),
            labels=torch.zeros(shape, dtype=torch.int64),
            loss_mask=torch.ones(shape),
        )
        for _ in range(config.train.num_microbatches)
    ]
