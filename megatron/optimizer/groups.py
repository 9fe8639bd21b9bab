"""Groups of masters with the same rates, as PyTorch's optimizers want them."""

from collections.abc import Sequence
from typing import Any

import torch

from megatron.optimizer.lr_schedule import Rates
from megatron.optimizer.mixed_precision import Master


def groups_of(masters: Sequence[Master]) -> list[dict[str, Any]]:
    """Return groups by whether masters decay, and whether they are of the vocabulary layers."""
    groups: dict[tuple[bool, bool], dict[str, Any]] = {}
    for master in masters:
        key = decays, in_vocabulary = master.part.weight_decay, master.in_vocabulary
        group = groups.setdefault(
            key, {"params": [], "decays": decays, "in_vocabulary": in_vocabulary}
        )
        group["params"].append(master.weight)
    return list(groups.values())


def set_rates(optimizer: torch.optim.Optimizer, rates: Rates) -> None:
    """Give the groups of ``groups_of`` the rates of a step."""
    for group in optimizer.param_groups:
        group["lr"] = rates.vocabulary_lr if group["in_vocabulary"] else rates.lr
        group["weight_decay"] = rates.weight_decay if group["decays"] else 0.0
