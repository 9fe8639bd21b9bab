"""GPUs and machines of a job, and rules about devices and communication libraries of ranks."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from megatron.flags.groups import Flags
from megatron.flags.rules import notes_in, refuses_in
from megatron.parallel.environment import local_world_size
from megatron.parallel.settings import DeviceSettings
from megatron.run.dry_run import DryRunSettings
from megatron.run.gpu_driver import why_gpus_are_out_of_reach
from megatron.run.parallelism import on_cuda
from megatron.simulator.costs.gpus import GIB, Gpu, gpu, gpu_of_driver
from megatron.simulator.costs.settings import ClusterSettings

_NO_GPUS = "PyTorch finds no CUDA device here; install a driver and a CUDA build of PyTorch"


def ranks_of_machine(flags: Flags, environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the ranks of a machine, by the flags or the launcher; ``None``: not known.

    In a dry run without --ranks-per-node they are the GPUs of a usual machine.
    """
    if asked := flags[ClusterSettings].ranks_per_node:
        return asked
    if flags[DryRunSettings].dry_run:
        return gpu(flags[DryRunSettings].gpu).machine
    return int(environment.get("LOCAL_WORLD_SIZE") or 0) or None


def linked_ranks(world: int, machine: int | None, own_gpu: Gpu | None) -> int:
    """Return the ranks that links connect: those of a machine, or of a domain of several.

    A job takes equally many machines of every domain, as schedulers divide jobs into segments: 256
    ranks on domains of 72 GPUs are 4 times 64. If its machines cannot be divided so that more than
    half of a domain is taken, it fills domains.

    Args:
        world: ranks of the job.
        machine: ranks of a machine; ``None``: one machine has all ranks.
        own_gpu: the GPU of every rank, if it is known.
    """
    if machine is None:
        return world
    most = max(1, (0 if own_gpu is None else own_gpu.domain) // machine)
    machines = -(-world // machine)
    even = (n for n in range(most, most // 2, -1) if machines % n == 0)
    return machine * (machines if machines <= most else next(even, most))


def known_gpu(flags: Flags) -> Gpu | None:
    """Return the GPU of a job or a dry run; ``None``: ranks run on CPUs, or on an unknown GPU.

    A rank reads only the name of its own GPU. All ranks have the same kind of GPU.
    """
    if flags[DryRunSettings].dry_run:
        return gpu(flags[DryRunSettings].gpu)
    if not on_cuda(flags):
        return None
    index = int(os.environ.get("LOCAL_RANK") or 0)
    return gpu_with_memory(torch.cuda.get_device_name(index))


def gpu_with_memory(name: str) -> Gpu | None:
    """Return the GPU that the driver calls ``name``, with no more memory than the name says."""
    found, told = gpu_of_driver(name), re.search(r"(\d+) ?GB\b", name)
    if found is None or told is None:
        return found
    return replace(found, memory=min(found.memory, int(told[1]) * GIB))


@refuses_in("real")
def _device(flags: Flags) -> Iterator[str]:
    cuda = torch.cuda.is_available()
    if flags[DeviceSettings].device == "cuda" and not cuda:
        yield f"--device cuda: {why_gpus_are_out_of_reach() or _NO_GPUS}; or use --device cpu"
    local_ranks = local_world_size()
    if cuda and flags[DeviceSettings].device != "cpu" and local_ranks > torch.cuda.device_count():
        found = torch.cuda.device_count()
        if found == 1 and os.environ.get("SLURM_STEP_NUM_TASKS"):
            yield (
                f"srun gives each of the {local_ranks} tasks of this machine one GPU alone, and "
                "NCCL needs to see all GPUs of the machine: add --gpu-bind=none to srun, and ask "
                "for GPUs by --gpus-per-node instead of --gpus-per-task"
            )
            return
        yield (
            f"--nproc-per-node {local_ranks}: this machine has {found} CUDA "
            "devices and every rank needs its own: start as many ranks as devices, or use "
            "--device cpu"
        )


@refuses_in("real")
def _backend(flags: Flags) -> Iterator[str]:
    if flags[DeviceSettings].distributed_backend == "gloo" and on_cuda(flags):
        yield (
            "--distributed-backend gloo cannot send CUDA tensors from stage to stage: use nccl, "
            "leave it out, or compute on CPUs with --device cpu"
        )


@notes_in("real")
def _backend_of_cpus(flags: Flags) -> Iterator[str]:
    if flags[DeviceSettings].distributed_backend == "nccl" and not on_cuda(flags):
        why = why_gpus_are_out_of_reach() if flags[DeviceSettings].device == "auto" else None
        yield (
            f"--distributed-backend nccl changes nothing: {f'{why}; ' if why else ''}ranks on CPUs "
            "communicate with gloo"
        )
