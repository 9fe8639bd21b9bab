"""Lets plan and data follow batches that grow: every number of microbatches has its own plan.

Stages and layers stay where they are; only the order of passes changes. The plan of the last size
is made before the run, and evaluations always run it. Plans of smaller sizes are made when they
are needed; the first rank makes them for all ranks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from megatron.data.microbatch import MicrobatchLoader
from megatron.planning.planned_run import RunPlan
from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig
from megatron.runtime.pipeline import Installed
from megatron.schedules.counted import counted
from megatron.schedules.search.watch import Watch
from megatron.training.setup import TrainState


class GrowingBatches:
    """The batches of a run on one rank; all ranks call the same methods, between iterations.

    At first the rank has the plan of the last size.
    """

    def __init__(
        self,
        config: RunConfig,
        state: TrainState,
        loader: MicrobatchLoader,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._state, self._loader, self._say = config, state, loader, say
        self._largest: Installed | None = None  # kept while a smaller plan runs

    @property
    def change(self) -> bool:
        """Whether the next batch has another size than the plan that runs."""
        if self._config.train.rampup is None:
            return False
        return self._microbatches(self._size()) != self._loader.num_microbatches

    def follow(self) -> None:
        """Change to the plan for the next batch, and read as many microbatches as it has."""
        if not self.change:
            return
        size, pipeline = self._size(), self._state.pipeline
        if size == self._config.train.global_batch_size:
            assert self._largest is not None, "batches only grow"
            pipeline.let_go(pipeline.put_back(self._largest))
            self._largest = None
        else:
            found = self._plan(size)
            replaced = pipeline.replace_plan(found.plan, found.costs)
            if self._largest is None:
                self._largest = replaced
            else:
                pipeline.let_go(replaced)
        self._loader.num_microbatches = self._microbatches(size)
        self._say(
            f"batches of {counted(size, 'sample')} from here on, "
            f"{counted(self._loader.num_microbatches, 'microbatch')}"
        )

    @contextmanager
    def largest(self) -> Iterator[None]:
        """Run the plan of the last size until the context ends, for evaluations."""
        if self._largest is None:
            yield
            return
        running = self._state.pipeline.put_back(self._largest)
        yield
        self._state.pipeline.put_back(running)

    def _size(self) -> int:
        return self._config.train.batches.at(self._loader.consumed_samples)

    def _microbatches(self, size: int) -> int:
        train = self._config.train
        return size // (train.micro_batch_size * train.replicas)

    def _plan(self, size: int) -> RunPlan:
        """Return the plan that the first rank makes for batches of this size."""
        config, world, own = self._config, self._state.groups.world, None
        if world.rank == 0:
            train = replace(config.train, global_batch_size=size, rampup=None)
            smaller = replace(config, train=train)
            watch = Watch.of_rank(0, config.parallel.planning.search_seconds)
            own = make_run_plan(smaller, watch=watch)
            watch.close()
        found = world.all_gather_object(own)[0]
        assert found is not None, "the first rank has made one"
        return found
