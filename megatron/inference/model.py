"""A trained model over pipeline ranks, for the forward alone, with the vocabulary split.

Every rank has some layers and a shard of both vocabulary matrices, as in training with vocabulary
parallelism. All ranks are given the same tokens. The embeddings are summed on the first rank,
activations go from rank to rank, and the last rank broadcasts its output. Then every rank forms the
logits of its own shard. No rank ever has all logits.

Shapes: b rows of a batch, s tokens, h hidden size, n tokens whose logits are formed, v real rows of
the shard.
"""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.checkpoint import storage
from megatron.checkpoint.boxed import BoxedTensor
from megatron.checkpoint.choose import read_model
from megatron.checkpoint.folder import DamagedError
from megatron.checkpoint.train_tensors import WEIGHT, tensors_of_buffers
from megatron.inference.cache import CachedAttention, Slots
from megatron.layers.attention import SelfAttention
from megatron.layers.forward_pass import ForwardPass
from megatron.layers.latent_attention import LatentAttention
from megatron.layers.rope import RotaryEmbedding
from megatron.layers.site import Site
from megatron.model.distribution import LayerDistribution, distribute
from megatron.model.placement import place
from megatron.model.settings import ModelSettings
from megatron.model.stage import RankModel
from megatron.parallel import collectives, p2p
from megatron.parallel.environment import Launched
from megatron.parallel.grid import Grid
from megatron.parallel.groups import Groups, make_groups, single_rank

LONGEST_PIECE = 512
"""Tokens of a row that go through the layers at once."""


class InferenceModel:
    """One rank's part of a model with the weights of a checkpoint.

    Args:
        where: folder of the checkpoint.
        groups: this rank's view of the job, a pipeline of any number of ranks.
        dtype: of weights and activations.
        longest: tokens of the longest row; tables of positions have this length.

    Attributes:
        config: configuration of the model.
        column: all ranks of the pipeline, as the axis of collectives.
        first_row: vocabulary id of this rank's first row.

    Raises:
        ValueError: the model has fewer than ``longest`` positions.
        DamagedError: the checkpoint cannot be read.
    """

    def __init__(self, where: Path, groups: Groups, dtype: torch.dtype, longest: int) -> None:
        # A row's text must not depend on the other rows: no expert is full.
        self.config = read_model(where).replaced(
            seq_length=longest,
            moe_expert_capacity_factor=None,
            moe_router_force_load_balancing=False,
        )
        self.column, self._transfers = groups.column, groups.transfers
        self._rank, self._ranks = groups.pipeline.rank, groups.pipeline.size
        self.device = groups.device
        _check_length(self.config, longest)
        self._model = _rank_model(self.config, self._rank, self._ranks, dtype, groups.device)
        self._model.eval()
        own = list(self._model.owned_parameters())
        buffers = list(self._model.owned_buffers())
        with torch.no_grad():
            for owned in own:
                owned.parameter.zero_()  # rows of padding stay zero; a checkpoint has none
        if problem := storage.check_files(where, groups.world_hosts):
            raise DamagedError(problem)
        storage.read(
            where,
            {
                f"{WEIGHT}.{owned.name}": BoxedTensor(
                    owned.parameter, owned.global_shape, owned.pieces
                )
                for owned in own
            }
            | tensors_of_buffers(buffers),
            groups.world_hosts,
        )
        assert self._model.output_layer is not None, "every rank has a shard"
        self._output = self._model.output_layer
        self.first_row = self._output.shard.first_row

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank, the one that prints."""
        return self._rank == 0

    def start(self, padding_b: Tensor, capacity: int) -> "Rows":
        """Return a batch of rows without tokens.

        Every row has ``capacity`` slots for tokens. The first ``padding_b`` (int64) slots of a row
        stay empty.
        """
        assert capacity <= self.config.seq_length, "tables are not made for it"
        return Rows(self._model, Slots(padding_b.to(self.device), capacity))

    @torch.no_grad()
    def advance(self, rows: "Rows", tokens_bs: Tensor) -> Tensor:
        """Run the next tokens through all layers. All ranks call this together.

        Args:
            rows: the batch.
            tokens_bs: int64, the same on every rank.

        Returns:
            The input of the output layer, [b, s, h], on every rank.
        """
        pieces = tokens_bs.to(self.device).split(LONGEST_PIECE, 1)
        return torch.cat([self._advance(rows, piece.contiguous()) for piece in pieces], 1)

    def _advance(self, rows: "Rows", tokens_bs: Tensor) -> Tensor:
        assert self._model.input_layer is not None, "every rank has a shard"
        x_nh = self._model.input_layer.lookup(tokens_bs.flatten())
        x_bsh = collectives.reduce(x_nh.contiguous(), 0, self.column).view(*tokens_bs.shape, -1)
        if self._rank:
            x_bsh = p2p.receive(torch.empty_like(x_bsh), self._rank - 1, self._transfers).wait()
        x_bsh = rows.run(x_bsh).contiguous()
        if self._rank + 1 < self._ranks:
            p2p.send(x_bsh, self._rank + 1, self._transfers).wait()
        return collectives.broadcast(x_bsh, self._ranks - 1, self.column)

    @torch.no_grad()
    def logits(self, x_nh: Tensor) -> Tensor:
        """Return the logits of this rank's real rows [n, v], soft-capped, in fp32 or wider."""
        return self._output.logits(x_nh)


class Rows:
    """A batch that is being run: the layers of this rank with their cached keys and values."""

    def __init__(self, model: RankModel, slots: Slots) -> None:
        self._model, self._slots = model, slots
        self._attention = {
            index: _cached(layer, slots)
            for index, layer in zip(model.placement.chunks[0], _layers(model), strict=True)
        }

    def run(self, x_bsh: Tensor) -> Tensor:
        """Run the next tokens through the stage of this rank, from embeddings or activations."""
        model = self._model
        positions_bs = self._slots.positions(x_bsh.shape[1])
        if model.placement.first_chunk is not None:
            x_bsh = self._embedded(x_bsh, positions_bs)
        ropes = _at(model.ropes, positions_bs)
        for index, layer in zip(self._attention, _layers(model), strict=True):
            own = layer.self_attention
            layer.self_attention = self._attention[index]
            x_bsh = layer(x_bsh, ForwardPass(rope=ropes[index]))
            layer.self_attention = own
        self._slots.filled += x_bsh.shape[1]
        if model.final_norm is not None:
            x_bsh = model.final_norm(x_bsh) * model.config.vocabulary.logit_multiplier
        return x_bsh

    def _embedded(self, x_bsh: Tensor, positions_bs: Tensor) -> Tensor:
        """Return the input of the first layer, as ``RankModel`` forms it for whole samples."""
        model = self._model
        x_bsh = x_bsh * model.config.vocabulary.embedding_multiplier
        if model.embedding_norm is not None:
            x_bsh = model.embedding_norm(x_bsh)
        if model.positions is not None:
            x_bsh = x_bsh + model.positions(positions_bs)
        return x_bsh


def _layers(model: RankModel) -> nn.ModuleList:
    [chunk] = model.chunks
    assert isinstance(chunk, nn.ModuleList)
    return chunk


def _cached(layer: nn.Module, slots: Slots) -> CachedAttention:
    attention = layer.self_attention
    assert isinstance(attention, (SelfAttention, LatentAttention))
    return CachedAttention(attention, slots)


def _at(
    ropes: Mapping[int, RotaryEmbedding | None], positions_bs: Tensor
) -> dict[int, RotaryEmbedding | None]:
    """Return the rotation of every layer at given positions."""
    placed = {rope: rope.at(positions_bs) for rope in ropes.values() if rope is not None}
    return {index: None if rope is None else placed[rope] for index, rope in ropes.items()}


def _check_length(config: ModelSettings, longest: int) -> None:
    if config.positions.position_embedding_type == "learned_absolute":
        most = config.positions.max_position_embeddings
        if longest > most:
            raise ValueError(
                f"{longest} tokens, prompt and answer together, are more than the {most} positions "
                "of this model: shorten the prompt, or ask for fewer tokens"
            )


def _rank_model(
    config: ModelSettings, rank: int, ranks: int, dtype: torch.dtype, device: torch.device
) -> RankModel:
    """Return a rank's part of the model, with weights that are not set yet."""
    stages = [(owner, 0) for owner in range(ranks)]
    placement = place(
        config,
        stages,
        rank,
        layers=distribute(LayerDistribution("remainder"), config.num_layers, ranks),
        padded_vocab_size=-(-config.vocab_size // ranks) * ranks,
        vocabulary_shard=(rank, ranks),
    )
    return RankModel(config, placement, Site(device, dtype))


WAIT: Final = timedelta(minutes=10)
"""How long a rank waits for another rank."""


def connected(place: Launched) -> Groups:
    """Return this rank's view of the job: a pipeline of all ranks that were launched."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
    if place.world_size == 1:
        return single_rank(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=WAIT)
    return make_groups(Grid(pipeline_size=place.world_size), device, WAIT, (0, 0))
