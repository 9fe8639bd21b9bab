"""The *site* of a layer: its device, dtype, kernels, ranks, recomputation and 8-bit products.

Every part of a layer is built from its own sizes and the site. A new axis of ranks is a new field
here, and changes no signature.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from megatron.kernels.choose import kernels_for
from megatron.kernels.face import Kernels
from megatron.kernels.grouped import GroupedKernels
from megatron.kernels.wide_norms import WideNorms
from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.layers.recompute import NO_RECOMPUTATION, Recomputation
from megatron.layers.vocabulary.rooms import FreeRooms
from megatron.parallel.context import WHOLE_SEQUENCES, ContextParallel
from megatron.parallel.experts import ExpertParallel
from megatron.parallel.groups import ConnectedAxis
from megatron.parallel.tensor import ALONE, TensorParallel

NO_REPLICAS: Final = ConnectedAxis("data", 0, (0,))
"""A rank that alone has its parameters."""


@dataclass(frozen=True)
class Site:
    """The settings that all layers of a rank share.

    Attributes:
        device: of the parameters.
        dtype: of parameters and activations.
        tensor: the ranks that share the layers.
        context: the ranks that share every sequence.
        given_experts: the ranks over which the experts of a layer are spread; ``None``: experts are
            with their layer.
        data: all ranks with the same parameters and other tokens, in the sequence and in replicas.
        recomputation: the parts and layers that are computed again for the backward.
        wide_stream: the residual stream, and the tensors between stages, are in fp32.
        eight_bits: the products in 8 bits; ``None``: there are none.
        given_kernels: kernels to use, also for the norms of a wide stream; ``None``: the fastest
            kernels for the device and the dtype.
        grouped_package: multiplies the slots of experts, whose ends the host must know; ``None``:
            the kernels multiply the slots, and the host need not know the ends.
        rooms: returns the object that gives the output layer its rooms.
    """

    device: torch.device
    dtype: torch.dtype
    tensor: TensorParallel = ALONE
    context: ContextParallel = WHOLE_SEQUENCES
    given_experts: ExpertParallel | None = None
    data: ConnectedAxis = NO_REPLICAS
    recomputation: Recomputation = NO_RECOMPUTATION
    wide_stream: bool = False
    eight_bits: EightBitSettings | None = None
    given_kernels: Kernels | None = None
    grouped_package: GroupedKernels | None = None
    rooms: Callable[[], FreeRooms[Sequence[Tensor]]] = FreeRooms

    @cached_property
    def experts(self) -> ExpertParallel:
        """The ranks that have the experts of a layer."""
        return self.given_experts or ExpertParallel(self.tensor)

    @cached_property
    def kernels(self) -> Kernels:
        """The kernels of the device and the dtype."""
        return self.given_kernels or kernels_for(self.device, self.dtype)

    @property
    def grouped_kernels(self) -> GroupedKernels:
        """The kernels that multiply the slots of experts."""
        return self.grouped_package or self.kernels

    @cached_property
    def stream_kernels(self) -> Kernels:
        """The kernels for norms of the residual stream."""
        if not self.wide_stream:
            return self.kernels
        return WideNorms(self.device, kernels=self.given_kernels)

    @property
    def stream_dtype(self) -> torch.dtype:
        """Dtype of the residual stream."""
        return torch.float32 if self.wide_stream else self.dtype
