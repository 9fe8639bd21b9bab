"""Small models for tests that ask for shapes and bytes: sizes, and a whole model on one device."""

from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.layers.main_grad import give_main_grad
from megatron.layers.site import Site
from megatron.model.placement import place
from megatron.model.settings import ModelSettings
from megatron.model.stage import RankModel
from megatron.planning.count.recorder import ONLY_IN_PLACE

ROWS: Final = 128
"""Of the vocabulary's matrix, padding included."""

GPT: Final = ModelSettings.of(
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=256,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=16,
    seq_length=32,
    max_position_embeddings=32,
    vocab_size=100,
)


def llama_of(gpt: ModelSettings, **options: Any) -> ModelSettings:
    """Return a Llama of the same sizes with two groups of queries, and perhaps other options."""
    return gpt.replaced(
        num_query_groups=2,
        position_embedding_type="rope",
        normalization="RMSNorm",
        activation="swiglu",
        add_bias_linear=False,
        tie_embeddings=False,
        **options,
    )


LLAMA: Final = llama_of(GPT)


def whole_model(
    config: ModelSettings,
    site: Site,
) -> RankModel:
    """Return all layers and embeddings on one device, with sums of gradients.

    Args:
        config: the model; its vocabulary has at most ``ROWS`` entries.
        site: of the layers.
    """
    placement = place(
        config,
        [(0, 0)],
        0,
        layers=[config.num_layers],
        padded_vocab_size=ROWS,
        vocabulary_shard=None,
    )
    model = RankModel(config, placement, site)
    give_main_grads(model)
    return model


def give_main_grads(model: RankModel) -> None:
    """Give every parameter a sum of its gradients in fp32."""
    for owned in model.owned_parameters():
        parameter = owned.parameter
        give_main_grad(parameter, torch.empty(parameter.shape, device=parameter.device))


class Operators(TorchDispatchMode):
    """Notes the operators that the code within it calls.

    Attributes:
        names: of the operators with their namespaces, in order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # TorchDispatchMode has no types
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and note its name."""
        self.names.append(function._schema.name)
        if function.name() in ONLY_IN_PLACE:
            return None
        return function(*args, **(kwargs or {}))
