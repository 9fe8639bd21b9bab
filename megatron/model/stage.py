"""The parts of the model that one pipeline rank owns, and the forward of its stages.

A rank owns one chunk of transformer layers for each of its stages. The first stage also owns the
position table, the last stage the final norm and the layers of multi-token prediction; a plan may
place norm and prediction on an earlier stage, which has the model's last layer or follows it. The
vocabulary matrices are on the stages that use them, shared by the stage's tensor-parallel ranks, or
every rank of the replica holds a shard of them. The backward, the order of passes and
communication belong to the runtime, which runs these parts as passes.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from megatron.layers.dropout import dropout
from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.layers.forward_pass import PLAIN_PASS, ForwardPass
from megatron.layers.gathered_weight import GatheredWeight
from megatron.layers.rope import RotaryEmbedding, Rotation
from megatron.layers.site import Site
from megatron.layers.vocabulary.input_layer import InputLayer
from megatron.layers.vocabulary.output_layer import OutputLayer
from megatron.layers.vocabulary.output_s import LossOptions
from megatron.layers.vocabulary.shard import VocabularyShard
from megatron.model.borders import Borders
from megatron.model.build_layer import build_layer
from megatron.model.eight_bits import EightBitLayer, EightBitLayers, linear_layers
from megatron.model.init import initialise
from megatron.model.maximal_update import in_usual_terms
from megatron.model.mtp import MultiTokenPrediction
from megatron.model.ownership import (
    EMBEDDING_NORM,
    FINAL_NORM,
    MULTI_TOKEN_PREDICTION,
    OUTPUT_LAYER,
    POSITION_EMBEDDINGS,
    WORD_EMBEDDINGS,
    OwnedBuffer,
    OwnedParameter,
    layer_prefix,
    owned_by,
)
from megatron.model.parts import rotation_of
from megatron.model.placement import Placement
from megatron.model.settings import ModelSettings
from megatron.parallel.box import Box, Piece


class RankModel(nn.Module):
    """The parts of the model on one rank.

    Args:
        config: the model.
        placement: the parts that this rank owns.
        site: device, dtype, ranks and kernels of the parts.
        vocab_recompute: the output layer keeps no logits or exponentials from S to T; T computes
            them again.
        borders: sees where the layers of a chunk begin and end; ``None``: nobody looks.

    Attributes:
        config: the model in the usual terms (``maximal_update``).
        tensor: the ranks that share the layers.
        context: the ranks that share every sequence.
        kernels: of the device and the dtype.
        stream_dtype: of the residual stream.
        recomputation: runs the layers of a chunk.
        input_layer: word embeddings, on the first stage or on every rank.
        ahead_layer: word embeddings of the following tokens, on the stage of multi-token prediction
            or on every rank. If the rank has an input layer, both are the same layer.
        output_layer: on the last stage or on every rank.
        eight_bits: the layers that multiply in 8 bits, if there are any.
    """

    def __init__(
        self,
        config: ModelSettings,
        placement: Placement,
        site: Site,
        *,
        vocab_recompute: bool = False,
        borders: Borders | None = None,
    ) -> None:
        super().__init__()
        config = in_usual_terms(config)
        self.config, self.placement, self._site = config, placement, site
        self.tensor, self.context = site.tensor, site.context
        self.kernels, self.stream_dtype = site.kernels, site.stream_dtype
        self.recomputation, self._borders = site.recomputation, borders or Borders()
        self.ropes = _ropes(config, placement, site)
        self.chunks = nn.ModuleList(
            nn.ModuleList(build_layer(config, index, site) for index in layers)
            for layers in placement.chunks
        )
        self.input_layer = self.output_layer = None
        if placement.input_shard is not None:
            self.input_layer = self._make_input_layer(placement.input_shard)
        if placement.output_shard is not None:
            self.output_layer = self._make_output_layer(placement.output_shard, vocab_recompute)
        self.ahead_layer = self._make_ahead_layer()
        self.positions = self.embedding_norm = self.final_norm = self.mtp = None
        h, norm = config.hidden_size, config.norm
        if placement.first_chunk is not None:
            if config.vocabulary.embed_layernorm:
                self.embedding_norm = norm.build(h, site)
            if config.positions.position_embedding_type == "learned_absolute":
                self.positions = nn.Embedding(
                    config.positions.max_position_embeddings,
                    h,
                    dtype=site.dtype,
                    device=site.device,
                )
        if placement.norm_chunk is not None:
            self.final_norm = norm.build(h, site, of_stream=True)
            if config.further.mtp_num_layers:
                self.mtp = MultiTokenPrediction(config, site)
        self.eight_bits: EightBitLayers | None = None
        if site.eight_bits is not None:
            layers = self._layers_in_eight_bits(site.eight_bits)
            self.eight_bits = EightBitLayers(site.eight_bits, layers, site)

    def _layers_in_eight_bits(
        self, eight_bits: EightBitSettings
    ) -> Iterator[tuple[str, EightBitLayer]]:
        """Yield the linear layers of this rank that multiply in 8 bits."""
        for chunk in range(len(self.chunks)):
            for index, layer in self._numbered_layers(chunk):
                if eight_bits.has(index, self.config.num_layers):
                    yield from linear_layers(layer, layer_prefix(index))
        if self.mtp is not None:
            yield from linear_layers(self.mtp, MULTI_TOKEN_PREDICTION)

    def gathered_weights(self) -> dict[int, GatheredWeight]:
        """Return the weights that replicas may gather in 8 bits, by the ``id`` of parameters."""
        return {} if self.eight_bits is None else self.eight_bits.gathered_weights()

    def begin(self, *, training: bool) -> None:
        """Begin an iteration of training or evaluation; weights may have other values now."""
        self.train(training)
        if self.eight_bits is not None:
            self.eight_bits.begin(training=training)

    def _make_input_layer(
        self, shard: VocabularyShard, weight: nn.Parameter | None = None
    ) -> InputLayer:
        site = self._site
        return InputLayer(
            shard, self.config.hidden_size, self.kernels, site.dtype, site.device, weight
        )

    def _make_output_layer(self, shard: VocabularyShard, recompute: bool) -> OutputLayer:
        config, site = self.config, self._site
        options = LossOptions(
            config.vocab_size,
            config.vocabulary.label_smoothing,
            config.vocabulary.z_loss_coeff,
            config.vocabulary.logit_softcap,
        )
        if config.vocabulary.tie_embeddings and self.input_layer is not None:
            weight = self.input_layer.weight
        else:
            shape = (shard.rows, config.hidden_size)
            weight = nn.Parameter(torch.empty(shape, dtype=site.dtype, device=site.device))
        return OutputLayer(shard, weight, options, self.kernels, recompute, site.rooms())

    def _make_ahead_layer(self) -> InputLayer | None:
        shard, output_layer = self.placement.ahead_shard, self.output_layer
        if shard is None:
            return None
        if self.input_layer is not None:
            return self.input_layer
        if self.config.vocabulary.tie_embeddings and output_layer is not None:
            return self._make_input_layer(shard, output_layer.weight)
        return self._make_input_layer(shard)

    @property
    def mtp_num_layers(self) -> int:
        """Further tokens that every token predicts besides the next one, D."""
        return self.config.further.mtp_num_layers

    @property
    def mtp_loss_scaling_factor(self) -> float:
        """Weight of the mean of the further tokens' losses."""
        return self.config.further.mtp_loss_scaling_factor

    @property
    def embedding_copy(self) -> InputLayer | OutputLayer | None:
        """This rank's layer with a copy of the embedding matrix of another rank, if it has one.

        The gradients of all copies must be summed, and this copy does not count in the norm.
        """
        if self.input_layer is not None:
            return None
        tied = self.output_layer if self.config.vocabulary.tie_embeddings else None
        return tied or self.ahead_layer

    def forward(self, chunk: int, x_bsh: Tensor, forward_pass: ForwardPass = PLAIN_PASS) -> Tensor:
        """Run one stage: from the embedding or the previous stage's output to its own output.

        Input and output have the tokens of this rank. With multi-token prediction the output of the
        stage that predicts, and of the stages after it, has b more samples for every depth. Dropout
        is seeded by layer and microbatch, so that it does not depend on the placement.

        Args:
            chunk: chunk of this rank.
            x_bsh: word embeddings on the first stage, else the previous stage's output.
            forward_pass: the data of the pass, such as positions and seeds.
        """
        config, seeds = self.config, forward_pass.seeds
        if chunk == self.placement.first_chunk:
            x_bsh = self._embedding(x_bsh, forward_pass.positions_bs)
            x_bsh = dropout(x_bsh, config.block.hidden_dropout, seeds, "embedding", self._site)
        ropes, of_layers = self._ropes_at(chunk, forward_pass.positions_bs), forward_pass.of_layers

        def run(own: tuple[int, nn.Module], x_bsh: Tensor) -> Tensor:
            y_bsh: Tensor = own[1](x_bsh, of_layers.in_layer(own[0], ropes[own[0]]))
            return y_bsh

        x_bsh = self._borders.begin(x_bsh, run)
        layers = list(self._numbered_layers(chunk))
        x_bsh = self.recomputation.run(layers, run, x_bsh, forward_pass.left_out)
        x_bsh = self._borders.end(x_bsh)
        if chunk == self.placement.norm_chunk:
            assert self.final_norm is not None
            x_bsh = self.final_norm(x_bsh)
            if forward_pass.ahead_bwh is not None:
                assert self.mtp is not None
                x_bsh = self.mtp(x_bsh, forward_pass)
            # Logits are products with this output, so its factor is the factor of the logits.
            if config.vocabulary.logit_multiplier != 1:
                x_bsh = x_bsh * config.vocabulary.logit_multiplier
        return x_bsh

    def _ropes_at(
        self, chunk: int, positions_bs: Tensor | None
    ) -> Mapping[int, RotaryEmbedding | None]:
        """Return the rotation of every layer of a chunk, for tokens at given positions."""
        if positions_bs is None:
            return self.ropes
        own = {index: self.ropes[index] for index in self.placement.chunks[chunk]}
        placed = {rope: rope.at(positions_bs) for rope in dict.fromkeys(own.values()) if rope}
        return {index: placed[rope] if rope else None for index, rope in own.items()}

    def _embedding(self, x_bsh: Tensor, positions_bs: Tensor | None) -> Tensor:
        """Return the input of the first layer, without dropout, from the word embeddings."""
        if self.config.vocabulary.embedding_multiplier != 1:
            x_bsh = x_bsh * self.config.vocabulary.embedding_multiplier
        if self.embedding_norm is not None:
            x_bsh = self.embedding_norm(x_bsh)
        x_bsh = x_bsh.to(self.stream_dtype)
        if self.positions is not None:
            x_bsh = x_bsh + self._own_positions(x_bsh.shape[1], positions_bs)
        return x_bsh

    def _own_positions(self, count: int, positions_bs: Tensor | None) -> Tensor:
        """Return the position embeddings of this rank's tokens, [(b,) u, h].

        Args:
            count: number u of these tokens.
            positions_bs: positions of all tokens; ``None``: 0, 1, 2, ...
        """
        assert self.positions is not None
        if positions_bs is not None:
            return self.tensor.own_tokens(self.positions(positions_bs))
        table_bsh = self.positions.weight[None, : count * self.tensor.sequence_parts]
        return self.tensor.own_tokens(table_bsh)[0]

    def _numbered_layers(self, chunk: int) -> Iterator[tuple[int, nn.Module]]:
        """Return the layers of a chunk with their indices in the whole model."""
        layers = self.chunks[chunk]
        assert isinstance(layers, nn.ModuleList)
        return zip(self.placement.chunks[chunk], layers, strict=True)

    def all_layers(self) -> Iterator[tuple[int, nn.Module]]:
        """Yield every layer with its index; depths of multi-token prediction follow the last."""
        for chunk in range(len(self.chunks)):
            yield from self._numbered_layers(chunk)
        if self.mtp is not None:
            yield from enumerate(self.mtp.layers, self.config.num_layers)

    def initialise(self, seed: int, *, on_cpu: bool = False) -> None:
        """Draw all weights: the same numbers for every placement; see ``model.init``.

        Args:
            seed: the run's seed.
            on_cpu: whether the CPU also draws weights that are on a GPU.
        """
        for owned in self.owned_parameters():
            initialise(owned, self.config, seed, on_cpu=on_cpu)

    def owned_parameters(self) -> Iterator[OwnedParameter]:
        """Yield every parameter of this rank once, with the boxes of the whole model's tensor."""
        if self.input_layer is not None:
            yield self._vocabulary_matrix(WORD_EMBEDDINGS, self.input_layer)
        yield from self._owned(f"{EMBEDDING_NORM}.", self.embedding_norm)
        yield from self._owned(f"{POSITION_EMBEDDINGS}.", self.positions)
        for chunk in range(len(self.chunks)):
            for index, layer in self._numbered_layers(chunk):
                yield from self._owned(layer_prefix(index), layer)
        yield from self._owned(f"{FINAL_NORM}.", self.final_norm)
        yield from self._owned(f"{MULTI_TOKEN_PREDICTION}.", self.mtp)
        if self.output_layer is not None and not self.config.vocabulary.tie_embeddings:
            yield self._vocabulary_matrix(OUTPUT_LAYER, self.output_layer)
        if self.embedding_copy is not None:
            yield self._vocabulary_matrix(WORD_EMBEDDINGS, self.embedding_copy, is_copy=True)

    def owned_buffers(self) -> Iterator[OwnedBuffer]:
        """Yield every tensor of this rank's layers that no gradient reaches."""
        for chunk in range(len(self.chunks)):
            for index, layer in self._numbered_layers(chunk):
                for name, buffer in layer.named_buffers():
                    yield OwnedBuffer(layer_prefix(index) + name, buffer)
        if self.mtp is not None:
            for name, buffer in self.mtp.named_buffers():
                yield OwnedBuffer(f"{MULTI_TOKEN_PREDICTION}.{name}", buffer)

    def shared_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that all microbatches share: parameters, buffers, rotations."""
        yield from self.parameters()
        yield from self.buffers()
        for rope in self.ropes.values():
            if rope is not None:
                yield from rope.tables

    def _owned(self, prefix: str, module: nn.Module | None) -> Iterator[OwnedParameter]:
        """Yield the parameters of a part of the model, if this rank has the part."""
        return iter(()) if module is None else owned_by(module, prefix, self.tensor)

    def _vocabulary_matrix(
        self, name: str, layer: InputLayer | OutputLayer, *, is_copy: bool = False
    ) -> OwnedParameter:
        """Return the matrix of a vocabulary layer, with its shard's real rows as one box."""
        shard, h = layer.shard, self.config.hidden_size
        box = Box((shard.first_real_row, 0), (shard.real_rows, h))
        return OwnedParameter(
            name, layer.weight, (shard.vocab_size, h), (Piece(box, (0, 0)),), is_copy
        )


def _ropes(
    config: ModelSettings, placement: Placement, site: Site
) -> dict[int, RotaryEmbedding | None]:
    """Return the rotation of every layer of this rank; equal rotations share a table."""
    tables: dict[Rotation | None, RotaryEmbedding | None] = {None: None}
    rotations = {i: rotation_of(config, i) for own in placement.chunks for i in own}
    for rotation in rotations.values():
        if rotation is not None and rotation not in tables:
            tables[rotation] = rotation.build(site)
    return {index: tables[rotation] for index, rotation in rotations.items()}
