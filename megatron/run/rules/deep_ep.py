"""Tokens that travel to experts by the package DeepEP: rules of the dispatcher flex."""

from collections.abc import Iterator
from typing import Final

import torch

from megatron.flags.groups import Flags
from megatron.flags.rules import refuses, refuses_in
from megatron.layers.experts.settings import ExpertSettings
from megatron.model.settings import ShapeSettings
from megatron.parallel.deep_ep import MOST_CHOICES, MULTIPLE, load_deep_ep
from megatron.parallel.settings import ExpertRankSettings
from megatron.run.expert_ranks import expert_ranks, sizes_of_experts
from megatron.run.parallelism import on_cuda
from megatron.run.precision import PrecisionSettings

_FLEX: Final = "--moe-token-dispatcher-type flex"
_INSTEAD: Final = "or take --moe-token-dispatcher-type alltoall"


@refuses
def _own_flags(flags: Flags) -> Iterator[str]:
    if not expert_ranks(flags).visits:
        return
    own = flags[ExpertRankSettings]
    if own.moe_flex_dispatcher_backend == "hybridep":
        yield (
            "--moe-flex-dispatcher-backend hybridep: of the package DeepEP only the class Buffer "
            f"is called here; take deepep, {_INSTEAD}"
        )
    if own.moe_deepep_num_sms % 2:
        yield (
            f"--moe-deepep-num-sms {own.moe_deepep_num_sms} is odd: one multiprocessor sends and "
            "another one receives; choose an even number"
        )


@refuses
def _layer(flags: Flags) -> Iterator[str]:
    """Yield what DeepEP cannot do with this layer."""
    if not expert_ranks(flags).visits:
        return
    chosen, hidden = flags[ExpertSettings].moe_router_topk, flags[ShapeSettings].hidden_size
    if flags[PrecisionSettings].dtype != torch.bfloat16:
        yield f"{_FLEX}: the package DeepEP sums tokens in bf16 only: add --bf16, {_INSTEAD}"
    _, sharing = sizes_of_experts(flags)
    if sharing > 1:
        yield (
            f"{_FLEX} with --expert-tensor-parallel-size {sharing}: a token travels to one rank of "
            f"each expert; give --expert-tensor-parallel-size 1, {_INSTEAD}"
        )
    if hidden % MULTIPLE:
        yield (
            f"{_FLEX}: --hidden-size {hidden} is no multiple of {MULTIPLE}, and DeepEP's programs "
            f"copy half rows of whole 16 bytes: choose a multiple, {_INSTEAD}"
        )
    if chosen > MOST_CHOICES:
        yield (
            f"{_FLEX}: --moe-router-topk {chosen} is more than the {MOST_CHOICES} experts of a "
            f"token that DeepEP counts: lower it, {_INSTEAD}"
        )


@refuses_in("real")
def _of_device(flags: Flags) -> Iterator[str]:
    ranks = expert_ranks(flags)
    if not ranks.visits:
        return
    if not on_cuda(flags):
        yield f"{_FLEX}: the package DeepEP moves tokens between GPUs only; take alltoall"
        return
    try:
        load_deep_ep(ranks.expert_model_parallel_size)
    except ValueError as error:
        yield (
            f"{_FLEX}: {error}; https://github.com/deepseek-ai/DeepEP says how to install it, "
            f"{_INSTEAD}"
        )
