"""The settings of a run that decide its count: runs with equal settings share one count.

A count lists the work, messages and memory of passes.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.data.settings import DocumentSettings
from megatron.kernels.counted import AMPERE, CountedGpu
from megatron.kernels.documents import Documents
from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.layers.recompute import Recomputation
from megatron.model.placement import Placement, place
from megatron.model.settings import ModelSettings
from megatron.parallel.context_settings import ContextRankSettings
from megatron.parallel.grid import Grid
from megatron.parallel.settings import ExpertRankSettings, TensorRankSettings
from megatron.planning.count.recorder import META
from megatron.run.run_config import RunConfig
from megatron.run.slice_lengths import lengths_of_slices
from megatron.runtime.batch import DeviceMicrobatch
from megatron.schedules.plan import Plan


class Subject(NamedTuple):
    """A model, one microbatch, and the layout of one replica.

    The plan gives the number of pipeline ranks and the treatment of the vocabulary.

    Attributes:
        wide_stream: whether the activations between layers are fp32.
        documents: every sample counts as one document, which is the most work that documents can
            make; ``None``: samples are not divided.
        expert_imbalance: as in ``DryRunSettings``.
        offloads: whether the bytes that may wait on the host are counted.
        slices: tokens of every slice of a sample; empty: microbatches are whole.
        host_knows_slots: the host learns how many tokens each expert has.
        gathers_eight_bits: the optimizer rounds the weights of layers that multiply in 8 bits.
        gpu: the generation of the GPU; an unknown one is taken for an A100.
        captures: passes are captured as graphs.
    """

    model: ModelSettings
    samples: int
    dtype: torch.dtype
    gradient_dtype: torch.dtype
    wide_stream: bool
    eight_bits: EightBitSettings | None
    recomputation: Recomputation
    vocab_recompute: bool
    padded_vocab_size: int
    tensor: TensorRankSettings
    context: ContextRankSettings
    experts: ExpertRankSettings
    expert_imbalance: float
    documents: DocumentSettings | None
    offloads: bool = False
    slices: tuple[int, ...] = ()
    host_knows_slots: bool = False
    gathers_eight_bits: bool = False
    gpu: CountedGpu = AMPERE
    captures: bool = False

    @classmethod
    def of(cls, config: RunConfig, slices: int = 1) -> "Subject":
        """Return the settings of a run that decide its count, with microbatches in ``slices``."""
        train, parallel, eight_bits = config.train, config.parallel, config.train.eight_bits
        if eight_bits is not None:  # a count needs no Transformer Engine
            eight_bits = replace(eight_bits, transformer_engine=False)
        asked, documents = config.dry_run, config.data.documents
        if documents is not None:
            documents = replace(documents, eod_token=0)
        return cls(
            model=config.model,
            samples=train.micro_batch_size,
            dtype=train.dtype,
            gradient_dtype=train.gradient_dtype,
            wide_stream=train.wide_stream,
            eight_bits=eight_bits,
            recomputation=train.recomputation,
            vocab_recompute=parallel.vocabulary.vocab_recompute,
            padded_vocab_size=parallel.padded_vocab_size,
            tensor=parallel.tensor,
            context=parallel.context,
            experts=parallel.experts,
            expert_imbalance=1.0 if asked is None else asked.dry_run_expert_imbalance,
            documents=documents,
            offloads=parallel.offload.cpu_offload,
            slices=lengths_of_slices(config.model, slices, parallel.slices.strategy)
            if slices > 1
            else (),
            host_knows_slots=train.grouped_package is not None,
            gathers_eight_bits=eight_bits is not None and parallel.replicas.gathers_eight_bits,
            gpu=_generation(config),
            captures=train.captures_passes,
        )

    def grid(self, ranks: int) -> Grid:
        """Return the ranks of one replica with ``ranks`` pipeline ranks.

        If ranks of other replicas exchange tokens with it, the grid has these replicas too.
        """
        tensor, experts = self.tensor.size, self.experts
        size, sharing = experts.expert_model_parallel_size, experts.expert_tensor_parallel_size
        block = size * (sharing or tensor)
        return Grid(
            tensor,
            block // gcd(block, tensor * self.context.size),
            ranks,
            context_size=self.context.size,
            expert_size=size,
            given_expert_tensor_size=sharing,
            context_heads_size=self.context.heads_size,
        )

    def placement(self, plan: Plan, layers: Sequence[int], rank: int) -> Placement:
        """Return the parts of the model on the first of the ranks with pipeline rank ``rank``."""
        grid = self.grid(plan.ranks)
        shard = grid.vocabulary_rank(rank), self.tensor.size * plan.ranks
        return place(
            self.model,
            plan.stages,
            rank,
            layers=layers,
            padded_vocab_size=self.padded_vocab_size,
            vocabulary_shard=shard if plan.treatment.is_sharded else None,
            tensor_shard=(0, self.tensor.size),
            ahead_stage=plan.ahead_stage,
        )

    def document_starts(self) -> Tensor:
        """Return the starts of documents, [b, s] on the host: every sample is one document.

        In memory the tensor is a single number, so a mistyped size does no harm.
        """
        return torch.zeros((), dtype=torch.int64).expand(self.samples, self.model.seq_length)

    def microbatch(self, starts_bs: Tensor) -> DeviceMicrobatch:
        """Return one rank's microbatch without values; ``document_starts`` made ``starts_bs``."""
        samples, asked = self.samples, self.documents
        tokens = samples * self.model.seq_length // self.context.size
        documents = positions_bs = None
        if asked is not None and asked.reset_attention_mask:
            length = starts_bs.shape[1]
            bounds_k = torch.empty(samples + 1, dtype=torch.int32, device=META)
            documents = Documents(_integers(samples, length), starts_bs, bounds_k, length)
        if asked is not None and asked.reset_position_ids:
            positions_bs = _integers(samples, tokens // samples)
        return DeviceMicrobatch(
            tokens_n=_integers(tokens),
            targets_n=_integers(tokens),
            weight_n=torch.empty(tokens, device=META),
            samples=samples,
            valid_tokens=float(tokens),
            documents=documents,
            positions_bs=positions_bs,
            further=self._further(tokens // samples),
        )

    def _further(self, tokens: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return what follows this rank's tokens of every sample, without values."""
        depths = self.model.further.mtp_num_layers
        if not depths or (self.context.size == 1 and not self.slices):
            return None
        shape = self.samples, depths, tokens
        return _integers(*shape), _integers(*shape), torch.empty(shape, device=META)


def _generation(config: RunConfig) -> CountedGpu:
    """Return the generation of a run's GPU."""
    gpu, devices = config.parallel.gpu, config.parallel.devices
    if gpu is None:
        return AMPERE
    return CountedGpu(
        has_cudnn_attention=gpu.has_cudnn and not devices.deterministic_mode,
        has_block_products=gpu.has_block_products,
    )


def _integers(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device=META)
