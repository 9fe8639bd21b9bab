"""The training loop around the plain GPT, with PyTorch's own AdamW and gradient clipping."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from reference.plain_gpt import GPTOptions, Parameters
from reference.plain_loss import Microbatch, loss_and_gradients


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


@dataclass(frozen=True, eq=False)
class Training:
    """What a training run left behind.

    Attributes:
        losses: mean loss of every iteration, before its update.
        gradient_norms: global norm of every iteration, before clipping.
        first_gradients: gradients of the first iteration by name, before clipping.
        parameters: the parameters after the last update, by name.
    """

    losses: list[float]
    gradient_norms: list[float]
    first_gradients: Parameters
    parameters: Parameters


def train(
    parameters: Parameters,
    global_batches: Sequence[Sequence[Microbatch]],
    learning_rates: Sequence[float],
    options: GPTOptions,
    adamw: AdamWOptions,
) -> Training:
    """Train on every global batch once, in order.

    Args:
        parameters: initial values, left as they are; their dtype is that of the whole run.
        global_batches: for every iteration its microbatches.
        learning_rates: for every iteration its learning rate.
        options: the model.
        adamw: the optimizer.

    Returns:
        Losses, gradients and final parameters.
    """
    weights = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    matrices = [weight for weight in weights.values() if weight.dim() > 1]
    vectors = [weight for weight in weights.values() if weight.dim() == 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups,
        weight_decay=adamw.weight_decay,
        betas=(adamw.adam_beta1, adamw.adam_beta2),
        eps=adamw.adam_eps,
    )
    losses, gradient_norms, first_gradients = [], [], None
    for microbatches, learning_rate in zip(global_batches, learning_rates, strict=True):
        loss, gradients = loss_and_gradients(weights, microbatches, options)
        if first_gradients is None:
            first_gradients = {name: gradient.clone() for name, gradient in gradients.items()}
        for name, weight in weights.items():
            weight.grad = gradients[name]
        # Clips to clip_grad / (norm + 1e-6), as Megatron does.
        limit = adamw.clip_grad or float("inf")
        gradient_norms.append(torch.nn.utils.clip_grad_norm_(weights.values(), limit).item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        losses.append(loss)
    assert first_gradients is not None, "no global batch"
    final = {name: weight.detach() for name, weight in weights.items()}
    return Training(losses, gradient_norms, first_gradients, final)
