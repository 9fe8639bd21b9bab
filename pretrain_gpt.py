"""Pretrains a GPT: from flags to configurations to training. torchrun starts a process per rank."""

import io
import logging
import os
import sys
import time

from megatron.commands.environment import in_environment
from megatron.commands.patience import telling

with in_environment(), telling("loading PyTorch and this program"):
    from torch.distributed.elastic.multiprocessing.errors import record

    from megatron.parallel.environment import launched, set_nccl_environment
    from megatron.parallel.launchers import adopt_launcher
    from megatron.planning.dry_run import dry_run
    from megatron.planning.run_plan import COMPARISON_SECONDS
    from megatron.run.command_line import parse
    from megatron.run.run_config import RunConfig
    from megatron.schedules.search.watch import Watch
    from megatron.simulator.costs.gpus import gpu
    from megatron.training.connect import leave
    from megatron.training.determinism import follow_mode
    from megatron.training.exit_signals import ExitSignals
    from megatron.training.failure import end_the_job, or_exit
    from megatron.training.guard.hang_detector import HangDetector
    from megatron.training.guard.neighbours import Neighbours
    from megatron.training.guard.orphans import end_with_torchrun
    from megatron.training.loop import train
    from megatron.training.out_of_memory import explained
    from megatron.training.prepare import agreed, prepare, set_up
    from megatron.training.rendezvous import join


@record  # leaves what nobody catches for torchrun's report
def main() -> None:
    """Run the command; Ctrl-C ends the process at once."""
    try:
        pretrain()
    except KeyboardInterrupt:
        os._exit(130)  # a normal exit would join the lane's thread, which may wait for a peer


def pretrain() -> None:
    """Train, or predict, as the command line says."""
    begin = time.monotonic()
    print_any_text()
    end_with_torchrun()
    set_nccl_environment()
    adopt_launcher()
    job = or_exit(launched, rank=0)
    rank, local_rank, world_size = job.rank, job.local_rank, job.world_size
    # Rank 0 logs for all ranks: compilations on first use, and slower code if there is no compiler.
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s")
    speak = rank == 0
    config = or_exit(lambda: parse(sys.argv[1:], world_size, speak), rank, local_rank)
    if config.dry_run is not None:
        predict(config, config.dry_run.gpu, rank)
        return
    follow_mode(config.parallel.devices)
    with telling("the plan and the data"):
        prepared = or_exit(lambda: prepare(config, rank), rank, local_rank)
    signals = ExitSignals(config.guard.exit_signals)
    with telling("meeting the other ranks"):
        rendezvous = or_exit(lambda: join(config.parallel), rank, local_rank)
    neighbours = Neighbours(rendezvous)
    neighbours.join()
    minutes = config.parallel.devices.distributed_timeout_minutes
    detector = HangDetector(rendezvous, config.guard.seconds_of_hang(minutes), neighbours)
    detector.start()
    state = None
    try:
        prepared = agreed(prepared, rendezvous, local_rank)
        with telling("the model and its links"):
            state = set_up(prepared, rendezvous, local_rank)
        detector.follow(state)
        train(prepared.config, state, prepared.data, signals, begin)
        neighbours.take_leave("left")
        leave(state.groups)
    except Exception as error:
        told = explained(error, config.log, state, rank, prepared.advice)
        end_the_job(rendezvous, told, detector.find_lost, lambda: neighbours.take_leave("told"))


def print_any_text() -> None:
    """Print what the encoding lacks, such as half a character of a path, by its number."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def predict(config: RunConfig, gpu_name: str, rank: int) -> None:
    """Print what would run, without starting anything."""

    def report() -> None:
        if config.notes:
            print(*config.notes, sep="\n", end="\n\n", flush=True)
        watch = Watch.of_rank(rank, config.parallel.planning.search_seconds)
        for paragraph in dry_run(config, gpu(gpu_name), watch, COMPARISON_SECONDS):
            print(paragraph, end="\n\n", flush=True)

    if rank == 0:
        or_exit(report, rank)


if __name__ == "__main__":
    main()
