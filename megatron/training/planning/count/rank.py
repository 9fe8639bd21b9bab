"""One pipeline rank on the ``meta`` device: its model, its passes and its communications."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from megatron.config.run_config import ParallelConfig, ReplicaConfig, RunConfig, TrainConfig
from megatron.kernels.autograd import apply
from megatron.kernels.counted import counted_kernels
from megatron.layers.recompute import Again, Layer, Recomputation
from megatron.model.config import ModelConfig
from megatron.model.ownership import OwnedParameter
from megatron.model.placement import Placement
from megatron.model.stage import RankModel
from megatron.optimizer.bucket import Bucket
from megatron.optimizer.make import takes_muon
from megatron.optimizer.parameters import OptimizedParameter
from megatron.parallel.context import ContextParallel
from megatron.parallel.grid import Grid, Tiling
from megatron.parallel.groups import Groups, connect_grid
from megatron.parallel.tensor import ALONE, SharedTokens, SplitTokens, TensorParallel
from megatron.runtime.batch import DeviceMicrobatch
from megatron.runtime.communicator import Communicator, ends_with_copies, links_of
from megatron.runtime.stage_passes import StagePasses
from megatron.runtime.store import ActivationStore
from megatron.schedules.lower import Program, Run, Start
from megatron.schedules.needs import Comm, CommKind
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan
from megatron.simulator.costs.count import (
    NO_WORK,
    CountedAxis,
    Parameters,
    PassCount,
    RankCount,
    Segment,
    Work,
    in_order,
)
from megatron.training.planning.count.recorder import ListedGroup, ListedLane, Recorder

META: Final = torch.device("meta")


class Subject(NamedTuple):
    """What decides a count, and nothing else, so that runs that count alike share it.

    Attributes:
        model: the whole model.
        train: of one microbatch.
        parallel: one replica of the pipeline, whatever its schedule.
    """

    model: ModelConfig
    train: TrainConfig
    parallel: ParallelConfig

    @classmethod
    def of(cls, config: RunConfig) -> "Subject":
        """Return what decides the count of a run."""
        train, narrow = config.train, config.train.eight_bits
        if narrow is not None:  # Transformer Engine need not be there to be asked about
            narrow = replace(narrow, transformer_engine=False)
        alike = TrainConfig(
            micro_batch_size=train.micro_batch_size,
            global_batch_size=train.micro_batch_size,
            train_iters=1,
            exit_interval=None,
            seed=0,
            dtype=train.dtype,
            eval_interval=None,
            eval_iters=0,
            vocab_recompute=train.vocab_recompute,
            recomputation=train.recomputation,
            gradient_dtype=train.gradient_dtype,
            wide_stream=train.wide_stream,
            eight_bits=narrow,
        )
        parallel = ParallelConfig(
            pipeline_size=config.parallel.pipeline_size,
            vocab_parallel=config.parallel.vocab_parallel,
            pipeline_schedule="1f1b",
            padded_vocab_size=config.parallel.padded_vocab_size,
            device="cuda",
            backend="nccl",
            timeout_minutes=1,
            replicas=ReplicaConfig(config.parallel.context_size),
            tensor_size=config.parallel.tensor_size,
            sequence_parallel=config.parallel.sequence_parallel,
            context_size=config.parallel.context_size,
        )
        return cls(config.model, alike, parallel)


@dataclass(frozen=True)
class Part:
    """Some of a rank's layers, with all else that the rank has, or without.

    Attributes:
        placement: the parts of the model.
        recomputation: what the backward of its layers computes again.
    """

    placement: Placement
    recomputation: Recomputation


class CountedRank:
    """A rank of a run whose tensors have no values.

    Args:
        config: of the run.
        plan: a plan of one microbatch.
        rank: pipeline rank.
        part: which of its layers are there.
    """

    def __init__(self, config: Subject, plan: Plan, rank: int, part: Part) -> None:
        self._config, self._plan, self._rank = config, plan, rank
        self._recorder = recorder = Recorder()
        self._lane = ListedLane(recorder)
        self._groups = _groups(config, plan, rank, recorder)
        train = config.train
        self._model = model = RankModel(
            config.model,
            part.placement,
            train.dtype,
            META,
            self._tensor(),
            part.recomputation,
            vocab_recompute=train.vocab_recompute,
            wide_stream=train.wide_stream,
            eight_bits=train.eight_bits,
            context=ContextParallel(self._groups.context),
            kernels=counted_kernels(train.dtype),
        )
        owned = list(model.owned_parameters())
        self._parameters = _elements(owned)
        if owned:
            entries = list(map(OptimizedParameter.of, owned))
            self._gradients = Bucket(entries, model.kernels, gradient_dtype=train.gradient_dtype)
        self._store = ActivationStore()
        self._passes = StagePasses(model, plan, rank, self._store, train.seed)
        tokens = config.model.seq_length // (model.context.size * model.tensor.sequence_parts)
        self._shape = (train.micro_batch_size, tokens, config.model.hidden_size)

    def _tensor(self) -> TensorParallel:
        """Return the ranks that share layers, with a lane that lists."""
        axis = self._groups.tensor
        if axis.size == 1:
            return ALONE
        split = self._config.parallel.sequence_parallel
        return SplitTokens(axis, self._lane) if split else SharedTokens(axis, self._lane)

    def _begin(self) -> None:
        """Begin an iteration of one microbatch."""
        train, model = self._config.train, self._model
        tokens = train.micro_batch_size * self._config.model.seq_length // model.context.size
        batch = DeviceMicrobatch(
            tokens_n=torch.empty(tokens, dtype=torch.int64, device=META),
            targets_n=torch.empty(tokens, dtype=torch.int64, device=META),
            weight_n=torch.empty(tokens, device=META),
            samples=train.micro_batch_size,
            valid_tokens=float(tokens),
        )
        if model.eight_bits is not None and model.eight_bits.delayed is not None:
            model.eight_bits.end(lambda _: None)  # so that scales have a history
        self._passes.begin([batch], 0, training=True, predicts_ahead=True)

    def segment(self) -> Segment:
        """Count the layers of chunk 0, which stand between others of their stage."""
        self._divide(between=True)
        with self._recorder:
            self._begin()
            narrow = self._config.train.eight_bits is not None
            first = self._layers() if narrow else {}  # makes the weights in 8 bits
            kinds = self._layers()
            held = self._dropped()
        once = _more([first["F"]], [kinds["F"]]) if narrow else NO_WORK
        return Segment(kinds, self._parameters, held, once)

    def _layers(self) -> dict[PassKind, Work]:
        recorder, store, stage = self._recorder, self._store, self._rank
        kinds: dict[PassKind, Work] = {}
        store.put("input", 0, self._stream(), stage)
        with recorder.recording() as parts:
            self._passes.forward(Pass("F", 0))
        kinds["F"] = in_order(*parts[_LAYERS:])  # an input that nobody keeps goes after them
        store.take("output", 0, stage)
        if self._plan.recomputes:
            with recorder.recording() as parts:
                self._passes.recompute(Pass("R", 0))
            kinds["R"] = in_order(*parts)
        store.put("output_gradient", 0, self._stream(), stage)
        with recorder.recording() as parts:
            self._passes.backward(Pass("B", 0))
        kinds["B"] = parts[_LAYERS]
        store.take("input_gradient", 0, stage)
        if self._plan.split_backward:
            with recorder.recording() as parts:
                self._passes.weight_gradients(Pass("W", 0))
            kinds["W"] = in_order(*parts)
        return kinds

    def _divide(self, *, between: bool) -> None:
        """Divide every F and B where the layers of a chunk begin, and where they end.

        Args:
            between: further layers follow those of the chunk.
        """
        again = self._model.recomputation
        self._model.recomputation = _Divided(
            again.parts, again.group, again.most, recorder=self._recorder, between=between
        )

    def _dropped(self) -> int:
        """Return the bytes of weights in 8 bits, which a new iteration makes anew."""
        before = self._recorder.held
        self._model.begin(training=True)
        return before - self._recorder.held

    def _stream(self) -> torch.Tensor:
        """Return a tensor as it goes from layer to layer."""
        return torch.empty(self._shape, dtype=self._model.stream_dtype, device=META)

    def count(self, program: Program) -> RankCount:
        """Count all that the rank does in a program of one microbatch."""
        model = self._model
        communicator = Communicator(
            self._groups,
            self._plan,
            self._passes,
            self._lane,
            self._shape,
            self._config.train.dtype,
            model.tensor.sequence_parts,
            model.stream_dtype,
        )
        self._divide(between=False)
        with self._recorder as recorder:
            self._begin()
            held = recorder.held
            narrow = self._config.train.eight_bits is not None
            first = self._row(program, communicator) if narrow else None  # makes weights in 8 bits
            found = self._row(program, communicator)
            in_eight_bits = self._dropped()
            reused = recorder.held - held
        count = replace(
            found, parameters=self._parameters, held=held + in_eight_bits, reused=reused
        )
        if first is None:
            return _without_reused(count, self._plan)
        return replace(count, once=PassCount.of(_more(_forwards(first), _forwards(found))))

    def _row(self, program: Program, communicator: Communicator) -> RankCount:
        """Count the passes and communications of the rank's row."""
        passes: dict[tuple[PassKind, int], PassCount] = {}
        begun: dict[tuple[CommKind, int], PassCount] = {}
        ended: dict[tuple[CommKind, int], PassCount] = {}
        under_way = {}
        for step in program.rows[self._rank]:
            with self._recorder.recording() as parts:
                if isinstance(step, Run):
                    self._passes.table[step.item.kind](step.item)
                elif isinstance(step, Start):
                    under_way[step.comm] = communicator.start(step.comm)
                else:
                    communicator.finish(step.comm, under_way.pop(step.comm))
            own = PassCount.of(*parts)
            if isinstance(step, Run):
                passes[step.item.kind, step.item.chunk] = own
            elif isinstance(step, Start):
                begun[_key(step.comm)] = own
            else:
                ended[_key(step.comm)] = own
        return RankCount(passes, begun, ended)


_LAYERS: Final = 1
"""The part of an F or a B that has the layers."""


@dataclass(frozen=True)
class _Divided(Recomputation):
    """Runs the layers of a chunk as ever, and divides F and B where they begin and end.

    Attributes:
        recorder: of the passes.
        between: further layers follow. Their backward makes a gradient that nobody else holds.
    """

    recorder: Recorder = field(kw_only=True)
    between: bool = field(kw_only=True)

    def run(
        self,
        layers: Sequence[Layer],
        forward: Callable[[Layer, torch.Tensor], torch.Tensor],
        x: torch.Tensor,
        left_out: list[Again] | None = None,
    ) -> torch.Tensor:
        """Run the layers of a chunk, as the class does that this one is made from."""
        x = apply(_Border, x, self.recorder, False)
        y = super().run(layers, forward, x, left_out)
        return apply(_Border, y, self.recorder, self.between)


class _Border(torch.autograd.Function):
    """Divides what is recorded, in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, recorder: Recorder, anew: bool) -> torch.Tensor:
        """Return the same tensor."""
        ctx.recorder, ctx.anew = recorder, anew
        recorder.divide()
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the same gradient, or one of its own."""
        grad = torch.empty_like(grad) if ctx.anew else grad
        ctx.recorder.divide()
        return grad, None, None


def _forwards(count: RankCount) -> list[Work]:
    """Return the works of all F."""
    passes = (own for (kind, _), own in count.passes.items() if kind == "F")
    return [work for own in passes for work, _ in own.parts]


def _more(first: Sequence[Work], again: Sequence[Work]) -> Work:
    """Return the steps that works do the first time, and not when they are done again."""
    steps, usual = (Counter(chain.from_iterable(w.steps for w in own)) for own in (first, again))
    assert usual <= steps, "done again, a pass does something else"
    return Work(tuple((steps - usual).elements()))


def _elements(owned: Sequence[OwnedParameter]) -> Parameters:
    """Return the elements of parameters, padding included."""
    matrices = sum(own.parameter.numel() for own in owned if takes_muon(own))
    return Parameters(matrices, sum(own.parameter.numel() for own in owned) - matrices)


def _key(comm: Comm) -> tuple[CommKind, int]:
    return comm.kind, comm.stage


def _without_reused(count: RankCount, plan: Plan) -> RankCount:
    """Take the buffers that are reused out of the passes that make them.

    S makes them, or, where the vocabulary is whole, the F of the last stage.
    """
    if not count.reused:
        return count
    maker: tuple[PassKind, int] = ("S", 0)
    if not plan.treatment.is_sharded:
        maker = "F", plan.stages[-1][1]
    *before, (last, times) = count.passes[maker].parts  # the last part does S
    less = replace(last, left=last.left - count.reused, peak=last.peak - count.reused)
    own = PassCount.joined([*before, (less, times)])
    return replace(count, passes={**count.passes, maker: own})


def _groups(config: Subject, plan: Plan, rank: int, recorder: Recorder) -> Groups:
    """Return the groups of the first rank among those that share pipeline rank ``rank``."""
    parallel = config.parallel
    grid = Grid(parallel.tensor_size, 1, parallel.pipeline_size, "tp-dp-pp", parallel.context_size)
    own = next(r for r in range(grid.world_size) if grid.coordinates(r).pipeline == rank)
    rows = set(grid.groups("tensor"))

    def connect(use: str, tiling: Tiling) -> ListedGroup:
        axis: CountedAxis = "context" if use == "context" else "column"
        if rows.issuperset(tiling):
            axis = "tensor"
        ranks = next((ranks for ranks in tiling if own in ranks), tiling[0])
        return ListedGroup(recorder, axis, ranks.index(own) if own in ranks else 0, len(ranks))

    ends = ends_with_copies(plan, config.model.embeds_at_both_ends)
    return connect_grid(grid, own, META, ends, connect, links_of(plan))
