"""Converted models in the words of the plain reference, which is another than our program."""

from dataclasses import fields
from pathlib import Path
from unittest.mock import patch

import torch
from reference import plain_experts
from reference.plain_gpt import GPTOptions, Parameters, logits

from megatron.checkpoint.boxed import BoxedTensor
from megatron.checkpoint.choose import read_model
from megatron.checkpoint.foreign.layouts import tensor_shapes
from megatron.checkpoint.reading import TensorReader, read_boxes
from megatron.flags.tree import values_of
from megatron.model.settings import ModelSettings
from megatron.parallel.box import whole


def our_logits(where: Path, tokens_bs: torch.Tensor) -> torch.Tensor:
    """Logits [b, s, V] of the plain GPT with the weights of a checkpoint, in fp32."""
    options, parameters = options_of(read_model(where)), weights(where)
    ending = ".router.expert_bias"
    biases = {
        name.removesuffix(ending): parameters[name] for name in parameters if name.endswith(ending)
    }
    with patch.dict(plain_experts.biases, biases):
        return logits(parameters, tokens_bs, options)


def options_of(model: ModelSettings) -> GPTOptions:
    """The same model in the words of the plain reference."""
    known, layers = {field.name for field in fields(GPTOptions)}, range(model.num_layers)
    own = {name: value for name, value in values_of(model).items() if name in known}
    dtype, positions = model.experts.moe_router_dtype, model.positions
    is_rope = positions.position_embedding_type == "rope"
    return GPTOptions(
        **own
        | {
            "swiglu": model.mlp.activation == "swiglu",
            "geglu": model.mlp.activation == "geglu",
            "quick_geglu": model.mlp.activation == "quick_geglu",
            "squared_relu": model.mlp.activation == "squared_relu",
            "exact_gelu": model.mlp.activation == "exact_gelu",
            "relu": model.mlp.activation == "relu",
            "window_pattern": tuple(map(int, map(model.attention.is_local, layers))),
            "no_rope_pattern": tuple(
                int(is_rope and not positions.rotates(layer)) for layer in layers
            ),
            "moe_layer_pattern": tuple(map(int, map(model.experts.in_layer, layers))),
            "moe_router_num_groups": model.experts.moe_router_num_groups or 1,
            "moe_router_group_topk": model.experts.moe_router_group_topk or 1,
            "moe_router_in_fp32": dtype == "fp32",
            "moe_router_in_fp64": dtype == "fp64",
        }
    )


def weights(where: Path) -> Parameters:
    """The weights of a checkpoint, in fp32."""
    reader = TensorReader(where)
    found = {}
    for name, shape in tensor_shapes(read_model(where)).items():
        found[name] = torch.empty(shape)
        boxed = BoxedTensor(found[name], shape, whole(shape))
        read_boxes({f"weight.{name}": boxed}, reader, reader.metadata)
    return found
