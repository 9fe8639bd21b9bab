"""Muon updates the parameters that Megatron-Core's Muon updates, and Adam all others."""

import re
from dataclasses import replace
from importlib import import_module
from typing import Any, Final
from unittest import mock

import pytest
from correctness.rank_runs import make_pipeline_groups
from correctness.short_runs import Job, Layout
from harness.megatron_core import core_on_cpu, core_ranks, needs_core
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions

from megatron.optimizer.make import takes_muon
from megatron.run.run_config import RunConfig
from megatron.training.setup import build_train_state

SHAPE: Final[dict[str, Any]] = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
}
MODELS: Final[dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]] = {
    "gpt": ({}, {"position_embedding_type": "learned_absolute"}, {}),
    "untied": (
        {},
        {
            "position_embedding_type": "learned_absolute",
            "share_embeddings_and_output_weights": False,
        },
        {"tie_embeddings": False},
    ),
    "mixture": (
        {"num_moe_experts": 4, "add_bias_linear": False, "num_query_groups": 2},
        {"position_embedding_type": "rope"},
        {
            "num_experts": 4,
            "add_bias_linear": False,
            "num_query_groups": 2,
            "position_embedding_type": "rope",
        },
    ),
}
"""By name: fields of Megatron-Core's configuration, of its model, and of ours."""


class SplitError(Exception):
    """Ends Megatron-Core's function once it has split the parameters."""


def their_model(kind: str) -> Any:
    fields, options, _ = MODELS[kind]
    configure = import_module("megatron.core.transformer.transformer_config").TransformerConfig
    specs = import_module("megatron.core.models.gpt.gpt_layer_specs")
    own = configure(
        **SHAPE,
        **fields,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    return import_module("megatron.core.models.gpt.gpt_model").GPTModel(
        own,
        specs.get_gpt_layer_local_spec(num_experts=own.num_moe_experts),
        vocab_size=32,
        max_sequence_length=8,
        **({"share_embeddings_and_output_weights": True} | options),
    )


def their_choice(rank: int, world_size: int, *, kind: str) -> dict[str, bool]:
    """Every parameter's name, and whether Megatron-Core's own code gives it to Muon.

    Megatron-Core freezes the parameters of Adam before it asks for Muon's groups of parameters.
    """
    with core_on_cpu(), core_ranks(1):
        muon = import_module("megatron.core.optimizer.muon")
        settings = import_module("megatron.core.optimizer.optimizer_config").OptimizerConfig
        model, found = their_model(kind), dict[str, bool]()

        def groups(*_: Any) -> None:
            found.update({name: own.requires_grad for name, own in model.named_parameters()})
            raise SplitError

        replaced = mock.patch.multiple(
            muon, HAVE_EMERGING_OPTIMIZERS=True, _get_param_groups=groups
        )
        with replaced, pytest.raises(SplitError):
            muon.get_megatron_muon_optimizer(settings(optimizer="muon", lr=1e-3), [model])
    return {re.sub(r"local_experts\.\d+\.", "", name): takes for name, takes in found.items()}


def our_choice(rank: int, world_size: int, *, config: RunConfig) -> dict[str, bool]:
    state = build_train_state(config, make_pipeline_groups())
    found = {own.name: takes_muon(own) for own in state.parameters}
    state.pipeline.close()
    return found


@pytest.mark.parametrize("kind", MODELS)
def test_muon_takes_what_megatron_core_gives_to_muon(kind: str, ranks: RankPool) -> None:
    needs_core()
    [theirs] = ranks.run(their_choice, 1, kind=kind)
    options = GPTOptions(num_layers=2, vocab_size=32, **MODELS[kind][2])
    config = Job(options).config(Layout(1, "none"))
    config = replace(config, optimizer=replace(config.optimizer, optimizer="muon"))
    [ours] = ranks.run(our_choice, 1, config=config)
    assert ours == theirs
    assert set(theirs.values()) == {True, False}
    assert theirs.get("embedding.position_embeddings.weight", True), "no vocabulary, two dimensions"
