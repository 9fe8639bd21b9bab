"""Pretrains a GPT: from flags to configurations to training. torchrun starts a process per rank."""

import logging
import os
import sys
import traceback
from typing import NoReturn

from megatron.config.command_line import or_exit, parse_or_exit
from megatron.config.run_config import RunConfig
from megatron.parallel.environment import set_nccl_environment
from megatron.schedules.search.watch import Watch
from megatron.simulator.costs.gpus import gpu
from megatron.training.loop import prepare, set_up, train
from megatron.training.planning.dry_run import dry_run
from megatron.training.rendezvous import Rendezvous, UserError, join
from megatron.training.setup import leave


def main() -> None:
    """Run the command; Ctrl-C ends the process at once."""
    try:
        pretrain()
    except KeyboardInterrupt:
        os._exit(130)  # a normal exit would join the lane's thread, which may wait for a peer


def pretrain() -> None:
    """Train, or predict, as the command line says."""
    set_nccl_environment()
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    # Rank 0 logs for all ranks: compilations on first use, and slower code if there is no compiler.
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s")
    config = parse_or_exit(sys.argv[1:], rank, world_size)
    if config.dry_run is not None:
        predict(config, config.dry_run.gpu, rank)
        return
    prepared = or_exit(lambda: prepare(config, rank), rank)
    rendezvous = join(config.parallel)
    try:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        state = set_up(config, prepared, rendezvous, local_rank)
        train(config, state, prepared.data)
        leave(state.groups)
    except Exception as error:
        end_the_job(rendezvous, error)


def predict(config: RunConfig, gpu_name: str, rank: int) -> None:
    """Print what would run, without starting anything."""

    def report() -> None:
        watch = Watch.of_rank(rank, config.parallel.search_seconds)
        for paragraph in dry_run(config, gpu(gpu_name), watch):
            print(paragraph, end="\n\n", flush=True)

    if rank == 0:
        or_exit(report, rank)


def end_the_job(rendezvous: Rendezvous, error: Exception) -> NoReturn:
    """Print the reason, and end this process at once.

    A rank that fails must not linger in a collective that the others will never join: torchrun ends
    the job as soon as one process is gone. If every rank finds the fault, or if it is the user's
    mistake, only one rank prints a line. A rank that fails because another has ended prints
    nothing.
    """
    if isinstance(error, (FloatingPointError, UserError)):
        rendezvous.tell(f"error: {error}")
    elif not rendezvous.is_told:
        print(f"[rank {rendezvous.rank}] failed:", file=sys.stderr)
        traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
