"""The environment variables of a job: the launchers' variables, and NCCL's and CUDA's."""

import os
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Final

NCCL_ENVIRONMENT: Final = {
    # The passes, the vocabulary's collectives and every communicator have a stream each. With fewer
    # connections to the GPU than streams, some streams would queue behind others. NCCL alone has
    # two streams for each communicator and one for all; 32 is the largest possible value.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # Transfers are issued one by one on purpose: in a batch they would wait for one another.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
    # In a captured graph NCCL would register the buffers of collectives as if each lay in one
    # allocation. In segments that grow it does not (pytorch#158029; Megatron-LM refuses the pair).
    "NCCL_GRAPH_REGISTER": "0",
}

DETERMINISTIC_ENVIRONMENT: Final[Mapping[str, tuple[str, ...]]] = {
    # A ring adds up in the order of its ranks; NVLS adds up in the switch. Megatron-LM's last value
    # leaves trees to NCCL.
    "NCCL_ALGO": ("Ring", "CollnetDirect", "CollnetChain", "^NVLS"),
    # With a workspace for each stream cuBLAS takes the same kernels whatever runs beside them.
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),  # Transformer Engine's
}
"""Variables of libraries that must have one of these values if GPUs are to add up in one order; the
first is the value of a variable that is not set. Names and values are Megatron-LM's."""

ALLOCATOR_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables of PyTorch's allocator. The second one is newer; a CUDA build reads both."""

GROWING_SEGMENTS: Final = "expandable_segments:True"
"""Segments of memory that grow, so that blocks of changing sizes leave no holes between them. The
sizes change: an evaluation follows training, and logits of S follow activations of F."""

MOST_RANKS: Final = 1 << 20
"""Ranks of the largest job; a larger number counts as mistyped."""

_LAUNCHER: Final = "torchrun sets it; leave it to torchrun, srun or mpirun, or correct it"


@dataclass(frozen=True)
class Launched:
    """The facts that a launcher gives about the job and this process.

    Attributes:
        rank: number of this process in the job.
        world_size: ranks of the job.
        local_rank: number of this process on its machine, which is also the number of its GPU.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


def launched(environment: Mapping[str, str] = os.environ) -> Launched:
    """Read the variables of a launcher; a process without them is a job of its own.

    Args:
        environment: the variables by name; an empty one counts as not set.

    Raises:
        ValueError: variables are no numbers or out of range; the message has a line for each.
    """
    faults: list[str] = []

    def number(name: str, default: int, least: int, below: int, why: str = "") -> int:
        text = environment.get(name) or str(default)
        if text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) < below:
            return int(text)
        faults.append(
            f"{name}={text}: must be a whole number from {least} to {below - 1}{why}; {_LAUNCHER}"
        )
        return default

    size = number("WORLD_SIZE", 1, 1, MOST_RANKS + 1)
    of_job = f", as WORLD_SIZE is {size}"
    local_size = number("LOCAL_WORLD_SIZE", size, 1, size + 1, of_job)
    of_machine = of_job if local_size == size else f", as LOCAL_WORLD_SIZE is {local_size}"
    found = Launched(
        number("RANK", 0, 0, size, of_job),
        size,
        number("LOCAL_RANK", 0, 0, local_size, of_machine),
    )
    if size > 1:
        number("MASTER_PORT", 1, 1, 1 << 16)
    if faults:
        raise ValueError("\n".join(faults))
    return found


def local_world_size(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks of the job run on this machine."""
    return int(environment.get("LOCAL_WORLD_SIZE") or "1")


def cores_of_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many cores this rank may keep busy, if all ranks of its machine do so."""
    return max(1, _cores() // local_world_size(environment))


def ranks_share_cores(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this machine has fewer cores than ranks of the job."""
    return _cores() < local_world_size(environment)


def _cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def missing_for_meeting(environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield a line on every variable that ranks need to meet and that is not set."""
    for name, meaning in (
        ("RANK", "this process's number"),
        ("MASTER_ADDR", "the host of rank 0"),
        ("MASTER_PORT", "the port on which rank 0 listens"),
    ):
        if not environment.get(name):
            yield (
                f"{name} is not set, and WORLD_SIZE={environment.get('WORLD_SIZE', '')} ranks need "
                f"it to meet: start the job with torchrun, or set it to {meaning}"
            )


def set_deterministic_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set ``DETERMINISTIC_ENVIRONMENT`` for this process; variables that are set stay.

    Call it before the first product on a GPU, and before the first communicator.
    """
    for name, (usual, *_) in DETERMINISTIC_ENVIRONMENT.items():
        if not environment.get(name):
            environment[name] = usual


def variables_of_any_order(environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield a line on each variable with which libraries may add up in any order."""
    for name, allowed in DETERMINISTIC_ENVIRONMENT.items():
        given = environment.get(name)
        parts = given.split(",") if given and name == "NCCL_ALGO" else [given]
        if given and not set(parts) <= set(allowed):
            yield f"{name}={given} may add up in any order: unset it, or take {allowed[0]}"


def set_nccl_environment() -> None:
    """Set ``NCCL_ENVIRONMENT`` and the allocator for this process; variables that are set stay.

    Call it before anything asks for GPUs: even ``torch.cuda.is_available`` may start the driver,
    and later settings have no effect. Without GPUs the call does no harm.
    """
    for name, value in NCCL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not any(os.environ.get(name) for name in ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR_VARIABLES[0]] = GROWING_SEGMENTS
