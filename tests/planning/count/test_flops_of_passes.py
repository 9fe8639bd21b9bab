"""What all ranks compute for a microbatch is what the model needs, wherever a part of it is."""

from itertools import product
from typing import Any

import pytest
from planning.count.counting import (
    FURTHER,
    LLAMA,
    MODEL,
    counted,
    flops_of,
    plan_of,
    run_of,
)

from megatron.layers.eight_bit_settings import EightBitSettings, Recipe
from megatron.model.flops import iteration_flops
from megatron.parallel.context_settings import ContextRankSettings
from megatron.parallel.settings import TensorRankSettings
from megatron.schedules.treatments import TREATMENTS

SAMPLES = 3
MIXTURE = LLAMA.replaced(num_experts=8, moe_ffn_hidden_size=32, moe_router_topk=2)

MODELS = {"gpt": MODEL, "llama": LLAMA, "further tokens": FURTHER}
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "t 2": {"tensor": TensorRankSettings(2)},
    "t 2 on split sequences": {"tensor": TensorRankSettings(2, True)},
    "c 2": {"context": ContextRankSettings(2)},
    "t 2 and c 2": {"tensor": TensorRankSettings(2), "context": ContextRankSettings(2)},
}


REFUSED = {("further tokens", "c 2"), ("further tokens", "t 2 and c 2")}


def uneven(stages: int) -> list[int]:
    """Return all layers on the first and the last stage."""
    return [8] if stages == 1 else [3, *[0] * (stages - 2), 5]


@pytest.mark.one_in(7)
@pytest.mark.parametrize(
    ("treatment", "ranks", "schedule", "model", "layout"),
    [
        pytest.param(*case, id=", ".join(map(str, case)))
        for case in product(TREATMENTS, (1, 2, 4), ("1f1b", "zb-v"), MODELS, LAYOUTS)
        if case[-2:] not in REFUSED
    ],
)
def test_all_passes_together_are_the_flops_of_a_microbatch(
    treatment: str, ranks: int, schedule: str, model: str, layout: str
) -> None:
    sizes = LAYOUTS[layout]
    run = run_of(MODELS[model], treatment, ranks, SAMPLES, sizes=sizes)
    counts = counted(run, uneven(len(plan_of(run, schedule).stages)), schedule)
    sharing = run.parallel.tensor.size * run.parallel.context.size
    assert sharing * flops_of(counts) == iteration_flops(run.model, SAMPLES)


LATENT = MIXTURE.replaced(
    multi_latent_attention=True,
    kv_channels=32,
    q_lora_rank=48,
    kv_lora_rank=32,
    qk_head_dim=16,
    qk_pos_emb_head_dim=16,
    v_head_dim=32,
)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("wide", [False, True], ids=["all products", "but for W's"])
def test_products_in_8_bits_have_as_many_flops_as_in_16(wide: bool, recipe: Recipe) -> None:
    own = EightBitSettings("hybrid", recipe, wide_weight_gradients=wide)
    for model in (LLAMA, MIXTURE, LATENT):
        counts = counted(run_of(model, "vocab-2", 2, eight_bits=own), [4, 4], "zb-h1")
        assert flops_of(counts) == iteration_flops(model, 1)
