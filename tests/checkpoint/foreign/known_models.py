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
from megatron.parallel.box import whole


def our_logits(where: Path, tokens_bs: torch.Tensor) -> torch.Tensor:
    """Logits [b, s, V] of the plain GPT with the weights of a checkpoint, in fp32."""
    model, parameters = read_model(where), weights(where)
    known = {field.name for field in fields(GPTOptions)}
    options = GPTOptions(**{n: value for n, value in vars(model).items() if n in known})
    ending = ".router.expert_bias"
    biases = {
        name.removesuffix(ending): parameters[name] for name in parameters if name.endswith(ending)
    }
    with patch.dict(plain_experts.biases, biases):
        return logits(parameters, tokens_bs, options)


def weights(where: Path) -> Parameters:
    """The weights of a checkpoint, in fp32."""
    reader = TensorReader(where)
    found = {}
    for name, shape in tensor_shapes(read_model(where)).items():
        found[name] = torch.empty(shape)
        boxed = BoxedTensor(found[name], shape, whole(shape))
        read_boxes({f"weight.{name}": boxed}, reader, reader.metadata)
    return found
