"""The training loop around the plain GPT, with PyTorch's own AdamW and gradient clipping."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from reference import plain_experts, plain_loss
from reference.plain_gpt import GPTOptions, Parameters
from reference.plain_loss import Microbatch, losses_and_gradients


@dataclass(frozen=True)
class AdamWOptions:
    """The optimizer's constants; the names are those of the command line.

    Attributes:
        weight_decay: decoupled decay of matrices; vectors (biases, norms) do not decay.
        adam_beta1: first-moment decay.
        adam_beta2: second-moment decay.
        adam_eps: added to the root of the second moment.
        clip_grad: limit of the global gradient norm; 0 switches clipping off.
    """

    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    clip_grad: float = 1.0


class Optimizer(Protocol):
    """Another optimizer than AdamW."""

    def step(self, weights: Mapping[str, torch.Tensor], learning_rate: float) -> None:
        """Update weights from their ``.grad``."""


@dataclass(frozen=True, eq=False)
class Training:
    """What a training run left behind.

    Attributes:
        losses: mean loss of every iteration, before its update.
        gradient_norms: global norm of every iteration, before clipping.
        first_gradients: gradients of the first iteration by name, before clipping.
        parameters: the parameters after the last update, by name.
        depth_losses: of every iteration, those of the depths of multi-token prediction.
        layer_losses: of every iteration, those of routers by name, without their coefficients.
        imbalances: of every iteration, the largest imbalance of experts; none without experts.
        expert_loads: of every iteration and layer with experts, the tokens of each expert.
        biases: of experts for the choice, after the last update, by the name of the mixture.
    """

    losses: list[float]
    gradient_norms: list[float]
    first_gradients: Parameters
    parameters: Parameters
    depth_losses: list[list[float]]
    layer_losses: list[dict[str, float]] = field(default_factory=list)
    imbalances: list[float] = field(default_factory=list)
    biases: Parameters = field(default_factory=dict)
    expert_loads: list[list[tuple[float, ...]]] = field(default_factory=list)


def train(
    parameters: Parameters,
    global_batches: Sequence[Sequence[Microbatch]],
    learning_rates: Sequence[float],
    options: GPTOptions,
    adamw: AdamWOptions,
    optimizer: Optimizer | None = None,
) -> Training:
    """Train on every global batch once, in order.

    Args:
        parameters: initial values, left as they are; their dtype is that of the whole run.
        global_batches: for every iteration its microbatches.
        learning_rates: for every iteration its learning rate.
        options: the model.
        adamw: the optimizer, and the limit of the gradient norm.
        optimizer: steps instead of AdamW.

    Returns:
        Losses, gradients and final parameters.
    """
    weights = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    optimizer = optimizer or _AdamW(weights, adamw)
    losses, depth_losses, gradient_norms, first_gradients = [], [], [], None
    layer_losses, imbalances, expert_loads = [], [], []
    plain_experts.biases.clear()
    for microbatches, learning_rate in zip(global_batches, learning_rates, strict=True):
        (loss, *further), gradients = losses_and_gradients(weights, microbatches, options)
        if first_gradients is None:
            first_gradients = {name: gradient.clone() for name, gradient in gradients.items()}
        for name, weight in weights.items():
            weight.grad = gradients[name]
        # Clips to clip_grad / (norm + 1e-6), as Megatron does.
        limit = adamw.clip_grad or float("inf")
        gradient_norms.append(torch.nn.utils.clip_grad_norm_(weights.values(), limit).item())
        with torch.no_grad():
            optimizer.step(weights, learning_rate)
        losses.append(loss)
        depth_losses.append(further)
        layer_losses.append(dict(plain_loss.layer_losses))
        loads = plain_experts.loads
        expert_loads.append([tuple(load_e.tolist()) for load_e in loads.values()])
        if loads:
            imbalances.append(max(float(own.max() / own.mean()) for own in loads.values()))
        if options.moe_router_enable_expert_bias:
            for name, load_e in loads.items():
                change_e = options.moe_router_bias_update_rate * (load_e.mean() - load_e).sign()
                plain_experts.biases[name] = plain_experts.biases.get(name, 0.0) + change_e
    assert first_gradients is not None, "no global batch"
    final = {name: weight.detach() for name, weight in weights.items()}
    biases = dict(plain_experts.biases)
    plain_experts.biases.clear()
    return Training(
        losses,
        gradient_norms,
        first_gradients,
        final,
        depth_losses,
        layer_losses,
        imbalances,
        biases,
        expert_loads,
    )


class _AdamW:
    """PyTorch's AdamW.

    Args:
        weights: by name.
        options: the optimizer's constants.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], options: AdamWOptions) -> None:
        groups: list[dict[str, Any]] = [
            {"params": [weight for weight in weights.values() if weight.dim() > 1]},
            {
                "params": [weight for weight in weights.values() if weight.dim() == 1],
                "weight_decay": 0.0,
            },
        ]
        self._optimizer = torch.optim.AdamW(
            groups,
            weight_decay=options.weight_decay,
            betas=(options.adam_beta1, options.adam_beta2),
            eps=options.adam_eps,
        )

    def step(self, weights: Mapping[str, torch.Tensor], learning_rate: float) -> None:
        """Update weights from their ``.grad``."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
