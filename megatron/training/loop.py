"""A run from its configuration to the end of training, in the order in which the data flows.

    flags -> configs -> grid -> plan -> my row -> stage -> executor
          -> gradients reduced -> optimizer -> log

``pretrain_gpt.py`` makes the first arrow, and ``prepare.py`` the next ones, up to a rank that can
train. From here on all ranks go in step; rank 0 prints.
"""

import math
import time

from megatron.checkpoint.lock import FolderLock
from megatron.parallel.groups import ConnectedAxis
from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig
from megatron.runtime.feed import Feed
from megatron.runtime.position import END_OF_SAVE
from megatron.training.end_of_run import last_screen
from megatron.training.evaluations import Evaluations
from megatron.training.exit_signals import ExitSignals
from megatron.training.generation import Generation
from megatron.training.growing_batches import GrowingBatches
from megatron.training.guard.collector import Collector
from megatron.training.guard.copies import Copies
from megatron.training.guard.data_watch import DataWatch
from megatron.training.guard.exits import AgreedExit
from megatron.training.guard.losses import LossWatch
from megatron.training.interrupted import lost_words
from megatron.training.iteration import run_iteration
from megatron.training.metrics.introduce import introduce
from megatron.training.metrics.last_screen import screen_lines
from megatron.training.metrics.log import open_log
from megatron.training.metrics.records import Saved, SaveEvent, now
from megatron.training.open_checkpoints import open_checkpoints, sole_writer, writer_hosts
from megatron.training.open_data import Data
from megatron.training.post_validated_step import make_train_step
from megatron.training.profiling.last_passes import LastPasses
from megatron.training.profiling.observation import Observation
from megatron.training.profiling.torch_trace import profiler
from megatron.training.progress import Progress, last_iteration, total_iterations
from megatron.training.rendezvous import DriftError, UserError
from megatron.training.setup import TrainState
from megatron.training.step import Finished
from megatron.training.warm_up import warm_up
from megatron.training.words import samples_in_words


def train(
    config: RunConfig,
    state: TrainState,
    data: Data,
    signals: ExitSignals | None = None,
    begin: float | None = None,
) -> None:
    """Train from where a checkpoint stopped, or from the start, to the end of ``config``.

    ``signals`` notes signals, so that the run leaves in good order; without it, a signal ends the
    rank. ``begin`` is the time at which the process began, by ``time.monotonic``; ``None``: now.

    Raises:
        FloatingPointError: the loss or the gradient is infinite or NaN; the message names the
            iteration and the rank that saw it first.
        UserError: the data or the checkpoint cannot be read.
        DriftError: ranks hold different copies of a weight; the message names the first.
    """
    begin = time.monotonic() if begin is None else begin
    hosts = writer_hosts(state.groups, config.checkpoint)
    agreed_exit = AgreedExit(
        config.guard, signals or ExitSignals(), begin, state.groups.world_hosts
    )
    with sole_writer(config.checkpoint, hosts) as lock:
        loop = _Loop(config, state, data, hosts, lock)
        with loop.log:
            try:
                with loop.collector.running():
                    loop.run_all(agreed_exit)
                loop.end()
            except KeyboardInterrupt:
                loop.say_what_is_lost()
                raise
            except (FloatingPointError, UserError, DriftError):
                # All ranks raise, so they can end a save that is under way.
                loop.let_save_end()
                raise
        loop.log.close()
    agreed_exit.close()


class _Loop:
    """The iterations of a run and all work between them, on one rank.

    The loop begins at ``start``, the progress of the earlier run, and ends after ``last``
    iterations.
    """

    def __init__(
        self,
        config: RunConfig,
        state: TrainState,
        data: Data,
        hosts: ConnectedAxis,
        lock: FolderLock | None,
    ) -> None:
        self._config, self._state, self._data = config, state, data
        world = state.groups.world
        self.log = open_log(config.log.records, world.rank, world.size)
        self._say = self.log.say
        self._checkpoints = open_checkpoints(
            config, state, hosts, self._say, self._record_save, lock
        )
        self._position = state.pipeline.position
        with self._position.within("the load of a checkpoint", may_last=True):
            self.start = self._checkpoints.load()
        self._skip_consumed()
        if not config.train.skip_train and (
            note := self.start.other_order(data.train, config.train.dataset_samples)
        ):
            self._say(note)
        self._total = total_iterations(config.train, self.start)
        self.last = last_iteration(config.train, self.start)
        for note in data.notes:
            self._say(note)
        self._data_watch = DataWatch(data.corpora, self._say)
        # If the guess of the last step turns out wrong, the batch of that step is needed again.
        kept = 2 if config.optimizer.post_validation else 1
        self._feed = Feed(state.groups.device, kept) if config.data.prefetch else None
        self._batches = GrowingBatches(config, state, data.train, self._say)
        self.meter = introduce(config, state, self.start, self.log)
        if state.groups.device.type == "cuda":
            with self.meter.paused(), self._position.within("the warm-up"):
                warm_up(config, state)
        is_checked = not config.guard.no_check_for_nan_in_loss_and_grad
        self._step = make_train_step(
            config.optimizer, state, config.log, ends_if_not_finite=is_checked
        )
        self._losses = LossWatch(config.guard)
        interval = config.guard.check_weight_hash_across_dp_replicas_interval
        self._copies = Copies(state, 0 if config.train.skip_train else interval)
        self._leaves = ""
        self._finished = self._saved = self.start.iteration
        guard = config.guard
        every = guard.manual_gc_interval if guard.manual_gc else None
        self.collector = Collector(every, not guard.no_manual_gc_eval)
        self._evaluations = Evaluations(
            config.train, state, data, self.meter, self.log, config.data.full_validation
        )
        self._generation = Generation(
            config.log.generate,
            data.prompts,
            config.train.seed,
            state,
            config.train.micro_batch_size,
            self.meter,
            self.log,
        )
        self._last_passes = LastPasses(state, config.parallel.placement.machines)
        self._observation = Observation(
            config.log,
            state,
            self.last - 1,
            lambda costs: make_run_plan(config, costs),
            self._say,
        )

    def run_all(self, agreed_exit: AgreedExit) -> None:
        """Train all iterations, or until the ranks agree to leave."""
        phase = "the first reading of the optimizer"
        with self.meter.paused(), self._position.within(phase, may_last=True):
            self._copies.begin(self.start.iteration)
        with profiler(self._config.log, self._state.groups.world.rank) as profiler_step:
            for iteration in range(self.start.iteration, self.last):
                self.run(iteration)
                self._finished = iteration + 1
                with self.meter.paused(), self._position.within("the profiler", may_last=True):
                    profiler_step()  # may write its trace
                reason, saves = agreed_exit.decide()
                if saves and self._config.checkpoint.save is not None:  # a file asks for it
                    self._save_unless_due(iteration)
                if reason:
                    self.leave(iteration, reason)
                    break

    def run(self, iteration: int) -> None:
        """Train an iteration; observe, evaluate, write text and save if it is time to."""
        config = self._config
        self._position.enter(f"iteration {iteration + 1}")
        if self._data_watch.is_due(self._data.train.consumed_samples):
            with self.meter.paused():
                self._data_watch.check()
        if self._batches.change:
            self._report(self._step.settle())
            phase = "the plan for batches of another size"
            with self.meter.paused(), self._position.within(phase, may_last=True):
                self._batches.follow()
                self.collector.settle()
        if iteration + 1 in config.guard.iterations_to_skip:
            self._skip(iteration)
        else:
            self._train(iteration)
        with self.meter.paused():
            self._checkpoints.report()
        if self._evaluations.is_due(iteration):
            self._report(self._step.settle())
            phase = f"evaluation at iteration {iteration + 1}"
            with self._batches.largest(), self._position.within(phase), self.collector.evaluating():
                self._evaluations.between(iteration)
        if self._generation.is_due(iteration):
            self._report(self._step.settle())
            phase = f"text at iteration {iteration + 1}"
            with self._position.within(phase), self.collector.evaluating():
                self._generation.after(iteration, self._data.train.consumed_samples)
        if self._copies.is_due(iteration):
            self._check_copies(iteration)
        if _is_due(iteration, config.checkpoint.save_interval):
            self._save(iteration)
        self.collector.ended(iteration)

    def _check_copies(self, iteration: int) -> None:
        self._report(self._step.settle())
        with self.meter.paused(), self._position.within("the check of copies"):
            self._copies.check(iteration)

    def _save_unless_due(self, iteration: int) -> None:
        """Save, unless ``--save-interval`` asks for a save after ``iteration`` anyway."""
        if not _is_due(iteration, self._config.checkpoint.save_interval):
            self._save(iteration)

    def leave(self, iteration: int, reason: str) -> None:
        """Make ``iteration`` the last one; ``reason`` is told at the end."""
        early = iteration + 1 < self.last
        self.last, self._leaves = iteration + 1, reason
        if early and self._config.log.record_timeline is not None:
            self._say("--record-timeline: the run leaves early, and nothing is recorded")

    def _train(self, iteration: int) -> None:
        meter, observation = self.meter, self._observation
        # A guess is checked before a timed iteration, so that the iteration runs once. The open
        # step of a sharded optimizer stays open: its time belongs to the iteration.
        if observation.times(iteration) and self._config.optimizer.post_validation:
            self._report(self._step.settle())
        with meter.paused():
            recorder = self._last_passes.begin(observation.begin(iteration))
            observer = meter.observer(iteration, recorder)
        finished = run_iteration(
            self._step,
            self._config.optimizer,
            self._data.train,
            self._state.groups,
            iteration,
            observer,
            self._feed,
            by_microbatch=not self._config.data.weighs_tokens_alike,
        )
        meter.ended(iteration)
        self._report(finished)
        with meter.paused(), self._position.within("what was measured", may_last=True):
            self._last_passes.finished(iteration)
            observation.finished(iteration)  # may plan anew

    def _skip(self, iteration: int) -> None:
        """Pass over the samples of an iteration."""
        self._report(self._step.settle())
        self._observation.passed_over(iteration)
        first = self._data.train.consumed_samples
        end = first + self._config.train.batches.at(first)
        self._data.train.consumed_samples = end
        samples = range(first, end)
        self._say(
            f"iteration {iteration + 1} is skipped (--iterations-to-skip): "
            f"{samples_in_words(samples)} of the data are passed over"
        )
        self.meter.ended(iteration)
        scaler = self._state.loss_scaler
        scaler.pass_over(len(samples))
        self.meter.report(
            Finished(
                iteration,
                0.0,
                math.nan,
                end,
                samples=samples,
                is_skipped=True,
                loss_scale=scaler.state.scale if scaler.is_active else None,
                samples_without_step=scaler.state.samples_without_step,
            )
        )

    def _report(self, finished: Finished | None) -> None:
        """Note an iteration that has become final."""
        self.meter.report(finished)
        self._copies.note(finished)
        for remark in self._losses.remarks(finished):
            self._say(remark)

    def end(self) -> None:
        """Make the last iteration final, save, evaluate, and print the figures of the end.

        Raises:
            UserError: the last save has failed, so all training since the save before is lost; the
                error tells a launcher that restarts failed jobs that this job has failed.
        """
        config, meter = self._config, self.meter
        self._report(self._step.settle())
        meter.report_rest()
        if config.train.skip_train:
            self._say("training is skipped (--skip-train)")
        elif self.last == self.start.iteration:
            self._say(f"nothing to train: the checkpoint is of iteration {self.last} already")
        elif config.checkpoint.save is not None:
            self._save_unless_due(self.last - 1)
        exit_interval = config.train.exit_interval
        if self._leaves:
            saved = "" if config.checkpoint.save else "; nothing is saved, without --save"
            self._say(f"exiting at iteration {self.last} {self._leaves}{saved}")
        elif config.train.skip_train or self.last >= self._total:
            phase = "the last evaluations"
            with self._batches.largest(), self._position.within(phase):
                self._evaluations.at_end(self.last)
        elif exit_interval is not None and self.last % exit_interval == 0:
            self._say(f"exiting at iteration {self.last} (--exit-interval)")
        with meter.paused("save"):
            self.let_save_end()
        meter.report_memory(self.last)
        meter.report_post_validation()
        with self._position.within("the last screen", may_last=True):
            self._tell_the_end()
        meter.report_end(self.last, self._data.train.consumed_samples)
        self._state.close()
        if fault := self._checkpoints.fault:
            raise UserError(
                f"--save: {fault}; make room in {config.checkpoint.save}, or name another folder, "
                "and go on with --load"
            )

    def _tell_the_end(self) -> None:
        """Print the last screen; all ranks call it, and rank 0 prints."""
        timelines, world = self._last_passes.timelines(), self._state.groups.world
        if world.rank == 0:
            values = last_screen(self._config, self._state, self.meter.recent, timelines)
            for line in () if values is None else screen_lines(values):
                self._say(line)

    def let_save_end(self) -> None:
        """Wait for a checkpoint that is being written: it may be the last one of the run."""
        with self._position.within(END_OF_SAVE, may_last=True):
            self._checkpoints.report(wait=True)

    def _skip_consumed(self) -> None:
        """Go on in the data where the earlier run stopped.

        Raises:
            UserError: batches of the earlier run had another size, so iterations and samples do
                not fit together.
        """
        train, start = self._config.train, self.start
        counted = train.train_samples is None and not train.skip_train
        if counted and start.consumed_samples != train.batches.samples_of(start.iteration):
            flag, use = "--batch-size-steps", "those of that run"
            if train.rampup is None:
                flag = f"--global-batch-size {train.global_batch_size}"
                use = f"{start.consumed_samples // start.iteration}"
            raise UserError(
                f"{flag}: the {start.iteration} iterations in --load have used "
                f"{start.consumed_samples} samples, and a run keeps the size of its batches: use "
                f"{use}, give its length in samples (--train-samples), or --finetune to start anew "
                "from those weights"
            )
        self._data.train.consumed_samples = start.consumed_samples

    def _save(self, iteration: int) -> None:
        self._check_copies(iteration)
        phase = f"the save of iteration {iteration + 1}"
        with self.meter.paused("save"), self._position.within(phase, may_last=True):
            self._data_watch.check()
            samples = self._config.train.dataset_samples
            self._checkpoints.save(Progress.after(iteration + 1, self._data.train, samples))

    def say_what_is_lost(self) -> None:
        """Say how many iterations an interrupted run loses."""
        saves = self._config.checkpoint.save is not None
        if not self._config.train.skip_train:
            self._say(lost_words(self._finished, self._saved, saves=saves))

    def _record_save(self, event: SaveEvent, progress: Progress) -> None:
        if event != "Saving async checkpoint":
            self._saved = progress.iteration
        self.log.write(Saved(now(), event, progress.iteration, progress.consumed_samples))


def _is_due(iteration: int, interval: int | None) -> bool:
    return interval is not None and (iteration + 1) % interval == 0
