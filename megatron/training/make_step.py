"""The way to train an iteration that a configuration asks for."""

from megatron.config.log import LogConfig
from megatron.optimizer.config import OptimizerConfig
from megatron.training.post_validated_step import PostValidatedTrainStep
from megatron.training.setup import TrainState
from megatron.training.step import Figures, SynchronousTrainStep, TrainStep


def make_train_step(
    config: OptimizerConfig,
    state: TrainState,
    log: LogConfig | None = None,
    *,
    ends_if_not_finite: bool = True,
) -> TrainStep:
    """Return the way that ``config`` asks for; a single rank gains nothing from a guess.

    Args:
        config: whether steps are post-validated.
        state: this rank.
        log: which figures of the model are logged; ``None``: no more than loss and norm.
        ends_if_not_finite: an iteration with a loss or gradient norm that is not finite ends the
            run; otherwise it takes no step. With a loss scale that changes it never ends the run,
            as in Megatron: the scale is found by overflows.
    """
    scaling = config.loss_scale
    ends_if_not_finite = ends_if_not_finite and (scaling is None or scaling.constant is not None)
    figures = Figures(state)
    if log is not None:
        figures = Figures(state, log.log_num_zeros_in_grad, log.log_params_norm)
    if config.post_validation and state.groups.pipeline.size > 1:
        return PostValidatedTrainStep(state, config.clip_grad, figures, ends_if_not_finite)
    return SynchronousTrainStep(state, figures, ends_if_not_finite)
