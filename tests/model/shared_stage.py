"""One stage of a model, shared by tensor-parallel ranks: runs it, and puts the results together."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from optimizer.entries import entries
from parallel.tensor_axis import shared_by_all
from torch import Tensor

from megatron.kernels.choose import kernels_for
from megatron.layers.dropout import DropoutSeeds
from megatron.layers.forward_pass import ForwardPass
from megatron.layers.main_grad import main_grad_of
from megatron.layers.seeds import stable_seed
from megatron.layers.site import Site
from megatron.layers.weight_gradients import Defer, defer_weight_gradients
from megatron.model.ownership import OwnedParameter
from megatron.model.placement import Placement
from megatron.model.settings import ModelSettings
from megatron.model.stage import RankModel
from megatron.optimizer.bucket import Bucket
from megatron.parallel.box import Box, check_tiling
from megatron.parallel.tensor import ALONE, TensorParallel

CPU = torch.device("cpu")
GPT = ModelSettings.of(
    num_layers=2,
    hidden_size=24,
    ffn_hidden_size=40,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=6,
    seq_length=8,
    max_position_embeddings=8,
    vocab_size=100,
    attention_dropout=0.0,
    hidden_dropout=0.2,
    init_method_std=0.3,
)
LLAMA = GPT.replaced(
    num_attention_heads=8,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="swiglu",
    qk_layernorm=True,
    add_bias_linear=False,
    hidden_dropout=0.0,
)
QWEN = GPT.replaced(
    position_embedding_type="rope",
    activation="squared_relu",
    qk_layernorm=True,
    add_qkv_bias=True,
    add_bias_linear=False,
)
MODELS = {"gpt": GPT, "llama": LLAMA, "qwen": QWEN}

WHOLE = Placement((range(2),), first_chunk=0, last_chunk=0, norm_chunk=0)
"""All layers, the position table and the final norm, without the vocabulary."""

MIDDLE = Placement((range(1, 2),))
"""One layer and nothing else."""

MICROBATCHES, BATCH = 2, 3

Backward = Literal["fused", "split"]


@dataclass(frozen=True)
class Gradient:
    """A parameter's gradient on one rank, without the parameter itself.

    Attributes:
        boxes: of the whole tensor, each with its part of the gradient.
        shape: of the whole tensor.
        is_copy: as ``OwnedParameter``.
        is_partial: as ``OwnedParameter``.
    """

    boxes: tuple[tuple[Box, Tensor], ...]
    shape: tuple[int, ...]
    is_copy: bool
    is_partial: bool


@dataclass(frozen=True)
class StageRun:
    """What one rank has after the forward and the backward of some microbatches.

    Attributes:
        outputs: [b, u, h] of every microbatch.
        input_gradients: [b, u, h] of every microbatch.
        gradients: of every parameter, by its name in the whole model.
    """

    outputs: list[Tensor]
    input_gradients: list[Tensor]
    gradients: dict[str, Gradient]


def random_tensor(name: str, shape: Sequence[int]) -> Tensor:
    """The same numbers on every rank, float64."""
    generator = torch.Generator().manual_seed(stable_seed(5, name))
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)


def build(
    config: ModelSettings, placement: Placement, dtype: torch.dtype, tensor: TensorParallel = ALONE
) -> RankModel:
    """A stage with weights, none of them 0 or 1, that do not depend on the number of ranks."""
    model = RankModel(config, placement, Site(CPU, dtype, tensor=tensor))
    model.initialise(seed=11)
    with torch.no_grad():
        for owned in model.owned_parameters():
            if len(owned.global_shape) == 1:
                noise = random_tensor(owned.name, owned.global_shape)
                for box, part in owned.parts(owned.parameter):
                    part.add_(noise[box.slices], alpha=0.3)
    return model


def run_stage(
    config: ModelSettings,
    placement: Placement,
    dtype: torch.dtype,
    backward: Backward = "fused",
    tensor: TensorParallel = ALONE,
) -> StageRun:
    """Run F and B of all microbatches, with a split backward then all their W."""
    model = build(config, placement, dtype, tensor)
    parameters = [(owned.name, owned.parameter) for owned in model.owned_parameters()]
    bucket = Bucket(entries(parameters), kernels_for(CPU, dtype))
    deferred: list[Any] = []
    defer: Defer | None = deferred.append if backward == "split" else None
    defer_weight_gradients(model, defer)
    run = StageRun([], [], {})
    shape = (BATCH, config.seq_length, config.hidden_size)
    for number in range(MICROBATCHES):
        x_bsh, grad_bsh = (random_tensor(f"{of} {number}", shape).to(dtype) for of in "xg")
        x_buh = tensor.own_tokens(x_bsh).clone().requires_grad_()
        y_buh = model(0, x_buh, ForwardPass(DropoutSeeds(7, 3, number)))
        y_buh.backward(tensor.own_tokens(grad_bsh))
        assert x_buh.grad is not None
        run.outputs.append(y_buh.detach())
        run.input_gradients.append(x_buh.grad)
    for work in deferred:
        work()
    assert bucket.gradients.any()
    for owned in model.owned_parameters():
        run.gradients[owned.name] = _gradient(owned)
    return run


def _gradient(owned: OwnedParameter) -> Gradient:
    parts = tuple((box, part.clone()) for box, part in owned.parts(main_grad_of(owned.parameter)))
    return Gradient(parts, owned.global_shape, owned.is_copy, owned.is_partial)


def run_on_rank(
    rank: int, world_size: int, *, split_tokens: bool, **settings: Any
) -> dict[Backward, StageRun]:
    """Run a stage that all ranks of the pool share, with both kinds of backward."""
    with shared_by_all(split_tokens=split_tokens) as tensor:
        run = partial(run_stage, **settings, tensor=tensor)
        return {"fused": run(backward="fused"), "split": run(backward="split")}


def all_tokens(parts: Sequence[Tensor], split_tokens: bool) -> Tensor:
    """What the ranks have of all tokens; copies must be equal to the bit."""
    if split_tokens:
        return torch.cat(list(parts), dim=1)
    for part in parts:
        assert torch.equal(part, parts[0])
    return parts[0]


def assembled(runs: Sequence[StageRun], *, sums_partial: bool = True) -> dict[str, Tensor]:
    """The gradients of the whole model's parameters.

    Copies must be equal to the bit, and the boxes must tile every tensor.

    Args:
        runs: of all ranks.
        sums_partial: whether parts of sums are added up, as the runtime must do.
    """
    held: dict[str, list[Gradient]] = defaultdict(list)
    for run in runs:
        for name, gradient in run.gradients.items():
            held[name].append(gradient)
    return {name: _assembled(holders, sums_partial) for name, holders in held.items()}


def _assembled(holders: list[Gradient], sums_partial: bool) -> Tensor:
    first = holders[0].boxes[0][1]
    if len(holders) > 1 and any(holder.is_copy for holder in holders):
        assert [holder.is_copy for holder in holders] == [False] + [True] * (len(holders) - 1)
        parts = [holder.boxes[0][1] for holder in holders]
        if holders[0].is_partial:
            return torch.stack(parts).sum(0) if sums_partial else parts[0]
        for part in parts:
            assert torch.equal(part, first)
        return first
    assert not any(holder.is_partial for holder in holders)
    boxes = [pair for holder in holders for pair in holder.boxes]
    check_tiling(holders[0].shape, [box for box, _ in boxes])
    whole = torch.empty(holders[0].shape, dtype=first.dtype)
    for box, part in boxes:
        whole[box.slices] = part
    return whole
