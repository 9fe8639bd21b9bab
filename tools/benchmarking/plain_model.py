"""A GPT in plain PyTorch modules, with the initial weights of this project's model.

Shapes: b batch, s sequence, h hidden, a heads, d channels of a head.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron.layers.site import Site
from megatron.layers.vocabulary.shard import VocabularyShard
from megatron.model.placement import Placement
from megatron.model.settings import ModelSettings
from megatron.model.stage import RankModel
from tools.benchmarking.case import SEED, BenchmarkCase


class Attention(nn.Module):
    """Causal attention by PyTorch's own kernel."""

    def __init__(self, config: ModelSettings) -> None:
        super().__init__()
        h = config.hidden_size
        self.channels = config.attention.kv_channels
        self.linear_qkv = nn.Linear(h, 3 * h)
        self.linear_proj = nn.Linear(h, h)

    def forward(self, x_bsh: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        batch, tokens, _ = x_bsh.shape
        qkv = self.linear_qkv(x_bsh).view(batch, tokens, -1, 3, self.channels)  # heads here
        q_basd, k_basd, v_basd = qkv.permute(3, 0, 2, 1, 4).unbind(0)
        context = functional.scaled_dot_product_attention(q_basd, k_basd, v_basd, is_causal=True)
        projected: Tensor = self.linear_proj(context.transpose(1, 2).flatten(2))
        return projected


class MLP(nn.Module):
    """h -> 4h -> h around the GELU."""

    def __init__(self, config: ModelSettings) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(config.hidden_size, config.mlp.ffn_hidden_size)
        self.linear_fc2 = nn.Linear(config.mlp.ffn_hidden_size, config.hidden_size)

    def forward(self, x_bsh: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        inner = functional.gelu(self.linear_fc1(x_bsh), approximate="tanh")
        projected: Tensor = self.linear_fc2(inner)
        return projected


class Layer(nn.Module):
    """A pre-norm block."""

    def __init__(self, config: ModelSettings) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden_size, config.norm.norm_epsilon)
        self.self_attention = Attention(config)
        self.pre_mlp_layernorm = nn.LayerNorm(config.hidden_size, config.norm.norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x_bsh: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        x_bsh = x_bsh + self.self_attention(self.input_layernorm(x_bsh))
        y_bsh: Tensor = x_bsh + self.mlp(self.pre_mlp_layernorm(x_bsh))
        return y_bsh


class Embedding(nn.Module):
    """The sum of a token's row and its position's."""

    def __init__(self, config: ModelSettings) -> None:
        super().__init__()
        h = config.hidden_size
        self.position_embeddings = nn.Embedding(config.positions.max_position_embeddings, h)
        self.word_embeddings = nn.Embedding(config.vocab_size, h)

    def forward(self, tokens_bs: Tensor) -> Tensor:
        """[b, s] -> [b, s, h]."""
        words_bsh: Tensor = self.word_embeddings(tokens_bs)
        return words_bsh + self.position_embeddings.weight[: tokens_bs.shape[1]]


class Stage(nn.Module):
    """Consecutive layers, with the embedding before the first and the loss after the last.

    The parameters have the names that ``RankModel.owned_parameters`` gives them. The loss is part
    of the last stage: as the loss function of a PyTorch schedule it would keep the logits of all
    microbatches to the end of the iteration.

    Args:
        config: a model like GPT-2 with untied embeddings.
        layers: global indices.
    """

    def __init__(self, config: ModelSettings, layers: range) -> None:
        super().__init__()
        h = config.hidden_size
        self.is_first = layers.start == 0
        self.is_last = layers.stop == config.num_layers
        decoder: dict[str, nn.Module] = {
            "layers": nn.ModuleDict({str(i): Layer(config) for i in layers})
        }
        if self.is_first:
            self.embedding = Embedding(config)
        if self.is_last:
            decoder["final_layernorm"] = nn.LayerNorm(h, config.norm.norm_epsilon)
            self.output_layer = nn.Linear(h, config.vocab_size, bias=False)
        self.decoder = nn.ModuleDict(decoder)

    def forward(self, x: Tensor, targets_bs: Tensor) -> Tensor:
        """Run the stage.

        Args:
            x: token ids [b, s] for the first stage, else the previous stage's output [b, s, h].
            targets_bs: read by the last stage.

        Returns:
            [b, s, h]; of the last stage the mean loss.
        """
        if self.is_first:
            x = self.embedding(x)
        for layer in self.decoder["layers"].children():
            x = layer(x)
        if not self.is_last:
            return x
        logits = self.output_layer(self.decoder["final_layernorm"](x))
        return functional.cross_entropy(logits.flatten(0, 1), targets_bs.flatten())


def make_stage(case: BenchmarkCase, index: int, stages: int, device: torch.device) -> Stage:
    """Build stage ``index`` of ``stages``, with the initial weights of this project's model."""
    config = case.model_config()
    first, last = (config.num_layers * i // stages for i in (index, index + 1))
    layers = range(first, last)
    with torch.device("meta"):
        stage = Stage(config, layers)
    vocabulary = VocabularyShard.of(config.vocab_size, config.vocab_size, 0, 1)
    placement = Placement(
        chunks=(layers,),
        first_chunk=0 if stage.is_first else None,
        last_chunk=0 if stage.is_last else None,
        norm_chunk=0 if stage.is_last else None,
        input_shard=vocabulary if stage.is_first else None,
        output_shard=vocabulary if stage.is_last else None,
    )
    ours = RankModel(config, placement, Site(device, case.torch_dtype))
    ours.initialise(SEED)
    stage.load_state_dict({own.name: own.parameter for own in ours.owned_parameters()}, assign=True)
    return stage
