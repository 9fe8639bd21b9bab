"""What NCCL and CUDA must be told before they start, by the environment variables they read."""

import os
from typing import Final

NCCL_ENVIRONMENT: Final = {
    # The passes, the vocabulary's collectives and every communicator have a stream of their own:
    # with fewer connections to the GPU than streams, some would queue behind others. NCCL alone has
    # two for each communicator and one for all; 32 is the most there can be.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # Several communicators are in flight at once, in one order on every rank: NCCL (from 2.26 on,
    # with CUDA 12.3) then launches them in that order, whichever stream they are on.
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
    # A transfer that another rank waits for is not to queue behind the blocks of a large product.
    "TORCH_NCCL_HIGH_PRIORITY": "1",
    # Transfers are issued one by one on purpose: batches would tie them to one another.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
}


def set_nccl_environment() -> None:
    """Set ``NCCL_ENVIRONMENT`` for this process; what the user has set stays.

    To be called before anything asks for GPUs: even ``torch.cuda.is_available`` may start the
    driver, and what is set after that has no effect. Without GPUs it does no harm.
    """
    for name, value in NCCL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
