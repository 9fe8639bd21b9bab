"""Pretrain a GPT: flags to configurations to training. torchrun starts one process per rank."""

import logging
import os
import sys
import time
import traceback

from megatron.simulator.costs.gpus import gpu
from megatron.training.arguments import SILENT_SECONDS, or_exit, parse_or_exit
from megatron.training.config import RunConfig
from megatron.training.data import open_data
from megatron.training.dry_run import dry_run
from megatron.training.loop import train
from megatron.training.run_plan import make_run_plan
from megatron.training.setup import build_trainer, connect, leave


def main() -> None:
    """Train, or predict, as the command line says."""
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    # Rank 0 speaks for all: what is compiled on first use, what runs slower for want of a compiler.
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s")
    config = parse_or_exit(sys.argv[1:], rank, world_size)
    if config.dry_run is not None:
        predict(config, config.dry_run.gpu, rank)
        return
    run_plan = or_exit(lambda: make_run_plan(config), rank)
    data = or_exit(lambda: open_data(config), rank)
    groups = connect(config.parallel, int(os.environ.get("LOCAL_RANK", "0")), run_plan.plan)
    train(config, build_trainer(config, groups, run_plan), data)
    leave(groups)


def predict(config: RunConfig, gpu_name: str, rank: int) -> None:
    """Print what would run, without starting anything."""

    def report() -> None:
        for paragraph in dry_run(config, gpu(gpu_name)):
            print(paragraph, end="\n\n", flush=True)

    if rank == 0:
        or_exit(report, rank)


def end_the_job(rank: int) -> None:
    """Report the exception being handled and end this process at once.

    A rank that fails must not linger in a collective that the others will never join: torchrun ends
    the job as soon as one process is gone.
    """
    error = sys.exc_info()[1]
    if not isinstance(error, FloatingPointError):
        print(f"[rank {rank}] failed:", file=sys.stderr)
        traceback.print_exc()
    elif rank == 0:
        print(f"error: {error}", file=sys.stderr)
    else:
        time.sleep(SILENT_SECONDS)  # every rank has found the same; rank 0 says it
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        os._exit(130)  # a normal exit would join the lane's thread, which may wait for a peer
    except Exception:
        end_the_job(int(os.environ.get("RANK", "0")))
