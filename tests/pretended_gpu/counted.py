"""The launches of a stage and of vocabulary layers: by a pretended GPU, or counted on ``meta``.

Where experts are spread over ranks, both assume that all experts have equally many rows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import torch
from harness.small_models import GPT, llama_of, whole_model
from pretended_gpu.gpu import DEVICE, PretendedGpu
from pretended_gpu.launches import Counter, adds
from pretended_gpu.rank import alone
from torch import Tensor, nn

from megatron.kernels.choose import kernels_for
from megatron.kernels.counted import CountedGpu, counted_kernels
from megatron.kernels.face import Kernels
from megatron.kernels.softmax import LossOptions
from megatron.layers.dropout import DropoutSeeds
from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.layers.forward_pass import ForwardPass
from megatron.layers.main_grad import give_main_grad
from megatron.layers.patterns import LayerPattern
from megatron.layers.recompute import Recomputation
from megatron.layers.site import Site
from megatron.layers.slices import SeenKeys, SequenceSlice, SlicedPass
from megatron.layers.vocabulary.input_layer import InputLayer
from megatron.layers.vocabulary.output_layer import OutputLayer
from megatron.layers.vocabulary.shard import VocabularyShard
from megatron.layers.weight_gradients import defer_weight_gradients
from megatron.model.settings import ModelSettings
from megatron.model.stage import RankModel
from megatron.parallel.experts import ExpertParallel, spread_experts
from megatron.parallel.groups import ConnectedAxis
from megatron.parallel.settings import Dispatcher
from megatron.planning.count.assumed_routes import AssumedExchange, AssumedGathering
from megatron.planning.count.recorder import ListedGroup

HOPPER: Final = CountedGpu(has_cudnn_attention=True, has_block_products=True)
"""The generation of the pretended GPU."""

Where = Literal["pretended GPU", "meta"]

Launches = list[tuple[str, int, int]]
"""Name, bytes and FLOPs of every launch."""

LLAMA: Final = llama_of(GPT, attention_dropout=0.0, hidden_dropout=0.0)

MIXTURE: Final = LLAMA.replaced(
    num_experts=4,
    moe_ffn_hidden_size=32,
    moe_router_topk=2,
    moe_aux_loss_coeff=(0.01,),
    moe_shared_expert_intermediate_size=16,
)

LATENTS: Final = LLAMA.replaced(
    position_embedding_type="rope",
    multi_latent_attention=True,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_head_dim=16,
    qk_pos_emb_head_dim=8,
    v_head_dim=16,
    kv_channels=24,
    num_query_groups=LLAMA.attention.num_attention_heads,
    qk_layernorm=True,
)

GPT_OSS: Final = MIXTURE.replaced(
    activation="quick_geglu",
    activation_func_clamp_value=7.0,
    glu_linear_offset=1.0,
    add_bias_linear=True,
    softmax_type="learnable",
    window_size=8,
    window_attn_skip_freq=LayerPattern(listed=(1, 0)),
)


@dataclass(frozen=True)
class Case:
    """A model.

    Attributes:
        config: of the model.
        dtype: of activations.
        options: of the site.
        dispatcher: brings tokens to experts that are spread over two ranks; ``None``: they are not.
        slices: of a microbatch, all of which run forward and then backward.
    """

    config: ModelSettings
    dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = field(default_factory=dict)
    dispatcher: Dispatcher | None = None
    slices: int = 1


CASES: Final = {
    "gpt": Case(GPT),
    "gpt in fp32": Case(GPT, torch.float32),
    "llama": Case(LLAMA),
    "llama in fp32": Case(LLAMA, torch.float32),
    "squared relu": Case(GPT.replaced(activation="squared_relu")),
    "norms of queries and keys": Case(LLAMA.replaced(qk_layernorm=True)),
    "ReLU": Case(GPT.replaced(activation="relu")),
    "no norms before": Case(LLAMA.replaced(pre_layernorm=False, post_mlp_layernorm=True)),
    "no norms before a wide stream": Case(
        LLAMA.replaced(pre_layernorm=False, post_mlp_layernorm=True), options={"wide_stream": True}
    ),
    "factors and norms without biases": Case(
        GPT.replaced(add_bias_norm=False, residual_multiplier=0.3, logit_multiplier=0.3)
    ),
    "slices": Case(LLAMA, slices=4),
    "slices in fp32": Case(LLAMA, torch.float32, slices=4),
    "slices with sinks": Case(LLAMA.replaced(softmax_type="learnable"), slices=2),
    "ALiBi": Case(GPT.replaced(position_embedding_type="alibi", attention_dropout=0.0)),
    "window": Case(LLAMA.replaced(window_size=8)),
    "long rows": Case(replace(LLAMA, hidden_size=16384)),
    "multi-token prediction": Case(LLAMA.replaced(mtp_num_layers=1)),
    "layers again": Case(GPT, options={"recomputation": Recomputation(group=1)}),
    "parts again": Case(
        LLAMA,
        options={"recomputation": Recomputation(frozenset(("core_attn", "layernorm", "mlp")))},
    ),
    "wide stream": Case(LLAMA, options={"wide_stream": True}),
    "mixture": Case(MIXTURE),
    "mixture in fp32": Case(MIXTURE.replaced(moe_router_dtype="fp32"), torch.float32),
    "mixture with a wide router": Case(MIXTURE.replaced(moe_router_dtype="fp32")),
    "mixture again": Case(
        MIXTURE, options={"recomputation": Recomputation(frozenset(("moe", "layernorm")))}
    ),
    "mixture by exchange": Case(MIXTURE, dispatcher="alltoall"),
    "mixture by gathering": Case(MIXTURE, dispatcher="allgather"),
    "latents": Case(LATENTS),
    "latents in fp32, without a rank of queries": Case(
        LATENTS.replaced(q_lora_rank=None), torch.float32
    ),
    "heads of latents again": Case(
        LATENTS, options={"recomputation": Recomputation(frozenset(("mla_up_proj", "layernorm")))}
    ),
    "gpt-oss": Case(GPT_OSS),
    "gpt-oss in fp32": Case(GPT_OSS, torch.float32),
    "8 bits": Case(LLAMA, options={"eight_bits": EightBitSettings("hybrid")}),
    "mixture in 8 bits": Case(MIXTURE, options={"eight_bits": EightBitSettings("hybrid")}),
    "8 bits by tensors": Case(
        GPT, options={"eight_bits": EightBitSettings("hybrid", "tensorwise")}
    ),
    "8 bits by blocks": Case(
        LLAMA, options={"eight_bits": EightBitSettings("hybrid", "blockwise")}
    ),
    "8 bits by 32 numbers": Case(
        LLAMA, options={"eight_bits": EightBitSettings("hybrid", "mxfp8")}
    ),
    "8 bits by blocks, many rows": Case(
        LLAMA.replaced(
            hidden_size=128,
            kv_channels=64,
            num_attention_heads=2,
            num_query_groups=1,
            seq_length=2048,
            max_position_embeddings=2048,
        ),
        options={"eight_bits": EightBitSettings("hybrid", "blockwise")},
    ),
}


PLAIN: Final = LossOptions(100)
EVERYTHING: Final = LossOptions(100, label_smoothing=0.1, z_loss_coeff=1e-4, logit_softcap=30.0)


@dataclass(frozen=True)
class Output:
    """An output layer.

    Attributes:
        loss: options of the loss.
        recompute: T forms the logits again.
        barriers: of the treatment: 1, 2, or 0 for the naive one.
    """

    loss: LossOptions = PLAIN
    recompute: bool = False
    barriers: int = 1


OUTPUTS: Final = {
    "vocab-2": Output(),
    "vocab-2 again": Output(recompute=True),
    "vocab-2 with all options": Output(EVERYTHING),
    "vocab-2 smoothed": Output(LossOptions(100, label_smoothing=0.1)),
    "vocab-1": Output(barriers=2),
    "vocab-1 again with all options": Output(EVERYTHING, recompute=True, barriers=2),
    "naive": Output(EVERYTHING, barriers=0),
}

SHARD: Final = VocabularyShard.of(100, 128, 1, 2)


def launches(where: Where, rank: int) -> dict[str, dict[str, Launches]]:
    """Return the launches of every part of every case, and of the vocabulary layers."""
    return {
        **{name: _of_case(where, case) for name, case in CASES.items()},
        **{name: _of_output(where, case) for name, case in OUTPUTS.items()},
        "input layer": _of_input(where),
    }


@contextmanager
def _device(
    where: Where,
) -> Iterator[tuple[torch.device, Callable[[torch.dtype], Kernels]]]:
    """Give a device that is there meanwhile, and a function that returns its kernels."""
    if where == "meta":
        yield torch.device("meta"), lambda dtype: counted_kernels(dtype, HOPPER)
    else:
        with PretendedGpu() as gpu, alone(gpu):
            yield DEVICE, lambda dtype: kernels_for(DEVICE, dtype)


def _of(counter: Counter) -> dict[str, Launches]:
    return {
        name: [(each.name, each.bytes, each.flops) for each in part.launches]
        for name, part in counter.parts.items()
    }


def _of_case(where: Where, case: Case) -> dict[str, Launches]:
    with _device(where) as (device, kernels), Counter() as counter:
        own = kernels(case.dtype)
        chosen = own if where == "meta" else None
        experts = _spread(where, case.dispatcher, counter)
        site = Site(device, case.dtype, given_experts=experts, given_kernels=chosen, **case.options)
        model = whole_model(case.config, site)
        for parameter in {id(each): each for each in model.parameters()}.values():
            parameter.register_post_accumulate_grad_hook(adds(own))
        for name in ("whole", "split"):
            model.begin(training=True)
            _run(model, case, device, counter, name)
    return _of(counter)


def _spread(where: Where, dispatcher: Dispatcher | None, counter: Counter) -> ExpertParallel | None:
    """Return how tokens travel to experts on two ranks, the first of which is this one."""
    if dispatcher is None:
        return None
    axis = ConnectedAxis("experts", 0, (0, 1), ListedGroup(counter, "experts", 0, 2))
    nobody = ConnectedAxis("expert_tensor", 0, (0,))
    if where == "pretended GPU":
        return spread_experts(axis, nobody, nobody, dispatcher)
    kind = AssumedExchange if dispatcher == "alltoall" else AssumedGathering
    return kind(axis, nobody, nobody, counter)


def _run(model: RankModel, case: Case, device: torch.device, counter: Counter, name: str) -> None:
    config, work = case.config, list[Callable[[], None]]()
    defer_weight_gradients(model, work.append if name == "split" else None)
    tokens, depths = config.seq_length, config.further.mtp_num_layers
    x_bsh = _empty(case, device, 2, tokens)
    ahead_bwh = _empty(case, device, 2, tokens + depths - 1) if depths else None
    grad = _empty(case, device, 2 * (1 + depths), tokens)
    passes = list(_forward_passes(case, ahead_bwh))
    given = [x_buh.detach().requires_grad_() for x_buh in x_bsh.chunk(case.slices, 1)]
    gradients = [grad_buh.contiguous() for grad_buh in grad.chunk(case.slices, 1)]
    with counter.part(f"{name} F"):
        made = [model(0, x_buh, own) for x_buh, own in zip(given, passes, strict=True)]
    with counter.part(f"{name} B"):
        for y_buh, grad_buh in reversed([*zip(made, gradients, strict=True)]):
            torch.autograd.backward((y_buh,), (grad_buh,))
    with counter.part(f"{name} W"), torch.no_grad():
        for each in work:
            each()


def _forward_passes(case: Case, ahead_bwh: Tensor | None) -> Iterator[ForwardPass]:
    """Yield what the passes of the slices bring; they share the store of keys and values."""
    seeds, seen = DropoutSeeds(1, 0, 0), SeenKeys()
    length = case.config.seq_length // case.slices
    for part in SequenceSlice.of_lengths((length,) * case.slices):
        sliced = SlicedPass(part, seen) if case.slices > 1 else None
        yield ForwardPass(seeds, ahead_bwh=ahead_bwh, sliced=sliced)


def _of_output(where: Where, case: Output) -> dict[str, Launches]:
    with _device(where) as (device, kernels), Counter() as counter:
        layer = OutputLayer(
            SHARD, _matrix(device), case.loss, kernels(torch.bfloat16), case.recompute
        )
        x_nh, targets_n, weight_n = _tokens(device)
        with counter.part("S"):
            if case.barriers:
                state = layer.s(x_nh, targets_n, case.barriers == 1)
            else:
                state = layer.naive_s(x_nh, targets_n)
                layer.naive_e(state, weight_n)
        with counter.part("C1"):
            if case.barriers:
                merged, _ = layer.merge(
                    torch.empty(2, 4, len(x_nh), device=device), state, weight_n
                )
            else:
                merged = layer.merged_from(state.maximum_n, state.sums_kn)
        state.drop_gradient()
        with counter.part("T"):
            layer.t(state, merged, weight_n, form_gradient=case.barriers != 1)
    return _of(counter)


def _of_input(where: Where) -> dict[str, Launches]:
    with _device(where) as (device, kernels), Counter() as counter:
        weight = _matrix(device)
        own = kernels(weight.dtype)
        layer = InputLayer(SHARD, weight.shape[1], own, weight.dtype, device, weight)
        x_nh, targets_n, _ = _tokens(device)
        with counter.part("IF"):
            layer.lookup(targets_n)
        with counter.part("IB"):
            layer.add_gradient(targets_n, x_nh)
    return _of(counter)


def _matrix(device: torch.device) -> nn.Parameter:
    """Return a shard's matrix, with a sum of its gradients."""
    weight = nn.Parameter(torch.empty(SHARD.rows, 32, dtype=torch.bfloat16, device=device))
    give_main_grad(weight, torch.empty(weight.shape, device=device))
    return weight


def _tokens(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return activations, token ids and weights of 16 tokens."""
    return (
        torch.empty(16, 32, dtype=torch.bfloat16, device=device),
        torch.empty(16, dtype=torch.int64, device=device),
        torch.empty(16, device=device),
    )


def _empty(case: Case, device: torch.device, samples: int, tokens: int) -> Tensor:
    return torch.empty(samples, tokens, case.config.hidden_size, dtype=case.dtype, device=device)
