"""AdamW on fp32 master weights, whatever the precision of the parameters.

Under bf16 each parameter has an fp32 master copy that is updated and rounded back; an fp32
parameter is its own master. The update itself is PyTorch's fused kernel: one pass over master,
gradient and both moments, with gradient clipping folded into it. On one CPU core (17 GB/s) a step
takes 160 ms per 100M bf16 parameters, of which rounding takes 45 ms. Slices that stay in cache were
no faster, since the kernel already runs at the speed of memory.
"""

from collections.abc import Sequence

import torch

from megatron.optimizer.config import OptimizerConfig
from megatron.optimizer.grad_norm import clip_coefficient
from megatron.optimizer.optimizer import check_norm
from megatron.optimizer.parameters import ParameterPart


class _FusedAdamW(torch.optim.AdamW):
    """Declares what PyTorch only reads: the scale that the fused kernel divides gradients by."""

    grad_scale: torch.Tensor | None


class MixedPrecisionAdamW:
    """Decoupled weight decay Adam; an ``Optimizer``.

    Args:
        parts: of bf16, fp32 or fp64 parameters, at least one; the storage of their weights and
            gradients never changes.
        config: moments, decay and the clipping limit; the rate comes with each step.
    """

    def __init__(self, parts: Sequence[ParameterPart], config: OptimizerConfig) -> None:
        self._clip_grad = config.clip_grad
        self._rounded: list[torch.Tensor] = []  # the bf16 parameters ...
        self._masters: list[torch.Tensor] = []  # ... and their masters, in the same order
        self._by_name: dict[str, torch.Tensor] = {}
        self._gradients = [part.gradient for part in parts]
        groups: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        for part in parts:
            master = self._by_name[part.name] = self._master_of(part)
            groups[part.weight_decay].append(master)
        self._adam = _FusedAdamW(
            [
                {"params": masters, "weight_decay": config.weight_decay if decays else 0.0}
                for decays, masters in groups.items()
                if masters
            ],
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,
        )
        for master in self._by_name.values():
            self._adam.state[master] = {
                "step": torch.zeros((), device=master.device),
                "exp_avg": torch.zeros_like(master, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(master, requires_grad=False),
            }
        self._saved: list[torch.Tensor] = []

    def _master_of(self, part: ParameterPart) -> torch.Tensor:
        """The full-precision tensor to update, with the main gradient as its ``.grad``."""
        master = part.weight
        if part.gradient.dtype != part.weight.dtype:
            master = part.weight.to(part.gradient.dtype)
            self._rounded.append(part.weight)
            self._masters.append(master)
        master.grad = part.gradient
        return master

    def step(self, lr: float, grad_norm: float, factor: float = 1.0) -> None:
        """As in ``Optimizer``; one pass of the fused kernel."""
        check_norm(grad_norm)
        # The fused kernel divides gradients by a scale, which is meant for loss scaling, and keeps
        # the quotients. This saves the pass over memory that a multiplication before would take.
        # A step that was taken on a guess has divided by the factor already, so factor and
        # clipping are two divisions, to the same bits in any case.
        divisors = [
            torch.full((), 1.0 / scale, device=self._device)
            for scale in (factor, clip_coefficient(grad_norm, self._clip_grad))
            if scale != 1.0
        ]
        if len(divisors) == 2:
            torch._foreach_div_(self._gradients, divisors[0])
        self._adam.grad_scale = divisors[-1] if divisors else None
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        self._round()

    def tensors_of(self, name: str) -> dict[str, torch.Tensor]:
        """As in ``Optimizer``: also the moments ``exp_avg`` and ``exp_avg_sq``."""
        master = self._by_name[name]
        state = self._adam.state[master]
        return {"weight": master} | {kind: state[kind] for kind in ("exp_avg", "exp_avg_sq")}

    @property
    def steps(self) -> int:
        """Steps taken since the start of the training, those before a checkpoint included."""
        return int(next(iter(self._adam.state.values()))["step"])

    @torch.no_grad()
    def loaded(self, steps: int) -> None:
        """Go on from tensors that were loaded, after so many steps."""
        for state in self._adam.state.values():
            state["step"].fill_(steps)
        self._round()

    @torch.no_grad()
    def save(self) -> None:
        """Keep masters, moments and step counts as they are, for ``restore``.

        The copy takes as much memory as they do, 12 bytes a parameter with fp32 masters, and is
        kept for the next copy. A copy takes about as long as a step.
        """
        state = self._state()
        if not self._saved:
            self._saved = list(map(torch.empty_like, state))
        torch._foreach_copy_(self._saved, state)

    @torch.no_grad()
    def restore(self) -> None:
        """Undo all steps since ``save``, to the last bit."""
        assert self._saved, "nothing was saved"
        torch._foreach_copy_(self._state(), self._saved)
        self._round()

    def _state(self) -> list[torch.Tensor]:
        """Everything that a step changes for good, always in the same order."""
        kept = [tensor for own in self._adam.state.values() for tensor in own.values()]
        return [*self._by_name.values(), *kept]

    def _round(self) -> None:
        if self._masters:
            torch._foreach_copy_(self._rounded, self._masters)

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._adam.param_groups[0]["params"][0].device
        return device
