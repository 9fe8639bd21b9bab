"""Checkpoints that the public Megatron-Core writes itself, in its format ``torch_dist``, are read.

The package is not among what the tests need: ``pip install megatron-core`` in an environment of
one's own, or its folder on ``PYTHONPATH``.
"""

import argparse
import multiprocessing
from importlib import import_module
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import torch
from checkpoint.foreign.known_models import our_logits, weights
from harness.megatron_core import core_on_cpu, core_ranks, needs_core
from harness.rank_pool import RankPool

from megatron.checkpoint.choose import choose
from megatron.commands.convert_checkpoint import main

V, PADDED, S = 29, 32, 12

SHAPE: Final[dict[str, Any]] = {
    "num_layers": 4,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
}
MODELS: Final[dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]] = {
    "gpt": ({}, {"position_embedding_type": "learned_absolute"}, {}),
    "llama": (
        {
            **{"num_query_groups": 2, "normalization": "RMSNorm", "add_bias_linear": False},
            **{"gated_linear_unit": True, "activation_func": torch.nn.functional.silu},
        },
        {
            **{"position_embedding_type": "rope", "share_embeddings_and_output_weights": False},
        },
        {
            **{"group_query_attention": True, "swiglu": True},
            **{"untie_embeddings_and_output_weights": True},
        },
    ),
}
"""By name: fields of their configuration, of their model, and what else their run would save."""


def write(rank: int, world_size: int, *, kind: str, where: str) -> dict[str, torch.Tensor]:
    """Save a model as Megatron-LM does; return the logits' tokens, the logits, and the weights."""
    fields, options, others = MODELS[kind]
    tokens = torch.arange(S)[None] * 5 % V
    with core_on_cpu(), core_ranks(1):
        configure = import_module("megatron.core.transformer.transformer_config").TransformerConfig
        specs = import_module("megatron.core.models.gpt.gpt_layer_specs")
        saving = import_module("megatron.core.dist_checkpointing")
        torch.manual_seed(0)
        own = configure(
            **SHAPE,
            **fields,
            use_cpu_initialization=True,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
        )
        normalization = own.normalization
        model = import_module("megatron.core.models.gpt.gpt_model").GPTModel(
            own,
            specs.get_gpt_layer_local_spec(normalization=normalization),
            vocab_size=PADDED,
            max_sequence_length=S,
            **({"share_embeddings_and_output_weights": True} | options),
        )
        arguments = {
            **SHAPE,
            **others,
            **{"seq_length": S, "max_position_embeddings": S, "padded_vocab_size": PADDED},
            **{"position_embedding_type": options["position_embedding_type"]},
            **{"normalization": normalization, "num_query_groups": own.num_query_groups},
            "add_bias_linear": own.add_bias_linear,
        }
        content = model.sharded_state_dict(prefix="")
        common = {"args": argparse.Namespace(**arguments), "iteration": 10}
        process: Any = multiprocessing.current_process()
        writer = import_module(f"{saving.__name__}.strategies.filesystem_async")
        with (
            mock.patch.dict(process._config, daemon=False),  # it writes in children
            multiprocessing.get_context("spawn").Manager() as manager,  # its own would outlive us
            mock.patch.object(writer, "_results_queue", manager.Queue()),
        ):
            saving.save(content | common, where)
        later = torch.ones(S, S, dtype=torch.bool).triu(1)[None, None]
        logits = model(tokens, torch.arange(S)[None], later)[..., :V].detach()
        named = {name: value.detach() for name, value in model.named_parameters()}
    return {"tokens": tokens, "logits": logits} | named


@pytest.mark.parametrize("kind", MODELS)
def test_what_the_package_saves_is_imported(kind: str, ranks: RankPool, tmp_path: Path) -> None:
    needs_core()
    where = tmp_path / "core" / "iter_0000010"
    where.mkdir(parents=True)
    (found,) = ranks.run(write, 1, kind=kind, where=str(where))
    main(["import-core", str(where), str(tmp_path / "ours"), "--vocab-size", str(V)])
    ours = choose(tmp_path / "ours", None)
    mine = weights(ours)
    for name, tensor in mine.items():
        assert torch.equal(tensor, found[name][: len(tensor)]), name
    assert found.keys() == mine.keys() | {"tokens", "logits"}
    difference = our_logits(ours, found["tokens"]) - found["logits"]
    assert difference.abs().max() < 1e-5
