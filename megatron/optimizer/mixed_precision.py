"""Steps on *masters*: full-precision copies of the weights.

Each part of a bf16 or fp16 parameter has an fp32 master, which a step updates and then rounds to
the weight. An fp32 weight is its own master. A *rule* updates masters: AdamW, SGD or Muon. An
optimizer may have several rules, each for some of the masters.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron.model.ownership import OUTPUT_LAYER, WORD_EMBEDDINGS, OwnedParameter
from megatron.optimizer.grad_norm import clip_coefficient
from megatron.optimizer.lr_schedule import Rates
from megatron.optimizer.optimizer import check_norm
from megatron.optimizer.parameters import ParameterPart


@dataclass(frozen=True)
class Master:
    """The full-precision copy of a part of a parameter, which a rule updates.

    Attributes:
        part: the part of a parameter.
        weight: the part's weight in full precision. The gradient is its ``.grad`` if both have the
            same dtype.
        decays: whether weight decay applies.
    """

    part: ParameterPart
    weight: Tensor
    decays: bool

    @property
    def name(self) -> str:
        """Name of the parameter in the whole model."""
        return self.part.name

    @property
    def owned(self) -> OwnedParameter:
        """The parameter that contains the part."""
        return self.part.owned

    @property
    def gradient(self) -> Tensor:
        """The gradient, of the weight's shape; bf16 if main gradients are bf16."""
        return self.part.gradient

    @property
    def in_vocabulary(self) -> bool:
        """Whether the parameter is the input or the output layer's, with its own learning rate."""
        return self.name in (WORD_EMBEDDINGS, OUTPUT_LAYER)


@dataclass(frozen=True)
class Step:
    """The numbers of a step.

    Attributes:
        rates: learning rates and weight decay.
        divisors: numbers by which the gradients are divided, one after the other; at most two.
        number: number of the step since the start of the training, from 1.
    """

    rates: Rates
    divisors: tuple[float, ...]
    number: int


class Rule(Protocol):
    """A way to update some masters.

    Attributes:
        rounds: whether a step also rounds the masters to weights of another dtype.
    """

    rounds: bool

    @property
    def kept(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The rule's tensors by master name and tensor name, each of the master's shape.

        A step changes only these tensors and the masters for good.
        """
        ...

    def step(self, step: Step) -> None:
        """Update the masters from their gradients.

        The divided gradients replace the gradients if the step may be undone and taken again.
        """
        ...


Decays = Callable[[OwnedParameter], bool]
"""Returns whether a parameter decays."""

MakeRules = Callable[[Sequence[Master]], Sequence[Rule]]
"""Returns the rules for some masters; every master has exactly one rule."""


class MixedPrecisionOptimizer:
    """Updates parts of parameters by rules; an ``Optimizer``.

    Args:
        parts: parts of parameters of any floating-point dtype, at least one; the storage of their
            weights and gradients never changes.
        clip_grad: limit of the global gradient norm; 0 switches clipping off.
        rules: for the parts' masters.
        decays: tells which parameters decay.
    """

    def __init__(
        self, parts: Sequence[ParameterPart], clip_grad: float, rules: MakeRules, decays: Decays
    ) -> None:
        self._clip_grad = clip_grad
        self._rounded: list[Tensor] = []  # the bf16 or fp16 parameters ...
        self._masters: list[Tensor] = []  # ... and their masters, in the same order
        masters = [Master(part, self._master_of(part), decays(part.owned)) for part in parts]
        self._by_name = {master.name: master.weight for master in masters}
        self._rules = rules(masters)
        self._steps = self._saved_steps = 0
        self._saved: list[Tensor] = []

    def _master_of(self, part: ParameterPart) -> Tensor:
        """Return the full-precision tensor to update; see ``Master``."""
        master = part.weight
        full = torch.promote_types(part.weight.dtype, torch.float32)
        if full != part.weight.dtype:
            master = part.weight.to(full)
            self._rounded.append(part.weight)
            self._masters.append(master)
        if part.gradient.dtype == full:
            master.grad = part.gradient
        return master

    @torch.no_grad()
    def step(self, rates: Rates, grad_norm: float, factor: float = 1.0) -> None:
        """As in ``Optimizer``."""
        check_norm(grad_norm)
        self._steps += 1
        step = Step(rates, divisors_of(factor, grad_norm, self._clip_grad), self._steps)
        for rule in self._rules:
            rule.step(step)
        # Weights of rules that have rounded get the same bits once more.
        if not all(rule.rounds for rule in self._rules):
            self._round()

    def tensors_of(self, name: str) -> dict[str, Tensor]:
        """As in ``Optimizer``: the master, and its rule's tensors."""
        found = {"weight": self._by_name[name]}
        for rule in self._rules:
            found |= rule.kept.get(name, {})
        return found

    @property
    def steps(self) -> int:
        """As in ``Optimizer``."""
        return self._steps

    @torch.no_grad()
    def loaded(self, steps: int) -> None:
        """As in ``Optimizer``."""
        self._steps = steps
        self._round()

    @torch.no_grad()
    def save(self) -> None:
        """As in ``Optimizer``.

        The copy takes as much memory as masters and rule tensors: 12 bytes a parameter with AdamW
        and fp32 masters. The next call reuses this memory. Copying takes about as long as a step.
        """
        state = self._state()
        if not self._saved:
            self._saved = list(map(torch.empty_like, state))
        torch._foreach_copy_(self._saved, state)
        self._saved_steps = self._steps

    @torch.no_grad()
    def restore(self) -> None:
        """As in ``Optimizer``."""
        assert self._saved, "nothing was saved"
        torch._foreach_copy_(self._state(), self._saved)
        self._steps = self._saved_steps
        # Weights are not saved: each is its master, rounded.
        self._round()

    def _state(self) -> list[Tensor]:
        """Return all tensors that a step changes for good, always in the same order."""
        by_master = [own for rule in self._rules for own in rule.kept.values()]
        return [*self._by_name.values(), *(tensor for own in by_master for tensor in own.values())]

    def _round(self) -> None:
        if self._masters:
            torch._foreach_copy_(self._rounded, self._masters)


def divisors_of(factor: float, grad_norm: float, clip_grad: float) -> tuple[float, ...]:
    """Return the numbers by which a step divides gradients, one after the other; see ``Step``.

    A step that corrects a guess finds the factor already applied (``post_validation``). So factor
    and clipping are always two divisors, which gives the same bits with and without a guess. A
    factor that is a power of two causes no rounding, so both may be one divisor.
    """
    clipping = clip_coefficient(grad_norm, clip_grad)
    mantissa, _ = math.frexp(factor)
    # ``frexp`` gives the mantissa 0.5 to powers of two alone.
    scales = [factor * clipping] if mantissa == 0.5 else [factor, clipping]
    return tuple(1.0 / scale for scale in scales if scale != 1.0)


@dataclass(frozen=True)
class Group:
    """Masters with the same rates, which one call of PyTorch's fused kernels updates.

    Attributes:
        masters: at least one.
        decays: whether the weights decay.
        in_vocabulary: whether the masters belong to the vocabulary layers.
    """

    masters: tuple[Master, ...]
    decays: bool
    in_vocabulary: bool

    @property
    def weights(self) -> list[Tensor]:
        """The masters' weights in full precision."""
        return [master.weight for master in self.masters]

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients of ``weights``, in the same order."""
        return [master.gradient for master in self.masters]

    def lr(self, rates: Rates) -> float:
        """Return the learning rate of a step."""
        return rates.vocabulary_lr if self.in_vocabulary else rates.lr

    def weight_decay(self, rates: Rates) -> float:
        """Return the weight decay of a step."""
        return rates.weight_decay if self.decays else 0.0


def groups_of(masters: Sequence[Master]) -> list[Group]:
    """Group masters by whether they decay, and whether they belong to the vocabulary layers."""
    found: dict[tuple[bool, bool], list[Master]] = {}
    for master in masters:
        found.setdefault((master.decays, master.in_vocabulary), []).append(master)
    return [Group(tuple(own), *key) for key, own in found.items()]
