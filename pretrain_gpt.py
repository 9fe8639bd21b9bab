"""Pretrain a GPT: flags to configurations to training. torchrun starts one process per rank."""

import os
import sys
import traceback

import torch
import torch.distributed as dist

from megatron.training.arguments import parse_or_exit
from megatron.training.loop import train
from megatron.training.setup import build_trainer, connect


def main() -> None:
    """Train as the command line says."""
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    config = parse_or_exit(sys.argv[1:], rank, world_size)
    groups = connect(config.parallel, int(os.environ.get("LOCAL_RANK", "0")))
    train(config, build_trainer(config, groups))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def end_the_job(rank: str) -> None:
    """Report the exception being handled and end this process at once.

    A rank that fails must not linger in a collective that the others will never join: torchrun ends
    the job as soon as one process is gone.
    """
    error = sys.exc_info()[1]
    if isinstance(error, FloatingPointError):
        if rank == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        print(f"[rank {rank}] failed:", file=sys.stderr)
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    try:
        main()
    except Exception:
        end_the_job(os.environ.get("RANK", "0"))
