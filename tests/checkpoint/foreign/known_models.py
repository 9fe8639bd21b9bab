"""Small random models of ``transformers``, and ours in the words of the plain reference."""

from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from reference.plain_gpt import GPTOptions, Parameters, logits

from megatron.checkpoint.boxed import BoxedTensor
from megatron.checkpoint.choose import read_model
from megatron.checkpoint.foreign.layouts import tensor_shapes
from megatron.checkpoint.reading import TensorReader, read_boxes
from megatron.parallel.box import whole

VOCABULARY = 99
"""Entries: a number that no number of ranks divides."""

_SIZES: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA_3: Final = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

CONFIGS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "gpt2": (
        "GPT2Config",
        {
            **{"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4},
            **{"n_positions": 64, "bos_token_id": 1, "eos_token_id": 2},
        },
    ),
    "llama 2": ("LlamaConfig", _SIZES),
    "llama 3": (
        "LlamaConfig",
        _SIZES
        | {"tie_word_embeddings": True, "rope_theta": 500000.0, "rope_scaling": _LLAMA_3}
        | {"max_position_embeddings": 10000, "head_dim": 16},
    ),
    "mistral": ("MistralConfig", _SIZES | {"head_dim": 16, "sliding_window": 7}),
    "qwen 2": (
        "Qwen2Config",
        _SIZES | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "qwen 3": ("Qwen3Config", _SIZES | {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma": ("GemmaConfig", _SIZES | {"head_dim": 16, "num_key_value_heads": 1}),
    "gemma 2": (
        "Gemma2Config",
        _SIZES
        | {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma 3": (
        "Gemma3TextConfig",
        _SIZES
        | {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24}
        | {"num_hidden_layers": 7, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
}
"""By family: the class of the configuration, and its fields."""


def random_model(family: str) -> Any:
    """A model without a special value among its parameters: no zero bias, no norm of one."""
    kind, values = CONFIGS[family]
    config = getattr(transformers, kind)(**values)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * (1.5 / parameter.shape[1] ** 0.5))
            else:
                parameter.add_(0.2 * noise)
    return model.eval()


def loaded_model(folder: Path) -> Any:
    """The model of ``transformers`` in a folder."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, attn_implementation="eager").eval()


@torch.no_grad()
def their_logits(model: Any, tokens_bs: torch.Tensor) -> torch.Tensor:
    """Logits [b, s, V] of a model of ``transformers``."""
    found: torch.Tensor = model(tokens_bs).logits
    return found


def our_logits(where: Path, tokens_bs: torch.Tensor) -> torch.Tensor:
    """Logits [b, s, V] of the plain GPT with the weights of a checkpoint, in fp32."""
    model, parameters = read_model(where), weights(where)
    known = {field.name for field in fields(GPTOptions)}
    options = GPTOptions(**{n: value for n, value in vars(model).items() if n in known})
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


def some_tokens(length: int = 20) -> torch.Tensor:
    """Two samples of tokens [2, length]."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(VOCABULARY, (2, length), generator=generator)
