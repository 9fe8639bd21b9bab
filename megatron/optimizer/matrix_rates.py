"""Rules for matrices inside the model, whose rates the maximal update parametrisation scales.

A rule has one rate for its masters, and one for the vocabulary layers. So matrices inside the model
have a rule of their own, which takes ``matrix_lr`` for its rate. Adam's epsilon is scaled as the
gradients of these matrices are: by 1 / width multiplier (arXiv 2203.03466, appendix B.3).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from megatron.model.ownership import (
    OUTPUT_LAYER,
    POSITION_EMBEDDINGS,
    WORD_EMBEDDINGS,
    OwnedParameter,
)
from megatron.optimizer.mixed_precision import Master, Rule, Step
from megatron.optimizer.settings import OptimizerSettings

MakeRule = Callable[[Sequence[Master], OptimizerSettings], Rule]
"""Returns the rule for some masters, at least one."""


def is_inside(owned: OwnedParameter) -> bool:
    """Return whether both sides of a matrix grow with the width of the model.

    As in Megatron-LM that holds for all matrices but those of embeddings and the output layer. The
    matrix of a router counts, too.
    """
    at_the_ends = owned.name.startswith((WORD_EMBEDDINGS, POSITION_EMBEDDINGS, OUTPUT_LAYER))
    return len(owned.global_shape) > 1 and not at_the_ends


def rules_by_width(
    masters: Sequence[Master], config: OptimizerSettings, make: MakeRule
) -> list[Rule]:
    """Return one rule for all masters, or two in the maximal update parametrisation.

    Args:
        masters: at least one.
        config: with the width multiplier.
        make: makes a rule.
    """
    if config.width_mult == 1:
        return [make(masters, config)]
    matrices = [master for master in masters if is_inside(master.owned)]
    others = [master for master in masters if not is_inside(master.owned)]
    of_matrices = replace(config, adam_eps=config.adam_eps / config.width_mult)
    made: list[Rule] = [make(others, config)] if others else []
    return [*made, _AtMatrixRate(make(matrices, of_matrices))] if matrices else made


class _AtMatrixRate:
    """A rule that steps at the rate of matrices inside the model.

    Args:
        rule: for such matrices.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self.rounds = rule.rounds

    @property
    def kept(self) -> Mapping[str, Mapping[str, Tensor]]:
        """As in ``Rule``."""
        return self._rule.kept

    def step(self, step: Step) -> None:
        """As in ``Rule``."""
        rates = step.rates
        lr = rates.lr if rates.matrix_lr is None else rates.matrix_lr
        self._rule.step(replace(step, rates=replace(rates, lr=lr)))
