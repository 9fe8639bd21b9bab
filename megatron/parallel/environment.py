"""Environment variables that must be set before NCCL and CUDA start."""

import os
from typing import Final

NCCL_ENVIRONMENT: Final = {
    # The passes, the vocabulary's collectives and every communicator have a stream each. With fewer
    # connections to the GPU than streams, some streams would queue behind others. NCCL alone has
    # two streams for each communicator and one for all; 32 is the largest possible value.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # Several communicators are in flight at once, in one order on every rank: NCCL (from 2.26 on,
    # with CUDA 12.3) then launches them in that order, whichever stream they are on.
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
    # A transfer that another rank waits for must not queue behind the blocks of a large product.
    "TORCH_NCCL_HIGH_PRIORITY": "1",
    # Transfers are issued one by one on purpose: in a batch they would wait for one another.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
}


def set_nccl_environment() -> None:
    """Set ``NCCL_ENVIRONMENT`` for this process; variables that the user has set stay.

    Call it before anything asks for GPUs: even ``torch.cuda.is_available`` may start the driver,
    and later settings have no effect. Without GPUs the call does no harm.
    """
    for name, value in NCCL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
