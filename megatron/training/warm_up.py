"""Uses all links, kernels and libraries once before the first iteration.

A link is connected, and a kernel is loaded, when it is first used. Without a warm-up this happens
in the first iteration. While one rank connects a link or loads a kernel, the other ranks wait. They
may even wait for ever: the load of a kernel waits for the device, and a communication on the device
waits for the rank that loads.
"""

import gc

import torch

from megatron.data.microbatch import Microbatch
from megatron.optimizer.grad_norm import local_sum_of_squares
from megatron.parallel.groups import Groups
from megatron.run.run_config import RunConfig
from megatron.runtime.batch import DeviceMicrobatch, to_device
from megatron.training.own_tokens import kept_tokens
from megatron.training.setup import TrainState


def warm_up(config: RunConfig, state: TrainState) -> None:
    """Use every link, group, kernel and library once; every rank calls it, no state changes."""
    groups, trains = state.groups, not config.train.skip_train
    state.zero_gradients()
    state.pipeline.warm_up(_nothing(config, groups), trains=trains)
    if trains:
        state.zero_gradients()
        gc.collect()  # its passes refer to each other, and would keep the microbatch for a while
        local_sum_of_squares(state.counted, state.kernels, groups.device)
    for axis in (groups.world, groups.tensor_sums, groups.data, groups.pipeline):
        axis.all_reduce(torch.zeros(1, device=groups.device))
    if groups.device.type == "cuda":
        torch.cuda.synchronize(groups.device)


def _nothing(config: RunConfig, groups: Groups) -> DeviceMicrobatch:
    """Return a microbatch of the same shape as this rank's microbatches, without any loss.

    Every sample is one document, so attention that keeps documents apart runs its own kernels.
    """
    shape = (config.train.micro_batch_size, config.model.seq_length)
    tokens_bs, asked = torch.zeros(shape, dtype=torch.int64), config.data.documents
    starts_bs, positions_bs = torch.zeros_like(tokens_bs), torch.arange(shape[1]).expand(shape)
    nothing = Microbatch(
        tokens_bs,
        tokens_bs,
        torch.zeros(shape),
        starts_bs if asked is not None and asked.reset_attention_mask else None,
        positions_bs if asked is not None and asked.reset_position_ids else None,
    )
    kept = kept_tokens(config, groups.context.rank)
    return to_device([nothing.part(kept, config.model.further.mtp_num_layers)], groups.device)[0]
